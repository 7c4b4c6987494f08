"""mkdocs hook: a link from a page to a file of the repository, which the site does not hold, becomes the file's path in code.

A link to a file that does not exist stays as it is, and `strict` fails the build.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with links to files outside docs/ replaced."""
    return _OUTSIDE.sub(_as_path, markdown)


def _as_path(link: re.Match[str]) -> str:
    text, path = link[1], link[2]
    if not (ROOT / path).exists():
        return link[0]
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

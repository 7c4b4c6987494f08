"""The page of likely messages quotes messages that the code really has."""

import ast
import re

import pytest

from tests.docs.pages import DOCS, ROOT

HEADINGS = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def literals():
    """Every string of the code; the values in an f-string are left out."""
    found = []
    for package in ("flows", "grpo_tasks", "schemas"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(part.value for part in node.values if isinstance(part, ast.Constant)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return [re.sub(r"\s+", " ", text) for text in found]


def test_there_are_twenty_messages_and_more_each_once():
    assert len(HEADINGS) == len(set(HEADINGS)) >= 20


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_code_has_this_message(literals, heading):
    assert any(heading in text for text in literals)

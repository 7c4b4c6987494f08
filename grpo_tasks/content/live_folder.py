"""Where the live pages of stages lie, and the address at which a browser finds one. web/live_pages.py serves them."""

import os
import time
from contextlib import suppress
from pathlib import Path

FOLDER = "GRPO_LIVE"
"""Environment variable: the folder of the pages. `grpo up` sets it."""
KEPT_S = 30 * 24 * 3600.0
"""Time in seconds that a page stays after it was last written. The folder of its stage keeps its own copy."""


def live_folder() -> Path | None:
    """The folder of the pages; None where nobody serves them."""
    folder = os.environ.get(FOLDER)
    return Path(folder) if folder else None


def live_address(name: str) -> str | None:
    """Address of a page in the server that PREFECT_API_URL names; None where nobody serves it."""
    api = os.environ.get("PREFECT_UI_URL") or os.environ.get("PREFECT_API_URL", "").rstrip("/").removesuffix("/api")
    return f"{api.rstrip('/')}/live/{name}.html" if api and live_folder() else None


def remove_old_pages(folder: Path) -> None:
    """Remove the pages of stages that ended long ago: each stage adds one, and nobody else removes them."""
    for page in folder.glob("*.html"):
        with suppress(OSError):
            if time.time() - page.stat().st_mtime > KEPT_S:
                page.unlink()

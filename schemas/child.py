"""The contract between a step and its child process: a folder with spec.json in, files and maybe error.json out."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from schemas.errors import UserError

SPEC = "spec.json"
ERROR = "error.json"
RESULT = "result.json"


def run_child(work: Callable[[Path], None]) -> None:
    """Entry of a child process: `work` on the folder given as the only argument; errors of ours are left as JSON."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {sys.argv[0]} DIRECTORY (a folder with {SPEC})")
    directory = Path(sys.argv[1])
    (directory / ERROR).unlink(missing_ok=True)
    try:
        work(directory)
    except UserError as error:
        (directory / ERROR).write_text(error.to_json(), encoding="utf-8")
        traceback.print_exc()
        sys.exit(error.exit_code)

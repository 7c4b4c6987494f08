"""The contract between a step and its child process: a folder with spec.json in, files and maybe error.json out."""

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from grpo_tasks.processes.lifetime import die_with_parent
from schemas.errors import UserError, disk_full
from schemas.secret import hide_output

SPEC = "spec.json"
ERROR = "error.json"
RESULT = "result.json"
LOG = "log.txt"
"""What the child and the reward functions print."""
DISK_FULL = 28
"""Exit code of a child that had no room to write down what went wrong."""


def run_child(work: Callable[[Path], None]) -> None:
    """Entry of a child process: `work` on the folder given as the only argument; errors of ours are left as JSON."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {Path(sys.argv[0]).parent.name} DIRECTORY (a folder with {SPEC})")
    directory = Path(sys.argv[1])
    die_with_parent()
    hide_output()
    (directory / ERROR).unlink(missing_ok=True)
    try:
        try:
            work(directory)
        except UserError as error:
            (directory / ERROR).write_text(error.to_json(), encoding="utf-8")
            traceback.print_exc()
            sys.exit(error.exit_code)
    except Exception as error:
        if not disk_full(error):
            raise
        with suppress(OSError):
            traceback.print_exc()
        sys.exit(DISK_FULL)

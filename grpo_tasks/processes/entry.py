"""The contract between a step and its child process, `python -m MODULE DIRECTORY`: both know only the files in DIRECTORY.

spec.json    in: what to do
result.json  out: what came of it, beside the files that the step makes
error.json   out, instead of a result: the error that the user is shown
log.txt      out: everything that was printed
"""

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
"""Exit code of a child whose disk is full, where error.json cannot be written either; 28 is ENOSPC."""


def run_child(work: Callable[[Path], None]) -> None:
    """Main function of a child process: run `work` on the folder that is its only argument; write a `UserError` to error.json."""
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

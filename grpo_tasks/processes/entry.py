"""The contract between a step and its child process, `python -m MODULE DIRECTORY`: both know only the files in DIRECTORY.

spec.json    in: what to do
result.json  out: what came of it, beside the files that the step makes
error.json   out, instead of a result: the error that the user is shown
notices.txt  out, while it works: what the user should know, a line each
log.txt      out: everything that was printed
"""

import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_tasks.processes.lifetime import die_with_parent
from schemas.errors import Notice, UserError, disk_full
from schemas.secret import hide_output

SPEC = "spec.json"
ERROR = "error.json"
RESULT = "result.json"
NOTICES = "notices.txt"
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
    _write_notices(directory / NOTICES)
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


def _write_notices(path: Path) -> None:
    """Write each warning of the category `Notice` to a file as well, for the process that waits for this one."""
    show = warnings.showwarning

    def showwarning(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        show(message, category, *rest, **options)
        if issubclass(category, Notice):
            with path.open("a", encoding="utf-8") as file:
                file.write(" ".join(str(message).split()) + "\n")

    warnings.showwarning = showwarning
    warnings.simplefilter("default", Notice)

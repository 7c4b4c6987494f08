"""Heavy work in a process of its own: torch's memory is given back when a step ends, and a crash takes nothing else along."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from schemas.child import ERROR, PARENT
from schemas.errors import ChildDied, UserError

LOG = "log.txt"
POLL_S = 0.1
GRACE_S = 10.0


def run_module(module: str, directory: Path, *, tick: Callable[[], None] | None = None) -> None:
    """Run `python -m module directory` to its end; its output goes to `directory`/log.txt.

    `tick` is called a few times a second meanwhile. Whatever ends this function early ends the child too.

    Raises:
        UserError: the child left one.
        ChildDied: it ended badly without saying why.
    """
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", PARENT: str(os.getpid())}
    with (directory / LOG).open("ab") as log:
        command = [sys.executable, "-m", module, str(directory)]
        child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        try:
            while child.poll() is None:
                if tick is not None:
                    tick()
                time.sleep(POLL_S)
        finally:
            _end(child)
    if child.returncode != 0:
        raise _error_of(child.returncode, module, directory)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _error_of(code: int, module: str, directory: Path) -> UserError:
    if (directory / ERROR).exists():
        return UserError.from_json((directory / ERROR).read_text(encoding="utf-8"))
    tail = (directory / LOG).read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return ChildDied(
        "\n".join([f"{module} {how}; the end of its log:", *(f"    {line}" for line in tail)]),
        place=str(directory / LOG),
        mend="start the same command again: finished steps are kept, a stage goes on from its last checkpoint"
        + (" (signal 9 is often the kernel out of memory: smaller batches)" if code == -9 else ""),
    )

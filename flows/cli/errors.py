"""How a command reports errors: a short message for what the user can fix, a traceback for a fault of this program."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.panel import Panel

from grpo_tasks.processes.lifetime import STOPPING, Signalled, ended_by
from schemas.errors import EndedByOthers, TrackingError, UserError, refused_by_system

READS = "MLflow cannot be read"
"""Title of an error of MLflow in a command that only reads."""
INTERRUPTED = 130
EXIT_S = 4.0
"""Longest wait for the threads of an interrupted command."""
_STEP = re.compile(r"step-([0-9]+)")


@dataclass(slots=True)
class Command:
    """What is known about a command when it is interrupted."""

    folder: Path | None = None
    """Folder of the run; None for a command that leaves nothing to continue from."""


@contextmanager
def report_errors(*, reads: bool = False) -> Iterator[Command]:
    """Show a `UserError` as a panel on stderr and exit with its code; let every other exception through with its traceback.

    Ctrl-C exits with code 130 and says from where the same command continues. SIGTERM and SIGHUP say the same.

    Args:
        reads: the command records nothing, so no title may say that it could not.
    """
    command = Command()
    try:
        with ended_by(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, said=STOPPING):
            yield command
    except UserError as error:
        _show_and_exit(error, READS if reads and isinstance(error, TrackingError) else error.title)
    except OSError as error:
        refused = refused_by_system(error)
        if refused is None:
            raise
        _show_and_exit(refused, refused.title)
    except KeyboardInterrupt as interrupt:
        by = f"{interrupt}: " if isinstance(interrupt, EndedByOthers) else ""
        Console(stderr=True, highlight=False, markup=False).print(by + stopped_message(command.folder), soft_wrap=True)
        if isinstance(interrupt, Signalled):
            if interrupt.number != signal.SIGINT:
                interrupt.end_process()
            _limit_exit()
        sys.exit(INTERRUPTED)


def stopped_message(folder: Path | None) -> str:
    """What Ctrl-C leaves: the update from which the same command continues the stage that it was training."""
    if folder is None or not folder.is_dir():
        return "stopped"
    unfinished = [stage for stage in folder.glob("train_stage/*") if stage.is_dir() and not (stage / "result.json").exists()]
    newest = max(unfinished, key=lambda stage: stage.stat().st_mtime_ns, default=None)
    if newest is None:
        return "stopped; the same command continues with the first step that is not finished"
    name = newest.name.rpartition("-")[0]
    steps = [int(found[1]) for path in newest.glob("checkpoints/*") if (found := _STEP.fullmatch(path.name))]
    if not steps:
        return f"stopped; the same command starts stage {name} again, because it had no checkpoint yet"
    return f"stopped; the same command continues from update {max(steps) + 1} of stage {name}"


def _limit_exit() -> None:
    """Everything is released by now; what is left are threads, and those may wait for a server that does not answer."""

    def end() -> None:
        threading.main_thread().join()
        time.sleep(EXIT_S)
        os._exit(INTERRUPTED)

    threading.Thread(target=end, daemon=True).start()


def _show_and_exit(error: UserError, title: str) -> NoReturn:
    panel = Panel(str(error), title=title, border_style="red", title_align="left")
    Console(stderr=True, highlight=False, markup=False).print(panel)
    sys.exit(error.exit_code)

"""How a command reports errors: a short message for what the user can fix, a traceback for a fault of this program."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.panel import Panel

from schemas.errors import UserError, refused_by_system

_STEP = re.compile(r"step-([0-9]+)")


@dataclass(slots=True)
class Command:
    """What is known about a command when it is interrupted."""

    folder: Path | None = None
    """Folder of the run; None for a command that leaves nothing to continue from."""


@contextmanager
def report_errors() -> Iterator[Command]:
    """Show a `UserError` as a panel on stderr and exit with its code; let every other exception through with its traceback.

    Ctrl-C exits with code 130 and says from where the same command continues.
    """
    command = Command()
    try:
        yield command
    except UserError as error:
        _show_and_exit(error)
    except OSError as error:
        refused = refused_by_system(error)
        if refused is None:
            raise
        _show_and_exit(refused)
    except KeyboardInterrupt:
        Console(stderr=True, highlight=False, markup=False).print(stopped_message(command.folder), soft_wrap=True)
        sys.exit(130)


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


def _show_and_exit(error: UserError) -> NoReturn:
    panel = Panel(str(error), title=error.title, border_style="red", title_align="left")
    Console(stderr=True, highlight=False, markup=False).print(panel)
    sys.exit(error.exit_code)

"""Whether a step is finished: its folder holds a sealed result whose manifest agrees with every file.

    result.json missing            not finished
    seal broken, a file differs    named in the log, cleared away, run again
    all as written                 skipped

A trained stage is worth hours, so it is treated with care: with its journal intact it continues from its last whole checkpoint,
which is verified on its own; otherwise its folder is set aside under another name before the stage starts anew.
"""

import shutil
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from prefect import get_run_logger

from grpo_tasks.content.manifest import find_changes
from grpo_tasks.processes.entry import RESULT
from schemas.errors import DamagedError
from schemas.results import StepResult

Made = TypeVar("Made", bound=StepResult)

REMADE = ("final", "checkpoints", "spec.json")
"""What a stage writes again when it continues from a checkpoint."""
DAMAGED = "damaged.txt"
"""Marks a folder in which something differs from the manifest, until the step has cleared it away."""
_NAMED = 5


def finished_result(kind: type[Made], folder: Path) -> Made | None:
    """The result of a finished step; None when there is none, or when something in the folder is not what the step wrote."""
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        result = kind.load(path)
    except DamagedError as error:
        _give_up(folder, [RESULT], f"{error.message}: {path}")
        return None
    if not result.seal:
        # Written by the step's process; the step itself did not get to the end.
        return None
    changes = find_changes(folder, result.manifest)
    if changes:
        shown = "; ".join(map(str, changes[:_NAMED])) + (f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else "")
        _give_up(folder, [change.path for change in changes], f"{folder}: {shown}")
        return None
    return result if result.directory == folder else result.moved_to(folder)


def _give_up(folder: Path, paths: list[str], what: str) -> None:
    get_run_logger().warning("%s; the step runs again", what)
    (folder / DAMAGED).write_text("\n".join(paths), encoding="utf-8")


def clear(folder: Path, *, resumable: bool) -> None:
    """Make a folder ready for its step: empty, or for a resumable step with what it can continue from."""
    if not resumable:
        shutil.rmtree(folder, ignore_errors=True)
    elif (folder / DAMAGED).exists():
        _clear_damage(folder, (folder / DAMAGED).read_text(encoding="utf-8").splitlines())
    folder.mkdir(parents=True, exist_ok=True)


def _clear_damage(folder: Path, paths: list[str]) -> None:
    if all(path == RESULT or path.split("/")[0] in REMADE for path in paths):
        # The result is made again from what is whole: final weights and result from the last checkpoint.
        (folder / RESULT).unlink(missing_ok=True)
        for path in ["final", *(path for path in paths if path.startswith("checkpoints/"))]:
            shutil.rmtree(folder / "/".join(path.split("/")[:2]), ignore_errors=True)
        (folder / DAMAGED).unlink()
        return
    names = (folder.with_name(f"{folder.name}.damaged-{number}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    folder.rename(aside)
    (aside / RESULT).unlink(missing_ok=True)
    get_run_logger().warning("%s: its journal or tables cannot be trusted; set aside as %s, the stage starts anew", folder, aside)


def require_unchanged(inputs: Mapping[str, Any]) -> None:
    """Compare the files of earlier steps with their manifests, right before a step reads them.

    Raises:
        DamagedError: a file differs.
    """
    for result in _results_in(list(inputs.values())):
        wanted = [file for file in result.manifest if file.path.split("/")[0] in result.OUTPUTS]
        changes = find_changes(result.directory, wanted)
        if changes:
            raise DamagedError(
                str(changes[0]),
                place=str(result.directory / changes[0].path),
                fix="run the same command again: the step that made it runs again",
            )


def _results_in(values: list[Any]) -> Iterator[StepResult]:
    for value in values:
        if isinstance(value, StepResult):
            yield value
        elif isinstance(value, list | tuple):
            yield from _results_in(list(value))

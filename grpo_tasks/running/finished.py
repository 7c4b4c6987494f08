"""Decides whether a step is skipped: its folder must hold a sealed result whose manifest agrees with every file.

    result.json                                 the step
    missing, or without a seal                  runs: it did not get to its end
    damaged, or a file differs from the         logs what differs and runs again
      manifest (size or SHA-256)
    sealed, and every file as in the manifest   is skipped

The folder itself is chosen by the content key (key.py), so inputs or code that changed lead to another folder, without a result.

Before a step runs, `clear` empties its folder. A trained stage is worth hours, so it loses as little as possible. If its journal
and tables are intact, it continues from its last complete checkpoint, which is verified separately. If not, its folder is kept
under another name and the stage starts again.
"""

import shutil
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from grpo_tasks.content.manifest import find_changes
from grpo_tasks.processes.entry import RESULT
from grpo_tasks.running.orchestrator import run_logger
from schemas.errors import DamagedError
from schemas.results.base import StepResult

Made = TypeVar("Made", bound=StepResult)

REBUILT = ("final", "checkpoints", "spec.json", "train.parquet", "left_out.parquet")
"""What a stage writes again when it continues from a checkpoint."""
DAMAGED = "damaged.txt"
"""Lists the files of a folder that differ from the manifest, until `clear` has dealt with them."""
MAX_CHANGES_SHOWN = 5


def finished_result(kind: type[Made], folder: Path) -> Made | None:
    """The result of a finished step; None if there is none, or if any file of the folder is not what the step wrote."""
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        result = kind.load(path)
    except DamagedError as error:
        _mark_damaged(folder, [RESULT], f"{error.message}: {path}")
        return None
    if not result.seal:
        # Written by the child process. The seal comes last, when the step has hashed every file.
        return None
    changes = find_changes(folder, result.manifest)
    if changes:
        shown = "; ".join(map(str, changes[:MAX_CHANGES_SHOWN]))
        more = f"; and {len(changes) - MAX_CHANGES_SHOWN} more" if len(changes) > MAX_CHANGES_SHOWN else ""
        _mark_damaged(folder, [change.path for change in changes], f"{folder}: {shown}{more}")
        return None
    # The folder of all runs may have been moved since; the paths in the result follow.
    return result if result.directory == folder else result.moved_to(folder)


def _mark_damaged(folder: Path, paths: list[str], damage: str) -> None:
    run_logger().warning("%s; the step runs again", damage)
    (folder / DAMAGED).write_text("\n".join(paths), encoding="utf-8")


def clear(folder: Path, *, resumable: bool) -> None:
    """Prepare a folder for its step.

    Args:
        folder: created if it does not exist.
        resumable: keep what the step can continue from; otherwise the folder is emptied.
    """
    if not resumable:
        shutil.rmtree(folder, ignore_errors=True)
    elif (folder / DAMAGED).exists():
        _clear_damage(folder, (folder / DAMAGED).read_text(encoding="utf-8").splitlines())
    folder.mkdir(parents=True, exist_ok=True)


def _clear_damage(folder: Path, paths: list[str]) -> None:
    if all(path == RESULT or path.split("/")[0] in REBUILT for path in paths):
        # Everything damaged can be rebuilt from a checkpoint: remove the result, the final weights and the damaged checkpoints.
        (folder / RESULT).unlink(missing_ok=True)
        for path in ["final", *(path for path in paths if path.startswith("checkpoints/"))]:
            two_levels = path.split("/")[:2]  # of checkpoints/step-000050/state.json the folder of that checkpoint
            shutil.rmtree(folder.joinpath(*two_levels), ignore_errors=True)
        (folder / DAMAGED).unlink()
        return
    names = (folder.with_name(f"{folder.name}.damaged-{number}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    folder.rename(aside)
    (aside / RESULT).unlink(missing_ok=True)
    run_logger().warning("%s: journal or tables are damaged; kept as %s, and the stage starts again", folder, aside)


def require_unchanged(inputs: Mapping[str, Any]) -> None:
    """Compare the outputs of earlier steps with their manifests, right before a step reads them.

    Raises:
        DamagedError: a file differs.
    """
    for result in _results_in(list(inputs.values())):
        outputs = [file for file in result.manifest if file.path.split("/")[0] in result.OUTPUTS]
        changes = find_changes(result.directory, outputs)
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

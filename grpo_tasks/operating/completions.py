"""The completions of one update, from the tables in the folder of a run."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from grpo_tasks.data.table import read_table
from schemas.errors import UserError


@dataclass(frozen=True, slots=True)
class UpdateCompletions:
    """The completions of one update of a stage."""

    stage: str
    step: int
    steps: list[int]
    """Updates whose completions were kept."""
    table: pl.DataFrame


def read_completions(folder: Path, *, stage: str | None = None, step: int | None = None) -> UpdateCompletions:
    """The completions of an update of a run, whose steps left their folders in `folder`.

    By default those of the stage that was trained last, finished or not, and of the last update that was kept.

    Raises:
        UserError: there is no such stage or update, or the table is damaged.
    """
    newest = sorted(folder.glob("train_stage/*/completions"), key=lambda path: path.stat().st_mtime_ns)
    by_stage = {path.parent.name.rpartition("-")[0]: path for path in newest}
    if not by_stage:
        raise UserError("no completions there", place=str(folder), fix="grpo run CONFIG comes first")
    name = stage or list(by_stage)[-1]
    if name not in by_stage:
        raise UserError(f"no stage {name} was trained there", place=str(folder), fix=f"--stage {' or '.join(by_stage)}")
    tables = {int(path.stem.removeprefix("step-")): path for path in sorted(by_stage[name].glob("step-*.parquet"))}
    if not tables:
        raise UserError(f"stage {name} has kept no completions yet", place=str(by_stage[name]), fix="wait for its first update")
    wanted = max(tables) if step is None else step
    if wanted not in tables:
        kept = ", ".join(map(str, tables))
        raise UserError(f"the completions of update {wanted} were not kept", place=str(by_stage[name]), fix=f"--step {kept}")
    return UpdateCompletions(name, wanted, list(tables), read_table(tables[wanted]))

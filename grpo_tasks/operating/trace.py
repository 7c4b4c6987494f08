"""One row on its way through a run, read from the folders that the steps have left.

line of a file -> verdict -> prompt -> completions of each stage with their rewards -> samples of each evaluation
"""

from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from grpo_tasks.data.table import QUARANTINE
from grpo_tasks.processes.entry import RESULT
from schemas.errors import DamagedError, UserError


@dataclass(frozen=True, slots=True)
class Trace:
    """What happened to one row."""

    side: str
    source: str
    line: int
    faults: pl.DataFrame | None = None
    """Rules that a refused row breaks (schemas/tables.py Quarantine)."""
    prompt: pl.DataFrame | None = None
    """The accepted row (schemas/tables.py Prompts)."""
    completions: dict[str, pl.DataFrame] = field(default_factory=dict)
    """By stage: its completions with rewards and advantages, from the updates whose tables were kept."""
    samples: dict[str, pl.DataFrame] = field(default_factory=dict)
    """By evaluation: its samples with their scores."""


def trace_row(folder: Path, name: str) -> Trace:
    """Follow a row through the last run of each step.

    Args:
        folder: where the steps of the run left their folders, `resources.output_dir`/`name`.
        name: a prompt_id, or FILE:LINE with the file as the config spells it.

    Raises:
        UserError: there is no run in the folder, or no row has that name.
        DamagedError: a table of the run cannot be read.
    """
    validated = _newest(folder / "validate_data").get("all")
    if validated is None:
        raise UserError("no validated data there", place=str(folder), fix="grpo validate CONFIG or grpo run CONFIG comes first")
    source, _, line = name.rpartition(":")
    by_line = (pl.col("source") == source) & (pl.col("line") == (int(line) if line.isdecimal() else 0))
    for side in ("train", "eval"):
        rows = _read(validated / f"{side}.parquet", (pl.col("prompt_id") == name) | by_line)
        if not rows.is_empty():
            return _accepted(folder, side, rows.head(1))
    faults = _read(validated / QUARANTINE, by_line)
    if faults.is_empty():
        raise UserError(f"no row is called {name}", place=str(validated), fix="name a prompt_id of its tables, or FILE:LINE")
    return Trace(faults["split"][0], source, int(line), faults=faults)


def _accepted(folder: Path, side: str, row: pl.DataFrame) -> Trace:
    same_prompt = pl.col("prompt_id") == row["prompt_id"][0]
    stages = {
        name: _read_all(sorted(made.glob("completions/*.parquet")), same_prompt)
        for name, made in _newest(folder / "train_stage").items()
    }
    evaluations = {
        name: _read(made / "samples.parquet", same_prompt) for name, made in _newest(folder / "evaluate_model").items()
    }
    return Trace(side, row["source"][0], row["line"][0], prompt=row, completions=stages, samples=evaluations)


def _read_all(tables: list[Path], condition: pl.Expr) -> pl.DataFrame:
    return pl.concat([_read(table, condition) for table in tables], how="diagonal_relaxed") if tables else pl.DataFrame()


def _read(table: Path, condition: pl.Expr) -> pl.DataFrame:
    try:
        return pl.read_parquet(table).filter(condition)
    except (pl.exceptions.PolarsError, OSError) as error:
        # The first line of polars' message says what is wrong; the others show its query plan.
        reason = str(error).partition("\n")[0]
        raise DamagedError(
            f"the table cannot be read: {reason}",
            place=str(table),
            fix=f"remove the folder {table.parent} and repeat the run: the step that wrote it runs again",
        ) from error


def _newest(step: Path) -> dict[str, Path]:
    """The last finished folder of each label of a step, in the order in which they were finished."""
    results = sorted(step.glob(f"*/{RESULT}"), key=lambda result: result.stat().st_mtime_ns)
    return {result.parent.name.rpartition("-")[0]: result.parent for result in results}

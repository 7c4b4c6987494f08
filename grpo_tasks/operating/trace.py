"""One row on its way through a run, or the completions of one update, read from the folders that the steps have left."""

from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from grpo_tasks.content.conversations import turn_by_turn
from grpo_tasks.content.places import parse_place
from grpo_tasks.data.table import QUARANTINE, read_table
from grpo_tasks.processes.child import RESULT
from grpo_tasks.stage.stage_dir import StageDir
from schemas.config.operations import TrackingConfig
from schemas.errors import TrackingError, UserError

KNOWN_STEPS = frozenset(
    {
        *("prepare_data", "validate_data", "check_guard", "probe_rewards", "measure_difficulty", "train_stage", "merge_adapter"),
        *("evaluate_model", "publish_model", "write_report"),
    }
)
"""Steps whose tables are shown in words of their own, or hold no prompts of the run."""
ROW_NAMES = "FILE:LINE; in a JSON array or a Parquet file FILE:N is its record or row N"


@dataclass(frozen=True, slots=True)
class Trace:
    """What happened to one row."""

    split: str
    source: str
    line: int
    faults: pl.DataFrame | None = None
    """Rules that a refused row breaks (schemas/tables.py Quarantine)."""
    prompt: pl.DataFrame | None = None
    """The accepted row (schemas/tables.py Prompts)."""
    pass_rates: dict[str, pl.DataFrame] = field(default_factory=dict)
    """By the model that was measured (start, or a stage with its own measurement): pass rates by the rewards of each stage."""
    left_out: dict[str, str] = field(default_factory=dict)
    """By stage that does not train on the row because of its pass rate: the reason."""
    completions: dict[str, pl.DataFrame] = field(default_factory=dict)
    """By stage: its completions with rewards and advantages, from the updates whose tables were kept."""
    samples: dict[str, pl.DataFrame] = field(default_factory=dict)
    """By evaluation: its samples with their scores."""
    further: dict[str, pl.DataFrame] = field(default_factory=dict)
    """By STEP/FILE of any other step: the rows of this prompt in its tables."""


def trace_row(folder: Path, name: str) -> Trace:
    """Follow a row through the last run of each step, in the folder of a run (`resources.output_dir`/`name`).

    `name` is a prompt_id, or a place such as data.csv:17, with the file as the config spells it. `UserError` where there is no
    such run or row, `DamagedError` where a table of the run cannot be read.
    """
    validated = _newest(folder / "validate_data").get("all")
    if validated is None:
        raise UserError("no validated data there", place=str(folder), fix="grpo validate CONFIG or grpo run CONFIG comes first")
    source, line = parse_place(name)
    by_line = (pl.col("source") == source) & (pl.col("line") == line)
    for split in ("train", "eval"):
        rows = read_table(validated / f"{split}.parquet").filter((pl.col("prompt_id") == name) | by_line)
        if not rows.is_empty():
            return _accepted(folder, split, rows.head(1))
    faults = read_table(validated / QUARANTINE).filter(by_line)
    if faults.is_empty():
        raise UserError(f"no row is called {name}", place=str(validated), fix=f"name a prompt_id of its tables, or {ROW_NAMES}")
    return Trace(faults["split"][0], source, line, faults=faults)


def _accepted(folder: Path, split: str, row: pl.DataFrame) -> Trace:
    same_prompt = pl.col("prompt_id") == row["prompt_id"][0]
    stages, completions, left_out = _newest(folder / "train_stage"), {}, {}
    for name, made in stages.items():
        tables = [read_table(table).filter(same_prompt) for table in sorted(made.glob("completions/*.parquet"))]
        completions[name] = turn_by_turn(pl.concat(tables, how="diagonal_relaxed") if tables else pl.DataFrame())
        if (table := StageDir(made).left_out).exists() and not (rows := read_table(table).filter(same_prompt)).is_empty():
            left_out[name] = rows["reason"][0]
    others = [made for step in sorted(folder.iterdir()) if step.name not in KNOWN_STEPS for made in _newest(step).values()]
    paths = [path for made in others for path in sorted(made.glob("*.parquet"))]
    tables_of_others = {f"{path.parent.parent.name}/{path.name}": read_table(path) for path in paths}
    found = {name: table.filter(same_prompt) for name, table in tables_of_others.items() if "prompt_id" in table.columns}
    return Trace(
        split,
        row["source"][0],
        row["line"][0],
        prompt=row,
        pass_rates={
            name: read_table(made / "pass_rates.parquet").filter(same_prompt)
            for name, made in _newest(folder / "measure_difficulty").items()
        },
        left_out=left_out,
        completions=completions,
        samples={
            name: turn_by_turn(read_table(made / "samples.parquet").filter(same_prompt))
            for name, made in _newest(folder / "evaluate_model").items()
        },
        further={name: rows for name, rows in found.items() if not rows.is_empty()},
    )


def _newest(step: Path) -> dict[str, Path]:
    """The last finished folder of each label of a step, in the order in which they were finished."""
    results = sorted(step.glob(f"*/{RESULT}"), key=lambda result: result.stat().st_mtime_ns)
    return {result.parent.name.rpartition("-")[0]: result.parent for result in results}


@dataclass(frozen=True, slots=True)
class UpdateCompletions:
    """The completions of one update of a stage."""

    stage: str
    step: int
    steps: list[int]
    """Updates whose completions were recorded."""
    table: pl.DataFrame
    """Each completion of a prompt once, with its `count`."""


def read_completions(
    folder: Path, *, stage: str | None = None, step: int | None = None, tracking: TrackingConfig | None = None
) -> UpdateCompletions:
    """By default those of the last stage and its last recorded update; `UserError` if there are none, or damaged ones.

    `tracking` is the store that may still have a run whose folder was removed.
    """
    newest = sorted(folder.glob("train_stage/*/completions"), key=lambda path: path.stat().st_mtime_ns)
    by_stage = {path.parent.name.rpartition("-")[0]: path for path in newest}
    if not by_stage:
        fix = "grpo run CONFIG comes first"
        if tracking is not None and (run_id := _in_mlflow(folder.name, tracking)):
            in_mlflow = (
                f"MLflow has the run {run_id[:8]}, and its stages have their completions as artifacts (grpo ui shows them)"
            )
            fix = f"{in_mlflow}; grpo run CONFIG makes new ones"
        looked_for = f"no folder {folder.name}/train_stage/*/completions, which a stage of the run {folder.name} writes"
        raise UserError(looked_for, place=str(folder.parent), fix=fix)
    name = stage or list(by_stage)[-1]
    if name not in by_stage:
        raise UserError(f"no stage {name} was trained there", place=str(folder), fix=f"--stage {' or '.join(by_stage)}")
    tables = {int(path.stem.removeprefix("step-")): path for path in sorted(by_stage[name].glob("step-*.parquet"))}
    if not tables:
        fix = "its first update records them; grpo run CONFIG continues a stage that has ended before it"
        raise UserError(f"stage {name} has recorded no completions yet", place=str(by_stage[name]), fix=fix)
    wanted = max(tables) if step is None else step
    if wanted not in tables:
        fix = f"--step {' or '.join(map(str, tables))}; stages[].log_completions_steps: 1 records every update"
        raise UserError(f"the completions of update {wanted} were not recorded", place=str(by_stage[name]), fix=fix)
    table = turn_by_turn(read_table(tables[wanted])).group_by("prompt_id", "completion", maintain_order=True)
    once = table.agg(pl.len().alias("count"), pl.exclude("count").first())
    return UpdateCompletions(name, wanted, list(tables), once)


def _in_mlflow(name: str, tracking: TrackingConfig) -> str:
    """Id of the newest run of this name; empty where MLflow has none or cannot be asked."""
    # Here, because mlflow takes seconds to import.
    from grpo_tasks.tracking.past_runs import newest_run

    try:
        return newest_run(name, tracking)
    except TrackingError:
        return ""

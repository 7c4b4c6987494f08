"""The report of one run: an HTML page, and a Markdown summary for the Prefect UI.

It reads the results and the folders of the steps only. What this module does not do: upload the page (tracking/records.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import polars as pl
import yaml

from grpo_tasks.content.conversations import turn_by_turn
from grpo_tasks.content.markdown import as_markdown, table
from grpo_tasks.data.table import QUARANTINE
from grpo_tasks.reporting.compare import Comparison, compare_runs
from grpo_tasks.reporting.page import picture, render
from grpo_tasks.stage.journal import Journal, read_events
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking.description import describe_environment
from grpo_tasks.tracking.past_runs import find_rejection_run, load_past_run
from schemas.config.run import RunConfig
from schemas.metrics import (
    ENERGY,
    GPU_MEMORY,
    HEADLINES,
    KL,
    NUM_TOKENS,
    PROGRESS,
    REWARD,
    REWARD_STD,
    TASK_FAMILIES,
    figure_text,
)
from schemas.results.data import DataReport, LabReport
from schemas.results.evaluation import DifficultyReport, EvalReport, guard_sections
from schemas.results.model import MergeProof, StageResult
from schemas.results.publication import PublishedFacts

STAGE_METRICS = tuple((name, PROGRESS[name]) for name in (REWARD, REWARD_STD, KL))
"""Metrics of a stage in the report, with the headings of their columns."""
_TASK_PREFIXES = tuple(family.removesuffix("*") for family in TASK_FAMILIES.values())
_MAX_REJECTED = 20
_MAX_SAMPLES = 4
_MAX_LEFT_OUT = 20


@dataclass(frozen=True, slots=True)
class RunResults:
    """The results that a report shows."""

    config: RunConfig
    run_id: str
    flow_run_id: str | None
    data: DataReport
    lab: LabReport
    evaluations: Sequence[EvalReport]
    stages: Sequence[StageResult]
    proof: MergeProof
    decision: PublishedFacts
    difficulty: DifficultyReport | None = None
    """Pass rates from the start of the first stage; None where none were known."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """What steps that the report does not know have to say, by step (Markdown)."""
    baseline: Comparison | None = None
    """Rejection sampling on the same data first, this run second; None where there is none (report.py)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step cost; None where nothing was measured."""

    step: str
    seconds: float
    tokens: float | None = None
    gpu_hours: float | None = None
    energy_wh: float | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """The answers of the base and the merged model to the same prompt."""

    prompt_id: str
    question: str
    answer: str
    before: str
    before_verdict: str
    after: str
    after_verdict: str
    """right, wrong, or the reward where the row has no ground truth."""


def write_html(run: RunResults, directory: Path) -> Path:
    """Write `directory`/report.html and the figure of the curves."""
    # Imported here: importing a step must not import matplotlib.
    from grpo_tasks.tracking.plots import plot_overview

    journals = [(stage.stage, StageDir(stage.directory).journal) for stage in run.stages]
    curves = picture(plot_overview(journals, directory / "curves.png"))
    page = render(
        "report.html",
        **{one.name: getattr(run, one.name) for one in fields(run)},
        config_yaml=yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
        commit=describe_environment().git_commit or "unknown",
        figures=figures_of(run.evaluations),
        figure_text=figure_text,
        stage_metrics=STAGE_METRICS,
        events=[event for stage in run.stages for event in events_of(stage)],
        curves=curves,
        samples=samples_of(run),
        sources=run.data.sources,
        rejected=pl.read_parquet(run.data.directory / QUARANTINE).head(_MAX_REJECTED).to_dicts(),
        left_out=left_out_of(run),
        costs=costs_of(run),
        has_grpo=has_grpo(run.config),
    )
    path = directory / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def markdown(run: RunResults) -> str:
    """The main figures for the Prefect UI; the HTML page in MLflow has the rest."""
    decision = run.decision
    names = figures_of(run.evaluations)
    figures = [name.replace("_", " ") for name in names]
    models = []
    for one in run.evaluations:
        known = [figure_text(name, one.metrics[name].value) if name in one.metrics else "" for name in names]
        models.append([one.label, *known])
    costs = ["seconds", "tokens", "GPU hours", "energy (Wh)"]
    cost_rows = [
        [
            cost.step,
            f"{cost.seconds:.1f}",
            "" if cost.tokens is None else f"{cost.tokens:,.0f}",
            "no GPU" if cost.gpu_hours is None else f"{cost.gpu_hours:.3f}",
            "not measured" if cost.energy_wh is None else f"{cost.energy_wh:.1f}",
        ]
        for cost in costs_of(run)
    ]
    sections = [
        f"# {run.config.name}",
        f"{decision.model_name} version {decision.model_version}: {decision.reason}",
        table(["model", *figures], models, right=figures),
        *filter(None, [as_markdown(guard_sections(decision.guards)).strip()]),
        f"{run.data.rows} rows read, {run.data.quarantined} rejected.",
        *(f"{step}: {text.strip()}" for step, text in run.sections.items()),
        *(f"Stage {stage.stage}: {stage.kept.summary()}." for stage in run.stages if stage.kept is not None),
        table(["step", *costs], cost_rows, right=costs),
        f"Full report: `report/report.html` in the artifacts of the MLflow run {run.run_id}.",
    ]
    return "\n\n".join(sections) + "\n"


def figures_of(evaluations: Sequence[EvalReport]) -> list[str]:
    """The columns of the table of evaluations: the headlines that were measured, then those of each task."""
    measured = list(dict.fromkeys(name for report in evaluations for name in report.metrics))
    return [name for name in HEADLINES if name in measured] + [name for name in measured if name.startswith(_TASK_PREFIXES)]


def costs_of(run: RunResults) -> list[Cost]:
    """Seconds of every step; tokens, GPU hours and energy of the stages; the total last."""
    steps = [
        Cost("validate_data", run.data.seconds),
        Cost("probe_rewards", run.lab.seconds),
        *([Cost("measure_difficulty", run.difficulty.seconds)] if run.difficulty is not None else []),
        *(Cost(f"evaluate_model {report.label}", report.seconds) for report in run.evaluations),
        *(_stage_cost(stage) for stage in run.stages),
        Cost("merge_adapter", run.proof.seconds),
    ]

    def total(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    measured = [total(getattr(cost, name) for cost in steps) for name in ("tokens", "gpu_hours", "energy_wh")]
    return [*steps, Cost("total", sum(cost.seconds for cost in steps), *measured)]


def _stage_cost(stage: StageResult) -> Cost:
    lines = list(Journal(StageDir(stage.directory).journal, writes=False).steps.values())
    tokens = lines[-1].get(NUM_TOKENS) if lines else None
    energy = [line[ENERGY] for line in lines if ENERGY in line]
    on_gpu = any(GPU_MEMORY in line for line in lines)
    return Cost(
        f"train_stage {stage.stage}",
        stage.seconds,
        tokens,
        stage.seconds / 3600 if on_gpu else None,
        # Joules to watt-hours.
        sum(energy) / 3600 if energy else None,
    )


def events_of(stage: StageResult) -> list[dict[str, object]]:
    """The events of a stage: alarms of its guards, and what it did about them."""
    return [event | {"stage": stage.stage} for event in read_events(StageDir(stage.directory).events)]


def left_out_of(run: RunResults) -> dict[str, list[dict[str, Any]]]:
    """By stage, the prompts that it left out, likely wrong ground truths first; at most so many as a person reads."""
    tables = {
        stage.stage: StageDir(stage.directory).left_out for stage in run.stages if stage.kept is not None and stage.kept.left_out
    }
    return {name: pl.read_parquet(table).head(_MAX_LEFT_OUT).to_dicts() for name, table in tables.items()}


def samples_of(run: RunResults) -> dict[str, list[Pair]]:
    """Answers of the base and the merged model to the same prompts, by what training changed; the first sample of each prompt."""
    by_label = {report.label: report for report in run.evaluations}
    truth = {
        prompt_id: (messages[-1]["content"], answer)
        for prompt_id, messages, answer in pl.read_parquet(run.data.eval).select("prompt_id", "prompt", "answer").iter_rows()
    }
    before, after = (_first(by_label[label]) for label in ("base", "merged"))
    both = before.join(after, on="prompt_id", suffix="_after").sort("prompt_id")

    def pair(row: dict[str, Any]) -> Pair:
        question, answer = truth[row["prompt_id"]]
        verdicts = [_verdict(row[f"correct{end}"], row[f"{REWARD}{end}"]) for end in ("", "_after")]
        return Pair(
            row["prompt_id"], question, answer or "", row["completion"], verdicts[0], row["completion_after"], verdicts[1]
        )

    return {kind: [pair(row) for row in rows.head(_MAX_SAMPLES).iter_rows(named=True)] for kind, rows in _kinds(both).items()}


def _kinds(both: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """The prompts by what training changed: right or wrong, or the reward where no row has a ground truth."""
    if both["correct"].null_count() < both.height or both[REWARD].null_count() == both.height:
        right, after = pl.col("correct"), pl.col("correct_after")
        return {
            "Fixed: wrong before, right after": both.filter(~right & after),
            "Broken: right before, wrong after": both.filter(right & ~after),
            "Still wrong": both.filter(~right & ~after),
        }
    change = pl.col(f"{REWARD}_after") - pl.col(REWARD)
    return {
        "Higher reward than before": both.filter(change > 0).sort(change, descending=True, maintain_order=True),
        "Lower reward than before": both.filter(change < 0).sort(change, maintain_order=True),
    }


def _first(report: EvalReport) -> pl.DataFrame:
    rows = turn_by_turn(pl.read_parquet(report.samples).filter(pl.col("sample") == 0))
    reward = pl.col(REWARD) if REWARD in rows.columns else pl.lit(None, dtype=pl.Float64).alias(REWARD)
    return rows.select("prompt_id", "completion", "correct", reward)


def _verdict(correct: bool | None, reward: float | None) -> str:
    if correct is None:
        return "not judged" if reward is None else f"reward {reward:.3g}"
    return "right" if correct else "wrong"


def has_grpo(config: RunConfig) -> bool:
    """Whether a stage of the run trains by GRPO."""
    return any(stage.kind == "grpo" for stage in config.stages)


def against_rejection(config: RunConfig, run_id: str, data_digest: str) -> Comparison | None:
    """The newest run of rejection sampling on these data, then this run; None where this has no GRPO, or MLflow no such run."""
    if not has_grpo(config):
        return None
    baseline = find_rejection_run(data_digest, config.tracking)
    if baseline is None:
        return None
    return compare_runs(load_past_run(baseline, config.tracking), load_past_run(run_id, config.tracking))

"""The report of one run, from the folders its steps left: HTML for people who look, Markdown for the Prefect UI."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import yaml

from grpo_tasks.content.markdown import table
from grpo_tasks.data.quarantine import QUARANTINE
from grpo_tasks.reporting.page import percent, picture, render
from grpo_tasks.stage.journal import Journal, read_events
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking.description import describe_environment
from schemas.config.run import RunConfig
from schemas.results import DataReport, EvalReport, LabReport, MergeProof, PublishedFacts, StageResult

FIGURES = ("format_rate", "accuracy", "greedy_accuracy", "lenient_accuracy", "pass_at_k", "truncated_rate", "mean_length")
_REJECTED = 20
_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Parts:
    """The results a report is made of."""

    config: RunConfig
    run_id: str
    flow_run_id: str | None
    data: DataReport
    lab: LabReport
    evaluations: Sequence[EvalReport]
    stages: Sequence[StageResult]
    proof: MergeProof
    decision: PublishedFacts


@dataclass(frozen=True, slots=True)
class Cost:
    """One line of the ledger; None where nothing was measured."""

    step: str
    seconds: float
    tokens: float | None = None
    gpu_hours: float | None = None
    energy_wh: float | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """What base and merged model said to the same prompt."""

    prompt_id: str
    question: str
    answer: str
    before: str
    before_right: bool
    after: str
    after_right: bool


def write_html(parts: Parts, directory: Path) -> Path:
    """`directory`/report.html."""
    from grpo_tasks.tracking.plots import plot_overview

    journals = [(stage.stage, StageDir(stage.directory).journal) for stage in parts.stages]
    curves = picture(plot_overview(journals, directory / "curves.png"))
    page = render(
        "report.html",
        config=parts.config,
        config_yaml=yaml.safe_dump(parts.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
        run_id=parts.run_id,
        flow_run_id=parts.flow_run_id,
        commit=describe_environment().git_commit or "unknown",
        decision=parts.decision,
        evaluations=parts.evaluations,
        figures=FIGURES,
        stages=parts.stages,
        events=[event for stage in parts.stages for event in events_of(stage)],
        curves=curves,
        samples=samples_of(parts),
        data=parts.data,
        sources=parts.data.sources,
        rejected=pl.read_parquet(parts.data.directory / QUARANTINE).head(_REJECTED).to_dicts(),
        lab=parts.lab,
        proof=parts.proof,
        costs=costs_of(parts),
    )
    path = directory / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def markdown(parts: Parts) -> str:
    """The main figures for the Prefect UI; the HTML in MLflow has the rest."""
    decision = parts.decision
    figures = [name.replace("_", " ") for name in FIGURES]
    models = [[report.label, *(_shown(report, name) for name in FIGURES)] for report in parts.evaluations]
    costs = ["seconds", "tokens", "GPU hours", "energy"]
    sections = [
        f"# {parts.config.name}",
        f"{decision.model_name} version {decision.model_version}: {decision.reason}",
        table(["model", *figures], models, right=figures),
        f"{parts.data.rows} rows read, {parts.data.quarantined} rejected.",
        table(["step", *costs], [_cost_row(cost) for cost in costs_of(parts)], right=costs),
        f"Full report: `report/report.html` in the artifacts of the MLflow run {parts.run_id}.",
    ]
    return "\n\n".join(sections) + "\n"


def _cost_row(cost: Cost) -> list[str]:
    return [
        cost.step,
        f"{cost.seconds:.1f}",
        "" if cost.tokens is None else f"{cost.tokens:,.0f}",
        "no GPU" if cost.gpu_hours is None else f"{cost.gpu_hours:.3f}",
        "not measured" if cost.energy_wh is None else f"{cost.energy_wh:.1f} Wh",
    ]


def _shown(report: EvalReport, name: str) -> str:
    found = report.metrics.get(name)
    if found is None:
        return ""
    return f"{found.value:.1f}" if name == "mean_length" else percent(found.value)


def costs_of(parts: Parts) -> list[Cost]:
    """Seconds of every step; tokens, GPU hours and energy of the stages, which are what costs."""
    steps = [
        Cost("validate_data", parts.data.seconds),
        Cost("probe_rewards", parts.lab.seconds),
        *(Cost(f"evaluate_model {report.label}", report.seconds) for report in parts.evaluations),
        *(_stage_cost(stage) for stage in parts.stages),
        Cost("merge_adapter", parts.proof.seconds),
    ]
    return [
        *steps,
        Cost("all", sum(cost.seconds for cost in steps), *(_total(steps, name) for name in ("tokens", "gpu_hours", "energy_wh"))),
    ]


def _total(costs: Sequence[Cost], name: str) -> float | None:
    known = [value for cost in costs if (value := getattr(cost, name)) is not None]
    return sum(known) if known else None


def _stage_cost(stage: StageResult) -> Cost:
    lines = list(Journal(StageDir(stage.directory).journal, writes=False).steps.values())
    tokens = lines[-1].get("num_tokens") if lines else None
    energy = [line["energy"] for line in lines if "energy" in line]
    on_gpu = any("gpu_memory" in line for line in lines)
    return Cost(
        f"train_stage {stage.stage}",
        stage.seconds,
        tokens,
        stage.seconds / 3600 if on_gpu else None,
        sum(energy) / 3600 if energy else None,
    )


def events_of(stage: StageResult) -> list[dict[str, object]]:
    """Alarms and other events of a stage."""
    return [event | {"stage": stage.stage} for event in read_events(StageDir(stage.directory).events)]


def samples_of(parts: Parts) -> dict[str, list[Pair]]:
    """The same prompts before and after: fixed, still wrong, spoilt; the first sample of each prompt."""
    by_label = {report.label: report for report in parts.evaluations}
    truth = {
        prompt_id: (messages[-1]["content"], answer)
        for prompt_id, messages, answer in pl.read_parquet(parts.data.eval).select("prompt_id", "prompt", "answer").iter_rows()
    }
    before, after = (_first(by_label[label]) for label in ("base", "merged"))
    both = before.join(after, on="prompt_id", suffix="_after").sort("prompt_id")
    kinds = {
        "Mended: wrong before, right after": ~pl.col("correct") & pl.col("correct_after"),
        "Spoilt: right before, wrong after": pl.col("correct") & ~pl.col("correct_after"),
        "Still wrong": ~pl.col("correct") & ~pl.col("correct_after"),
    }
    return {
        kind: [_pair(row, truth) for row in both.filter(mask).head(_SAMPLES).iter_rows(named=True)]
        for kind, mask in kinds.items()
    }


def _first(report: EvalReport) -> pl.DataFrame:
    rows = pl.read_parquet(report.samples).filter(pl.col("sample") == 0)
    return rows.select("prompt_id", "completion", "correct")


def _pair(row: dict[str, object], truth: dict[str, tuple[str, str]]) -> Pair:
    prompt_id = str(row["prompt_id"])
    question, answer = truth[prompt_id]
    return Pair(
        prompt_id,
        question,
        answer,
        str(row["completion"]),
        bool(row["correct"]),
        str(row["completion_after"]),
        bool(row["correct_after"]),
    )

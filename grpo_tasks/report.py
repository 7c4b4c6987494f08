"""The report of one run, and the comparison of two: self-contained HTML pages, and a Markdown summary of the report.

Images are embedded, there are no scripts, and the browser fetches nothing. Text from a model, a data file or a user is untrusted:
jinja2 escapes every value, and secrets are hidden. What this module does not do: upload a page, or test which run is better.
"""

import base64
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import polars as pl
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from grpo_tasks.content.conversations import turn_by_turn
from grpo_tasks.content.markdown import as_markdown
from grpo_tasks.data.table import QUARANTINE
from grpo_tasks.evaluation.statistics import mean_interval, prompt_values
from grpo_tasks.kit.files import replacing
from grpo_tasks.stage.journal import Journal, read_events
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking.description import describe_environment
from grpo_tasks.tracking.past_runs import PastRun, find_rejection_run, load_past_run
from schemas import metrics
from schemas.config.evaluation import PromotionConfig
from schemas.config.grid import NO_EFFECT
from schemas.config.run import RunConfig
from schemas.metrics import REWARD, figure_text
from schemas.results.base import Section
from schemas.results.data import DataReport, LabReport
from schemas.results.evaluation import DifficultyReport, EvalReport, evaluation_section, guard_sections
from schemas.results.model import MergeProof, StageResult
from schemas.results.publication import PublishedFacts
from schemas.secret import hide, hide_written

COMPARED = (metrics.FORMAT_RATE, metrics.ACCURACY, metrics.LENIENT_ACCURACY, metrics.TRUNCATED_RATE, REWARD)
"""Compared metrics. The means of the functions that both runs measured follow, and the figures of each task."""
_SAVED = "model.merged_dtype"
_SHOWN_CHARS = 1_500
_VERBATIM_OR_PERCENT = re.compile(r"<(pre|code)>.*?</\1>|(?<=\d) %", re.DOTALL)
_MAX_ROWS = 20
"""Rejected rows, prompts that a stage left out, and prompts on which two runs disagree."""
_MAX_SAMPLES = 4
_TITLE_CHARS = 36  # of a title in a panel of a comparison


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
    baseline: "Comparison | None" = None
    """Rejection sampling on the same data first, this run second; None where there is none."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step cost; None where nothing was measured."""

    step: str
    seconds: float
    tokens: float | None = None
    gpu_hours: float | None = None
    energy_wh: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The first sample of a prompt."""

    text: str
    right: bool | None
    """None without a ground truth."""
    reward: float | None

    @property
    def verdict(self) -> str:
        """right, wrong, or the reward where the row has no ground truth."""
        if self.right is not None:
            return "right" if self.right else "wrong"
        return "not judged" if self.reward is None else f"reward {figure_text(REWARD, self.reward)}"


@dataclass(frozen=True, slots=True)
class Pair:
    """The answers of two models to the same prompt."""

    prompt_id: str
    question: str
    first: Answer
    second: Answer
    truth: str = ""

    @property
    def second_is_better(self) -> bool:
        """Whether the second answer is the right one, or the one with the higher reward."""
        if self.second.right is not None:
            return self.second.right
        return (self.second.reward or 0.0) > (self.first.reward or 0.0)


def write_html(run: RunResults, directory: Path) -> Path:
    """Write `directory`/report.html and the figure of the curves."""
    # Imported here: importing a step must not import matplotlib.
    from grpo_tasks.tracking.plots import plot_overview

    journals = [(stage.stage, StageDir(stage.directory).journal) for stage in run.stages]
    folders = {stage.stage: StageDir(stage.directory) for stage in run.stages}
    left_out = [stage.stage for stage in run.stages if stage.kept is not None and stage.kept.left_out]
    page = _render(
        "report.html",
        **{one.name: getattr(run, one.name) for one in fields(run)},
        config_yaml=yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
        commit=describe_environment().git_commit or "unknown",
        evaluated=_evaluated(run),
        stage_metrics=[(name, metrics.PROGRESS[name]) for name in (REWARD, metrics.REWARD_STD, metrics.KL)],
        events=[event | {"stage": name} for name, folder in folders.items() for event in read_events(folder.events)],
        curves=_picture(plot_overview(journals, directory / "curves.png")),
        samples=samples_of(run),
        rejected=pl.read_parquet(run.data.directory / QUARANTINE).head(_MAX_ROWS).to_dicts(),
        # Likely wrong ground truths come first.
        left_out={name: pl.read_parquet(folders[name].left_out).head(_MAX_ROWS).to_dicts() for name in left_out},
        costs=_cost_section(run),
        has_grpo=_has_grpo(run.config),
    )
    path = directory / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def markdown(run: RunResults) -> str:
    """The main figures for the Prefect UI; the HTML page in MLflow has the rest."""
    decision = run.decision
    kept = [f"Stage {stage.stage}: {stage.kept.summary()}." for stage in run.stages if stage.kept is not None]
    sections = [
        Section(text=f"# {run.config.name}"),
        Section(text=f"{decision.model_name} version {decision.model_version}: {decision.reason}"),
        _evaluated(run),
        *guard_sections(decision.guards),
        Section(text=f"{run.data.rows} rows read, {run.data.quarantined} rejected."),
        *(Section(text=text) for text in [*(f"{step}: {said.strip()}" for step, said in run.sections.items()), *kept]),
        _cost_section(run),
        Section(text=f"Full report: `report/report.html` in the artifacts of the MLflow run {run.run_id}."),
    ]
    return as_markdown(sections)


def _evaluated(run: RunResults) -> Section:
    return evaluation_section(run.evaluations, first=run.config.figures, merged_as=run.proof.saved_as())


def _cost_section(run: RunResults) -> Section:
    columns = ["seconds", "tokens", "GPU hours", "energy (Wh)"]
    rows = [
        [
            cost.step,
            f"{cost.seconds:.1f}",
            "" if cost.tokens is None else f"{cost.tokens:,.0f}",
            "no GPU" if cost.gpu_hours is None else f"{cost.gpu_hours:.3f}",
            "not measured" if cost.energy_wh is None else f"{cost.energy_wh:.1f}",
        ]
        for cost in costs_of(run)
    ]
    return Section(columns=["step", *columns], rows=rows, right=columns)


def costs_of(run: RunResults) -> list[Cost]:
    """Seconds of every step; tokens, GPU hours and energy of the stages; the total last."""

    def stage_cost(stage: StageResult) -> Cost:
        lines = list(Journal(StageDir(stage.directory).journal, writes=False).steps.values())
        joules = [line[metrics.ENERGY] for line in lines if metrics.ENERGY in line]
        return Cost(
            f"train_stage {stage.stage}",
            stage.seconds,
            tokens=lines[-1].get(metrics.NUM_TOKENS) if lines else None,
            gpu_hours=stage.seconds / 3600 if any(metrics.GPU_MEMORY in line for line in lines) else None,
            energy_wh=sum(joules) / 3600 if joules else None,
        )

    steps = [
        Cost("validate_data", run.data.seconds),
        Cost("probe_rewards", run.lab.seconds),
        *([Cost("measure_difficulty", run.difficulty.seconds)] if run.difficulty is not None else []),
        *(Cost(f"evaluate_model {report.label}", report.seconds) for report in run.evaluations),
        *map(stage_cost, run.stages),
        Cost("merge_adapter", run.proof.seconds),
    ]

    def total(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    measured = [total(getattr(cost, name) for cost in steps) for name in ("tokens", "gpu_hours", "energy_wh")]
    return [*steps, Cost("total", sum(cost.seconds for cost in steps), *measured)]


def samples_of(run: RunResults) -> dict[str, list[Pair]]:
    """Answers of the base and the merged model to the same prompts, by what training changed."""
    by_label = {report.label: report for report in run.evaluations}
    truths = {
        prompt_id: (messages[-1]["content"], answer)
        for prompt_id, messages, answer in pl.read_parquet(run.data.eval).select("prompt_id", "prompt", "answer").iter_rows()
    }
    both = _first_samples(*(pl.read_parquet(by_label[label].samples) for label in ("base", "merged")))
    right, after = pl.col("correct"), pl.col("correct_second")
    change = pl.col(f"{REWARD}_second") - pl.col(REWARD)
    if both["correct"].null_count() < both.height or both[REWARD].null_count() == both.height:
        kinds = {
            "Fixed: wrong before, right after": both.filter(~right & after),
            "Broken: right before, wrong after": both.filter(right & ~after),
            "Still wrong": both.filter(~right & ~after),
        }
    else:
        kinds = {
            "Higher reward than before": both.filter(change > 0).sort(change, descending=True, maintain_order=True),
            "Lower reward than before": both.filter(change < 0).sort(change, maintain_order=True),
        }
    return {
        kind: [Pair(row[0], truths[row[0]][0], *_answers(row), truths[row[0]][1] or "") for row in rows.head(_MAX_SAMPLES).rows()]
        for kind, rows in kinds.items()
    }


def _first_samples(first: pl.DataFrame, second: pl.DataFrame) -> pl.DataFrame:
    """The first sample of each common prompt: prompt_id, completion, correct, reward, and those of the second model."""

    def samples(table: pl.DataFrame) -> pl.DataFrame:
        reward = pl.col(REWARD).cast(pl.Float64) if REWARD in table.columns else pl.lit(None, pl.Float64)
        right = pl.col("correct").cast(pl.Boolean)
        return turn_by_turn(table.filter(pl.col("sample") == 0)).select("prompt_id", "completion", right, reward.alias(REWARD))

    return samples(first).join(samples(second), on="prompt_id", suffix="_second").sort("prompt_id")


def _answers(row: tuple[Any, ...]) -> tuple[Answer, Answer]:
    return Answer(*row[1:4]), Answer(*row[4:7])


def _has_grpo(config: RunConfig) -> bool:
    return any(stage.kind == "grpo" for stage in config.stages)


def against_rejection(config: RunConfig, run_id: str, data_digest: str) -> "Comparison | None":
    """The newest run of rejection sampling on these data, then this run; None where this has no GRPO, or MLflow no such run."""
    baseline = find_rejection_run(data_digest, config.tracking) if _has_grpo(config) else None
    if baseline is None:
        return None
    return compare_runs(load_past_run(baseline, config.tracking), load_past_run(run_id, config.tracking))


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of both runs, and second minus first with its 95 % interval over the common prompts."""

    name: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    share: bool = True
    """Whether it is a share, which is shown in percent."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two runs."""

    first: PastRun
    second: PastRun
    settings: list[tuple[str, str, str]]
    """Fields that differ: name, value of the first, value of the second."""
    prompts: int
    """Number of held-out prompts that both runs were evaluated on."""
    figures: list[Difference]
    disagreements: list[Pair]
    """Prompts that one model answers right and the other wrong, by the first sample of each; without ground truths, those whose
    samples earn different rewards."""

    def section(self, first: str, second: str) -> Section:
        """The figures of the runs, which are called `first` and `second`, with the difference and its interval."""
        text = (
            f"Both merged models on their {self.prompts} common held-out prompts. The difference is {second} minus {first}, with "
            "its 95 % interval over prompts."
        )
        differ = {name for name, *_ in self.settings if name.split(".")[0] not in NO_EFFECT}
        if differ == {_SAVED} and self.first.data_digest == self.second.data_digest:
            text += " Both runs trained the same policy and saved it in another precision: they differ by rounding alone."
        rows = []
        for row in self.figures:
            scale, digits, unit = (100, 1, " %") if row.share else (1, 3, "")
            values = [f"{scale * value:.{digits}f}{unit}" for value in (row.first, row.second)]
            change, low, high = (f"{scale * value:+.{digits}f}" for value in (row.difference, row.low, row.high))
            rows.append([row.name, *values, change, f"{low} to {high}"])
        columns = (first, second, "difference", "interval")
        return Section(text=text, columns=("figure", *columns), rows=rows, right=columns)


def compare_runs(first: PastRun, second: PastRun) -> Comparison:
    """Compute the comparison. The same runs give the same result: the bootstrap has a fixed seed."""
    names = sorted(first.settings.keys() | second.settings.keys())
    pairs = [(name, first.settings.get(name, "-"), second.settings.get(name, "-")) for name in names]
    left, right = first.samples, second.samples
    common = set(left["prompt_id"]) & set(right["prompt_id"])

    both = _first_samples(left, right)
    contrary = both.filter(pl.col("correct") != pl.col("correct_second"))
    change = (pl.col(f"{REWARD}_second") - pl.col(REWARD)).abs()
    unjudged = both.filter(pl.col("correct").is_null() | pl.col("correct_second").is_null()).filter(change > 0)
    disagreeing = pl.concat([contrary, unjudged.sort(change, descending=True, maintain_order=True)]).head(_MAX_ROWS)
    questions = first.prompts | second.prompts
    return Comparison(
        first,
        second,
        [pair for pair in pairs if pair[1] != pair[2]],
        len(common),
        _differences(left, right) if common else [],
        [Pair(row[0], questions.get(row[0], ""), *_answers(row)) for row in disagreeing.rows()],
    )


def _differences(first: pl.DataFrame, second: pl.DataFrame) -> list[Difference]:

    def difference(name: str, of: str, left: pl.DataFrame, right: pl.DataFrame) -> Difference | None:
        if not {metrics.column_of(of)} <= {*left.columns} & {*right.columns}:
            return None
        both = prompt_values(left, of).join(prompt_values(right, of), on="prompt_id", suffix="_second").drop_nulls()
        if both.is_empty():
            return None
        both = both.sort("prompt_id")
        values, others = both["value"].to_numpy(), both["value_second"].to_numpy()
        found, metric = mean_interval(others - values, confidence=0.95), metrics.describe_figure(name)
        share = metric is not None and metric.unit == "share"
        return Difference(name, float(values.mean()), float(others.mean()), found.value, found.low, found.high, share)

    functions = sorted(name for name in first.columns if PromotionConfig.decides_by(name))
    found = [difference(name, name, first, second) for name in (*COMPARED, *functions)]
    both_have_tasks = "task" in first.columns and "task" in second.columns
    tasks = sorted({*first["task"], *second["task"]}) if both_have_tasks else []
    for task in tasks if len(tasks) > 1 else []:
        left, right = (samples.filter(pl.col("task") == task) for samples in (first, second))
        families = metrics.TASK_FAMILIES.items()
        found += [difference(metrics.member(family, task), name, left, right) for name, family in families]
    return [one for one in found if one is not None]


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page. The file at `path` is complete or does not exist."""
    from grpo_tasks.tracking.plots import COLOURS, new_panels, save_figure, style_axes

    first, second = comparison.first, comparison.second
    # One row of panels for each stage, one column for each metric.
    stages = list(dict.fromkeys([*first.curves, *second.curves]))
    figure, panels = new_panels(max(len(stages), 1), len(metrics.CURVES), size=(3.4, 2.6))
    panels_of = [(stage, metric) for stage in stages for metric in metrics.CURVES]
    for axes, (stage, metric) in zip(panels, panels_of, strict=False):
        for run, colour in zip((first, second), COLOURS, strict=False):
            curve = run.curves.get(stage, {}).get(metric, [])
            axes.plot([step for step, _ in curve], [value for _, value in curve], color=colour, linewidth=1.2)
        style_axes(axes, f"{textwrap.fill(stage, _TITLE_CHARS)}\n{metric}")
    curves = save_figure(figure, path.with_suffix(".png"))
    page = _render("comparison.html", comparison=comparison, first=first, second=second, curves=_picture(curves), colours=COLOURS)
    curves.unlink()
    with replacing(path) as unfinished:
        unfinished.write_text(page, encoding="utf-8")
    return path


def _render(template: str, **context: object) -> str:
    """Fill a template that lies next to this file. A name that it uses and `context` lacks is an error."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Before the value is escaped, where quotes still are quotes.
        finalize=lambda value: hide_written(value) if type(value) is str else value,
    )
    environment.filters["percent"] = lambda value: f"{100 * value:.1f} %"
    environment.filters["short"] = lambda text: text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + " ..."
    page = hide(environment.get_template(template).render(**context))
    # A browser must not break a line between a figure and its unit. What a model or a user wrote stays as it is.
    return _VERBATIM_OR_PERCENT.sub(lambda found: found[0] if found[0].startswith("<") else "\N{NO-BREAK SPACE}%", page)


def _picture(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")

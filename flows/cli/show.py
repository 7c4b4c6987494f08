"""Plans and results as the command line prints them. Light to import: a dry run must answer at once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from grpo_tasks.content.places import row_place
from grpo_tasks.lab.report import advice, opinions
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.metrics import HEADLINES, REWARD, figure_text
from schemas.results.base import Section
from schemas.results.data import DataReport
from schemas.results.difficulty import DifficultyReport
from schemas.results.evaluation import EvalReport
from schemas.results.lab import LabReport
from schemas.results.model import MergeProof, StageResult
from schemas.results.publication import Lineage, PipelineResult, Reproduction

if TYPE_CHECKING:
    import polars as pl

    from grpo_tasks.cluster.connect import Overview
    from grpo_tasks.operating.trace import Trace
    from grpo_tasks.planning.memory_plan import StagePlan
    from grpo_tasks.reporting.compare import Comparison

PASS_RATES = ("pass_rate", "pass_rate_low", "pass_rate_high", "samples")
"""Columns of pass rates that `grpo trace` shows."""
out = Console()
"""Standard output of every command."""
GIB = 2**30


def print_table(console: Console, table: Table, figures: Sequence[str]) -> None:
    """Print a table without cutting a cell: a program that reads it, such as grep, gets whole rows and all columns.

    On a terminal that is too narrow, the last of `figures` (headings) are left out until the rest fits, and named below.
    """
    left_out: list[str] = []
    while (width := _width(console, table)) > console.width and console.is_terminal and len(left_out) < len(figures):
        left_out.insert(0, figures[-1 - len(left_out)])
        table.columns = [column for column in table.columns if column.header != left_out[0]]
    if console.is_terminal:
        console.print(table)
    else:
        before, console.width = console.width, max(console.width, width)
        console.print(table)
        console.width = before
    if left_out:
        console.print(f"a wider terminal, or | cat, also shows: {', '.join(left_out)}", highlight=False)


def _width(console: Console, table: Table) -> int:
    wide = console.options.update(width=10_000)
    return Measurement.get(console, wide, table).maximum


def show_plan(console: Console, config: RunConfig, notes: Sequence[str] = ()) -> None:
    """Print what a run would do, and what is worth saying about its model."""
    table = Table(title=f"Plan of {config.name} (nothing was run)", title_justify="left")
    for heading in ("step", "details"):
        table.add_column(heading, overflow="fold")
    sources = ", ".join(source.path for source in [*config.data.train, *config.data.eval])
    table.add_row("prepare_data", sources)
    table.add_row("validate_data", f"prompts up to {config.validation.max_prompt_length} tokens")
    table.add_row("probe_rewards", ", ".join(sorted({name for stage in config.stages for name in stage.rewards})))
    if described := describe_difficulty(config):
        table.add_row("measure_difficulty", described)
    table.add_row("evaluate_model", f"base: {config.model.path}")
    for stage in config.stages:
        table.add_row(f"train_stage {stage.name}", describe_stage(stage))
    asked = config.model.merged_dtype
    precision = "the shortest precision that keeps 95 % of what training changed" if asked == "auto" else asked
    table.add_row("merge_adapter", f"saved in {precision}")
    prompts = config.evaluation.max_prompts or "all"
    table.add_row("evaluate_model", f"{config.evaluation.num_samples} samples for each of {prompts} prompts")
    for guard in config.promotion.guards:
        limits = [
            f"{what} {limit:g}" for what, limit in (("drop", guard.max_drop), ("rise", guard.max_rise)) if limit is not None
        ]
        paths = ", ".join(source.path for source in guard.data)
        table.add_row(f"guard {guard.name}", f"{guard.metric} on {paths}, largest {' and '.join(limits)}")
    person = ", then by a person" if config.promotion.approval == "manual" else ""
    decides = config.promotion.metric or "accuracy; by the reward if the rows have no ground truths"
    table.add_row("publish_model", f"{config.registered_model}, decided by {decides}{person}")
    console.print(table)
    for note in notes:
        console.print(f"note: {note}")


def describe_difficulty(config: RunConfig) -> str:
    """Where pass rates come from, in one line; empty where no stage has any."""
    difficulty = config.difficulty
    measured = f"{difficulty.samples} completions of every training prompt" if difficulty.samples else ""
    if difficulty.screen:
        measured += f", {difficulty.screen} where none of the first {difficulty.screen} is solved"
    if difficulty.pass_rate_column is None or all(stage.measure_difficulty for stage in config.stages):
        return measured
    return f"column {difficulty.pass_rate_column} of the data"


def describe_stage(stage: StageConfig) -> str:
    """A stage in one line."""
    length = f"{stage.max_steps} updates" if stage.max_steps else f"{stage.num_train_epochs:g} epochs"
    if stage.kind == "sft":
        return f"sft: {length} of {stage.completions_per_update} demonstrations; learning rate {stage.learning_rate:g}"
    prompts = stage.completions_per_update // stage.num_generations
    sizes = f"{prompts} prompts x {stage.num_generations} completions"
    if stage.kind == "rejection":
        length = f"rejection sampling: {length}"
    band = "" if stage.keep_pass_rate is None else f"; pass rates {stage.keep_pass_rate[0]:g} to {stage.keep_pass_rate[1]:g}"
    return f"{length} of {sizes}{band}; rewards {', '.join(stage.rewards)}; learning rate {stage.learning_rate:g}"


def show_data(console: Console, report: DataReport) -> None:
    """Print how many rows were accepted, and why the others were not."""
    console.print(
        f"{report.rows:,} rows read: {report.train_rows:,} to train on, {report.eval_rows:,} held out, "
        f"{report.quarantined:,} quarantined"
    )
    for rule in report.rules:
        if rule.rows:
            console.print(f"  {rule.rule}: {rule.rows:,} rows ({rule.meaning})")
    lengths = report.prompt_tokens
    console.print(f"prompts: median {lengths.p50} tokens, longest {lengths.max}, limit {lengths.limit}")
    console.print(f"report: {report.directory / 'report.md'}", soft_wrap=True)


def show_lab(console: Console, report: LabReport) -> None:
    """Print the checks and forecasts of the reward lab."""
    counts = {outcome: sum(check.outcome == outcome for check in report.checks) for outcome in ("passed", "warned", "failed")}
    console.print("reward lab: " + ", ".join(f"{count} checks {outcome}" for outcome, count in counts.items()))
    for line in report.left_out:
        console.print(f"  not checked: {line}")
    rows, what_to_do = opinions(report.checks)
    if rows:
        table = Table("where", "check", "found")
        for where, check, found, probe in rows:
            table.add_row(where, check, escape(f"{found} ({probe})" if probe else found))
        console.print(table)
        console.print(what_to_do, markup=False)
    for forecast in report.forecasts:
        console.print(
            f"  stage {forecast.stage}: {forecast.share_with_signal:.0%} of the base model's groups have different rewards, "
            f"mean reward {forecast.mean_reward:.2f}"
        )
    for line in advice(report.forecasts):
        console.print(line, markup=False, highlight=False)
    console.print(f"report: {report.directory / 'report.md'}", soft_wrap=True)


def show_sections(console: Console, sections: Sequence[Section], *, title: str | None = None) -> None:
    """Print sections of a result; `title` stands above each table."""
    for section in sections:
        for text in filter(None, [section.title, section.text]):
            console.print(text, markup=False, highlight=False)
        if section.columns:
            table = Table(title=title, title_justify="left")
            for column in section.columns:
                table.add_column(escape(column), justify="right" if column in section.right else "left")
            for row in section.rows:
                table.add_row(*map(escape, row))
            console.print(table)
        for name, quote in section.quotes.items():
            console.print(f"{name}:\n{quote}", markup=False, highlight=False)


def show_difficulty(console: Console, report: DifficultyReport) -> None:
    """Print how many training prompts are solved how often, by the rewards of each stage."""
    show_sections(console, report.sections())
    console.print(f"report: {report.directory / 'report.md'}", soft_wrap=True)


def show_evaluations(console: Console, reports: Sequence[EvalReport]) -> None:
    """Print evaluations, one row each."""
    table = Table()
    table.add_column("model")
    names = [name for name in HEADLINES if any(name in report.metrics for report in reports)]
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for report in reports:
        table.add_row(report.label, *(_figure(report, name) for name in names))
    print_table(console, table, [name.replace("_", " ") for name in names])
    if reports:
        last = reports[-1]
        console.print(f"{last.prompts} held-out prompts, {last.num_samples} samples each at temperature {last.temperature:g}")


def show_stage(console: Console, config: str, result: StageResult) -> None:
    """Print how a stage ended, where its weights are, and what can be done with them."""
    best = "" if result.best_step is None else f", weights of update {result.best_step}"
    console.print(f"stage {result.stage}: {result.steps} updates, stopped by {result.stopped}{best}", highlight=False)
    if REWARD in result.metrics:
        console.print(f"mean reward of the last updates: {result.metrics[REWARD]:.3f}", highlight=False)
    weights = result.model.adapter or result.model.path
    console.print(f"weights: {weights}", soft_wrap=True, highlight=False)
    console.print(f"evaluate them: grpo evaluate {weights} {config}", soft_wrap=True, highlight=False)
    if result.model.adapter is not None:
        console.print(f"merge them:    grpo merge {weights} {config} --into DIR", soft_wrap=True, highlight=False)


def show_merge(console: Console, proof: MergeProof) -> None:
    """Print where the merged model is, and how it compares with base + adapter."""
    console.print(f"merged model: {proof.model.path}", soft_wrap=True)
    console.print(f"saved in {proof.choice()}", soft_wrap=True, highlight=False)
    console.print(
        f"from base + adapter: {proof.mean_logprob_difference:.2g} nats per token (base {proof.base_logprob_difference:.2g}); "
        f"{proof.greedy_agreement:.1%} of greedy tokens agree (base {proof.base_greedy_agreement:.1%})",
        soft_wrap=True,
        highlight=False,
    )


def show_pipeline(console: Console, config: RunConfig, result: PipelineResult) -> None:
    """Print the end of a pipeline run: evaluations, decision, where everything is."""
    show_evaluations(console, result.evaluations)
    publication = result.publication
    alias = f"models:/{publication.model_name}@champion" if publication.champion else "the champion has not changed"
    console.print(f"{publication.model_name} version {publication.model_version}: {publication.reason} ({alias})")
    version = f"{publication.model_name}/{publication.model_version}"
    if publication.awaits_approval:
        console.print(
            f"decide:       grpo promote {version}, or grpo promote {version} --reject", soft_wrap=True, highlight=False
        )
    merged = [evaluation.model.path for evaluation in result.evaluations if evaluation.label == "merged"]
    for folder in merged:
        console.print(f"merged model: {folder}", soft_wrap=True, highlight=False)
    console.print(f"registered as {version}", highlight=False)
    console.print(f"try it:       grpo chat {version}", soft_wrap=True, highlight=False)
    console.print(f"fetch it:     grpo download {version} DIR", soft_wrap=True, highlight=False)
    console.print(f"report: {result.report}", soft_wrap=True)
    console.print(
        f"MLflow run {publication.run_id}; files in {config.resources.output_dir / config.name}; open both UIs with: grpo ui"
    )


def show_trace(console: Console, trace: "Trace") -> None:
    """Print what happened to one row, step by step."""
    console.print(f"{row_place(trace.source, trace.line)}, {trace.split}", markup=False, highlight=False, style="bold")
    if trace.faults is not None:
        for fault in trace.faults.iter_rows(named=True):
            console.print(f"refused: {fault['rule']}: {fault['meaning']} (found {fault['value']!r})", markup=False)
    if trace.prompt is not None:
        row = trace.prompt.row(0, named=True)
        console.print(f"prompt {row['prompt_id']}, {row['prompt_tokens']} tokens, ground truth {row['answer']!r}", markup=False)
        for message in row["prompt"]:
            console.print(f"  {message['role']}: {message['content']}", markup=False)
    for label, rows in trace.pass_rates.items():
        _show_rows(console, f"pass rate, measured from {label}", rows, ("stage", *PASS_RATES, "frequent_answer"))
    for stage, reason in trace.left_out.items():
        console.print(f"stage {stage} does not train on it: {reason.replace('_', ' ')}", markup=False)
    for stage, rows in trace.completions.items():
        _show_rows(console, f"stage {stage}", rows, ("step", "sample", "reward", "advantage", "completion"))
    for label, rows in trace.samples.items():
        _show_rows(console, f"evaluation {label}", rows, ("sample", "strict_format", "correct", "finish_reason", "completion"))

    for table, rows in trace.further.items():
        _show_rows(console, table, rows, [name for name in rows.columns if name != "prompt_id"])


def _show_rows(console: Console, title: str, rows: "pl.DataFrame", columns: Sequence[str]) -> None:
    if rows.is_empty():
        console.print(f"{title}: no completions of this row were kept")
        return
    table = Table(*columns, title=title, title_justify="left")
    for row in rows.select(columns).iter_rows():
        table.add_row(*(escape(f"{value:.3f}" if isinstance(value, float) else str(value)) for value in row))
    console.print(table)


def show_lineage(console: Console, lineage: Lineage) -> None:
    """Print where a version came from."""
    table = Table(title=f"{lineage.name} version {lineage.version}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in lineage.model_dump().items():
        if name not in ("name", "version", "packages"):
            table.add_row(name.replace("_", " "), escape(", ".join(value) if isinstance(value, list) else str(value)))
    table.add_row("packages", escape(", ".join(f"{name} {version}" for name, version in lineage.packages.items())))
    for name in ("config.yaml", "data/report.md", "data/quarantine.parquet", "environment.json"):
        table.add_row("artifact", f"runs:/{lineage.run_id}/{name}")
    console.print(table)


def show_comparison(console: Console, found: "Comparison") -> None:
    """Print the figures and settings of two runs."""
    titles = [f"{run.name} {run.run_id[:8]}" for run in (found.first, found.second)]
    show_sections(console, [found.section(*titles)], title=f"{found.prompts} common held-out prompts")
    settings = Table("setting", *titles, title=f"{len(found.settings)} settings differ", title_justify="left")
    for setting in found.settings:
        settings.add_row(*(escape(value) for value in setting))
    console.print(settings)
    console.print(
        f"the runs disagree on at least {len(found.disagreements)} prompts"
        if found.disagreements
        else "the runs agree on every prompt"
    )


def show_reproduction(console: Console, made: Reproduction) -> None:
    """Print whether the reproduced adapter equals the recorded one."""
    for difference in made.differences:
        console.print(f"this has changed since then: {difference}", markup=False)
    verdict = "is identical" if made.same else "DIFFERS"
    console.print(
        f"the reproduced adapter {verdict}: {made.adapter_sha256[:16]}, recorded {made.of.adapter_sha256[:16]} "
        f"(MLflow run {made.run_id})",
        soft_wrap=True,
    )


def _figure(report: EvalReport, name: str) -> str:
    interval = report.metrics.get(name)
    if interval is None:
        return ""
    return figure_text(name, interval.value)


def show_memory(console: Console, plans: Sequence["StagePlan"], memory: float) -> None:
    """Print the bytes of each stage, and what to change where it does not fit."""
    for plan in plans:
        tokens = plan.pass_tokens
        table = Table(title=f"Stage {plan.stage.name}, per GPU (calculated, not measured)", title_justify="left")
        table.add_column("what")
        table.add_column("GiB", justify="right")
        for item in plan.standing:
            table.add_row(item.what, f"{item.bytes / GIB:.2f}")
        for item in plan.sampling:
            table.add_row(f"while sampling: {item.what}", f"{item.bytes / GIB:.2f}")
        table.add_row(f"in an update: a pass of {tokens:,} tokens", f"{plan.update(tokens) / GIB:.2f}" if tokens else "-")
        table.add_row("kept free", f"{plan.reserve / GIB:.2f}")
        table.add_row("needed", f"{plan.needed / GIB:.2f}", style="bold")
        console.print(table)
        if plan.fits:
            console.print(f"It fits into {memory / GIB:.1f} GiB. A pass may have up to {plan.fitting_tokens:,} tokens.\n")
        else:
            console.print(f"[red]It does not fit into {memory / GIB:.1f} GiB.[/] fix: {_advice(plan)}\n")


def _advice(plan: "StagePlan") -> str:
    """What would make the stage fit."""
    if plan.fitting_tokens and not plan.sampling_fits:
        return "rollout.max_batch_size: a smaller one"
    if plan.fitting_tokens:
        return "max_tokens_per_microbatch: auto"
    if not plan.model.gradient_checkpointing and plan.with_checkpointing().fitting_tokens:
        return "model.gradient_checkpointing: true, and max_tokens_per_microbatch: auto"
    return "a GPU with more memory, a smaller model, or model.quantization: nf4"


def show_cluster(console: Console, found: "Overview") -> None:
    """Print the nodes of a cluster with what is free and in what they differ, and the runs that hold or wait for some."""
    table = Table(title="Nodes of the Ray cluster", title_justify="left")
    for heading in ("node", "CPUs free", "GPUs free", "versions"):
        table.add_column(heading, overflow="fold")
    for node in found.nodes:
        same = "the same as here" if node.cpus[1] else "head without CPUs: trains nothing"
        versions = "[red]" + escape("; ".join(node.faults)) + "[/]" if node.faults else same
        table.add_row(node.address, *(f"{free:g} of {total:g}" for free, total in (node.cpus, node.gpus)), versions)
    console.print(table)
    for name, state in found.holders:
        console.print(f"{escape(name)}: {'holds nodes' if state == 'CREATED' else 'waits for nodes'}", highlight=False)
    if not found.holders:
        console.print("no run uses it")

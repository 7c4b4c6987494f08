"""Plans and results as the command line prints them. Light to import: a dry run must answer at once."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from grpo_tasks.content.places import row_place
from grpo_tasks.lab.report import advice, opinions
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.metrics import HEADLINES, REWARD, figure_text
from schemas.results.base import Section
from schemas.results.data import DataReport, LabReport
from schemas.results.evaluation import DifficultyReport, EvalReport
from schemas.results.model import MergeProof, StageResult
from schemas.results.publication import Lineage, PipelineResult, Reproduction

if TYPE_CHECKING:
    import polars as pl

    from grpo_tasks.cluster.connect import NodeView
    from grpo_tasks.operating.trace import Trace
    from grpo_tasks.planning.memory_plan import StagePlan
    from grpo_tasks.reporting.compare import Comparison

PASS_RATES = ("pass_rate", "pass_rate_low", "pass_rate_high", "samples")
"""Columns of pass rates that `grpo trace` shows."""
out = Console()
"""Standard output of every command."""
GIB = 2**30


def say(*lines: str) -> None:
    """Print lines as they are, neither wrapped nor coloured nor read as markup."""
    for line in lines:
        out.print(line, soft_wrap=True, markup=False, highlight=False)


def table_of(
    headings: Iterable[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str | None = None,
    right: Sequence[str] = (),
    fold: bool = False,
) -> Table:
    """A table of plain texts. Columns in `right` are aligned there; with `fold` a long cell is wrapped instead of cut."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold" if fold else "ellipsis")
    for row in rows:
        table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def print_table(table: Table, figures: Sequence[str] = ()) -> None:
    """Print a table without cutting a cell: a program that reads it, such as grep, gets whole rows and all columns.

    On a terminal that is too narrow, the last of `figures` (headings) are left out until the rest fits, and named below.
    """
    left_out: list[str] = []
    wide = out.options.update(width=10_000)
    while (width := Measurement.get(out, wide, table).maximum) > out.width and out.is_terminal and len(left_out) < len(figures):
        left_out.insert(0, figures[-1 - len(left_out)])
        table.columns = [column for column in table.columns if column.header != left_out[0]]
    (out if out.is_terminal else Console(width=max(out.width, width))).print(table)
    if left_out:
        say(f"a wider terminal, or | cat, also shows: {', '.join(left_out)}")


def show_plan(config: RunConfig, notes: Sequence[str] = ()) -> None:
    """Print what a run would do, and what is worth saying about its model."""
    rewards = ", ".join(sorted({name for stage in config.stages for name in stage.rewards}))
    rows = [
        ("prepare_data", ", ".join(source.path for source in [*config.data.train, *config.data.eval])),
        ("validate_data", f"prompts up to {config.validation.max_prompt_length} tokens"),
        ("probe_rewards", rewards),
    ]
    if described := describe_difficulty(config):
        rows.append(("measure_difficulty", described))
    rows.append(("evaluate_model", f"base: {config.model.path}"))
    rows += [(f"train_stage {stage.name}", describe_stage(stage)) for stage in config.stages]
    asked = config.model.merged_dtype
    precision = "the shortest precision that keeps 95 % of what training changed" if asked == "auto" else asked
    rows.append(("merge_adapter", f"saved in {precision}"))
    prompts = config.evaluation.max_prompts or "all"
    rows.append(("evaluate_model", f"{config.evaluation.num_samples} samples for each of {prompts} prompts"))
    for guard in config.promotion.guards:
        limits = {"drop": guard.max_drop, "rise": guard.max_rise}
        largest = " and ".join(f"{what} {limit:g}" for what, limit in limits.items() if limit is not None)
        paths = ", ".join(source.path for source in guard.data)
        rows.append((f"guard {guard.name}", f"{guard.metric} on {paths}, largest {largest}"))
    person = ", then by a person" if config.promotion.approval == "manual" else ""
    decides = config.promotion.metric or "accuracy; by the reward if the rows have no ground truths"
    rows.append(("publish_model", f"{config.registered_model}, decided by {decides}{person}"))
    out.print(table_of(("step", "details"), rows, title=f"Plan of {config.name} (nothing was run)", fold=True))
    say(*(f"note: {note}" for note in notes))


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


def show_data(report: DataReport) -> None:
    """Print how many rows were accepted, and why the others were not."""
    say(
        f"{report.rows:,} rows read: {report.train_rows:,} to train on, {report.eval_rows:,} held out, "
        f"{report.quarantined:,} quarantined",
        *(f"  {rule.rule}: {rule.rows:,} rows ({rule.meaning})" for rule in report.rules if rule.rows),
    )
    lengths = report.prompt_tokens
    say(f"prompts: median {lengths.p50} tokens, longest {lengths.max}, limit {lengths.limit}")
    say(f"report: {report.directory / 'report.md'}")


def show_lab(report: LabReport) -> None:
    """Print the checks and forecasts of the reward lab."""
    counts = {outcome: sum(check.outcome == outcome for check in report.checks) for outcome in ("passed", "warned", "failed")}
    say("reward lab: " + ", ".join(f"{count} checks {outcome}" for outcome, count in counts.items()))
    say(*(f"  not checked: {line}" for line in report.left_out))
    found, what_to_do = opinions(report.checks)
    if found:
        rows = [(where, check, f"{what} ({probe})" if probe else what) for where, check, what, probe in found]
        out.print(table_of(("where", "check", "found"), rows))
        say(what_to_do)
    for forecast in report.forecasts:
        say(
            f"  stage {forecast.stage}: {forecast.share_with_signal:.0%} of the base model's groups have different rewards, "
            f"mean reward {forecast.mean_reward:.2f}"
        )
    say(*advice(report.forecasts), f"report: {report.directory / 'report.md'}")


def show_sections(sections: Sequence[Section], *, title: str | None = None) -> None:
    """Print sections of a result; `title` stands above each table."""
    for section in sections:
        say(*filter(None, [section.title, section.text]))
        if section.columns:
            out.print(table_of(section.columns, section.rows, right=section.right, title=title))
        say(*(f"{name}:\n{quote}" for name, quote in section.quotes.items()))


def show_difficulty(report: DifficultyReport) -> None:
    """Print how many training prompts are solved how often, by the rewards of each stage."""
    show_sections(report.sections())
    say(f"report: {report.directory / 'report.md'}")


def show_evaluations(reports: Sequence[EvalReport]) -> None:
    """Print evaluations, one row each."""
    names = [name for name in HEADLINES if any(name in report.metrics for report in reports)]
    titles = [name.replace("_", " ") for name in names]
    rows = [
        [one.label, *(figure_text(name, one.metrics[name].value) if name in one.metrics else "" for name in names)]
        for one in reports
    ]
    print_table(table_of(("model", *titles), rows, right=titles), titles)
    if reports:
        last = reports[-1]
        say(f"{last.prompts} held-out prompts, {last.num_samples} samples each at temperature {last.temperature:g}")


def show_stage(config: str, result: StageResult) -> None:
    """Print how a stage ended, where its weights are, and what can be done with them."""
    best = "" if result.best_step is None else f", weights of update {result.best_step}"
    say(f"stage {result.stage}: {result.steps} updates, stopped by {result.stopped}{best}")
    if REWARD in result.metrics:
        say(f"mean reward of the last updates: {result.metrics[REWARD]:.3f}")
    weights = result.model.adapter or result.model.path
    say(f"weights: {weights}", f"evaluate them: grpo evaluate {weights} {config}")
    if result.model.adapter is not None:
        say(f"merge them:    grpo merge {weights} {config} --into DIR")


def show_merge(proof: MergeProof) -> None:
    """Print where the merged model is, and how it compares with base + adapter."""
    say(
        f"merged model: {proof.model.path}",
        f"saved in {proof.choice()}",
        f"from base + adapter: {proof.mean_logprob_difference:.2g} nats per token (base {proof.base_logprob_difference:.2g}); "
        f"{proof.greedy_agreement:.1%} of greedy tokens agree (base {proof.base_greedy_agreement:.1%})",
    )


def show_pipeline(config: RunConfig, result: PipelineResult) -> None:
    """Print the end of a pipeline run: evaluations, decision, where everything is."""
    show_evaluations(result.evaluations)
    publication = result.publication
    alias = f"models:/{publication.model_name}@champion" if publication.champion else "the champion has not changed"
    version = f"{publication.model_name}/{publication.model_version}"
    say(f"{publication.model_name} version {publication.model_version}: {publication.reason} ({alias})")
    if publication.awaits_approval:
        say(f"decide:       grpo promote {version}, or grpo promote {version} --reject")
    say(
        *(f"merged model: {evaluation.model.path}" for evaluation in result.evaluations if evaluation.label == "merged"),
        f"registered as {version}",
        f"try it:       grpo chat {version}",
        f"fetch it:     grpo download {version} DIR",
        f"report: {result.report}",
        f"MLflow run {publication.run_id}; files in {config.resources.output_dir / config.name}; open both UIs with: grpo ui",
    )


def show_trace(trace: "Trace") -> None:
    """Print what happened to one row, step by step."""
    out.print(f"{row_place(trace.source, trace.line)}, {trace.split}", markup=False, highlight=False, style="bold")
    if trace.faults is not None:
        for fault in trace.faults.iter_rows(named=True):
            say(f"refused: {fault['rule']}: {fault['meaning']} (found {fault['value']!r})")
    if trace.prompt is not None:
        row = trace.prompt.row(0, named=True)
        say(f"prompt {row['prompt_id']}, {row['prompt_tokens']} tokens, ground truth {row['answer']!r}")
        say(*(f"  {message['role']}: {message['content']}" for message in row["prompt"]))
    for label, rows in trace.pass_rates.items():
        _show_rows(f"pass rate, measured from {label}", rows, ("stage", *PASS_RATES, "frequent_answer"))
    for stage, reason in trace.left_out.items():
        say(f"stage {stage} does not train on it: {reason.replace('_', ' ')}")
    for stage, rows in trace.completions.items():
        _show_rows(f"stage {stage}", rows, ("step", "sample", "reward", "advantage", "completion"))
    for label, rows in trace.samples.items():
        _show_rows(f"evaluation {label}", rows, ("sample", "strict_format", "correct", "finish_reason", "completion"))
    for name, rows in trace.further.items():
        _show_rows(name, rows, [column for column in rows.columns if column != "prompt_id"])


def _show_rows(title: str, rows: "pl.DataFrame", columns: Sequence[str]) -> None:
    if rows.is_empty():
        say(f"{title}: no completions of this row were kept")
        return
    cells = [
        [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows.select(columns).iter_rows()
    ]
    out.print(table_of(columns, cells, title=title))


def show_lineage(lineage: Lineage) -> None:
    """Print where a version came from."""
    facts = lineage.model_dump(exclude={"name", "version", "packages"})
    rows = [
        *((name.replace("_", " "), ", ".join(fact) if isinstance(fact, list) else str(fact)) for name, fact in facts.items()),
        ("packages", ", ".join(f"{name} {version}" for name, version in lineage.packages.items())),
        *(
            ("artifact", f"runs:/{lineage.run_id}/{name}")
            for name in ("config.yaml", "data/report.md", "data/quarantine.parquet", "environment.json")
        ),
    ]
    table = table_of(("", ""), rows, title=f"{lineage.name} version {lineage.version}", fold=True)
    table.show_header = False
    out.print(table)


def show_comparison(found: "Comparison") -> None:
    """Print the figures and settings of two runs."""
    titles = [f"{run.name} {run.run_id[:8]}" for run in (found.first, found.second)]
    show_sections([found.section(*titles)], title=f"{found.prompts} common held-out prompts")
    out.print(table_of(("setting", *titles), found.settings, title=f"{len(found.settings)} settings differ"))
    differ = len(found.disagreements)
    say(f"the runs disagree on at least {differ} prompts" if differ else "the runs agree on every prompt")


def show_reproduction(made: Reproduction) -> None:
    """Print whether the reproduced adapter equals the recorded one."""
    verdict = "is identical" if made.same else "DIFFERS"
    say(
        *(f"this has changed since then: {difference}" for difference in made.differences),
        f"the reproduced adapter {verdict}: {made.adapter_sha256[:16]}, recorded {made.of.adapter_sha256[:16]} "
        f"(MLflow run {made.run_id})",
    )


def show_memory(plans: Sequence["StagePlan"], memory: float) -> None:
    """Print the bytes of each stage, and what to change where it does not fit."""
    for plan in plans:
        tokens = plan.pass_tokens
        rows = [
            *((item.what, f"{item.bytes / GIB:.2f}") for item in plan.standing),
            *((f"while sampling: {item.what}", f"{item.bytes / GIB:.2f}") for item in plan.sampling),
            (f"in an update: a pass of {tokens:,} tokens", f"{plan.update(tokens) / GIB:.2f}" if tokens else "-"),
            ("kept free", f"{plan.reserve / GIB:.2f}"),
        ]
        title = f"Stage {plan.stage.name}, per GPU (calculated, not measured)"
        table = table_of(("what", "GiB"), rows, title=title, right=["GiB"])
        table.add_row("needed", f"{plan.needed / GIB:.2f}", style="bold")
        out.print(table)
        if plan.fits:
            say(f"It fits into {memory / GIB:.1f} GiB. A pass may have up to {plan.fitting_tokens:,} tokens.\n")
        else:
            out.print(f"[red]It does not fit into {memory / GIB:.1f} GiB.[/] fix: {_advice(plan)}\n")


def _advice(plan: "StagePlan") -> str:
    """What would make the stage fit."""
    if plan.fitting_tokens and not plan.sampling_fits:
        return "rollout.max_batch_size: a smaller one"
    if plan.fitting_tokens:
        return "max_tokens_per_microbatch: auto"
    if not plan.model.gradient_checkpointing and plan.with_checkpointing().fitting_tokens:
        return "model.gradient_checkpointing: true, and max_tokens_per_microbatch: auto"
    return "a GPU with more memory, a smaller model, or model.quantization: nf4"


def show_cluster(nodes: "Sequence[NodeView]", holders: Sequence[tuple[str, str]]) -> None:
    """Print the nodes of a cluster with what is free and in what they differ, and name and state of all reservations."""
    rows = []
    for node in nodes:
        same = "the same as here" if node.cpus[1] else "head without CPUs: trains nothing"
        versions = Text("; ".join(node.faults), "red") if node.faults else same
        rows.append([node.address, *(f"{free:g} of {total:g}" for free, total in (node.cpus, node.gpus)), versions])
    headings = ("node", "CPUs free", "GPUs free", "versions")
    out.print(table_of(headings, rows, title="Nodes of the Ray cluster", fold=True))
    say(*(f"{name}: {'holds nodes' if state == 'CREATED' else 'waits for nodes'}" for name, state in holders))
    if not holders:
        say("no run uses it")

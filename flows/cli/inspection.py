"""Commands that only read: runs, models, completions, presets, fields, one row of a run, what a run needs, this machine."""

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from flows.cli.environment import prepare_environment, report_errors
from flows.cli.options import Config, Set, TrackingUri, Wide, parse_size
from flows.cli.progress import shown_progress
from flows.cli.show import hint, out, pipe_row, say, show
from grpo_tasks.content.places import row_place
from schemas.config.load import PRESETS, find_config, load_config, tracking_at
from schemas.config.run import RunConfig
from schemas.config.section import Section, fields_below, section_in
from schemas.errors import ConfigError
from schemas.metrics import HEADLINES, REWARD, figure_text
from schemas.results.base import Section as Shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl
    from pydantic.fields import FieldInfo

    from grpo_tasks.operating.trace import Trace
    from grpo_tasks.planning.memory_plan import StagePlan

TITLES = [name.replace("_", " ") for name in HEADLINES]
FIRST_TITLES = 4
"""Figures that a narrow terminal shows before anything else that it may leave out."""
PASS_RATES = ("pass_rate", "pass_rate_low", "pass_rate_high", "samples")
"""Columns of pass rates that `grpo trace` shows."""
GIB = 2**30
_INDENT = "    "


def runs(
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=1000, help="How many, newest first.")] = 20,
    tracking_uri: TrackingUri = None,
    wide: Wide = False,
) -> None:
    """List the newest runs with their figures. `grpo compare` takes two of them by the first column."""
    with report_errors(reads=True):
        with shown_progress("reading the runs"):
            prepare_environment()
            from grpo_tasks.tracking.past_runs import recent_runs

            found = recent_runs(tracking_at(tracking_uri), limit)
        if not found:
            say("no runs yet: grpo run CONFIG makes one")
            return
        rows = []
        for line in found:
            when = f"{line.started:%Y-%m-%d %H:%M}"
            rows.append([line.run_id[:8], line.name, line.status.lower(), *_cells(line.figures), line.version, when])
        columns = ("run", "name", "status", *TITLES, "model", "started")
        extra = (*TITLES[:FIRST_TITLES], "model", *TITLES[FIRST_TITLES:], "started")
        show(Shown(columns=columns, rows=rows, right=TITLES, extra=extra), wide=wide)
        # Those that have an evaluated model, which a comparison needs.
        evaluated = [line.run_id[:8] for line in found if line.figures][:2]
        hint(*(f"compare two: grpo compare {' '.join(reversed(evaluated))}" for _ in evaluated[1:]))


def models(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this registered model.")] = None,
    tracking_uri: TrackingUri = None,
    wide: Wide = False,
) -> None:
    """List registered models: versions, aliases and figures."""
    with report_errors(reads=True):
        with shown_progress("reading the registered models"):
            prepare_environment()
            from grpo_tasks.tracking.past_runs import registered_versions

            found = registered_versions(tracking_at(tracking_uri), name)
        if not found:
            say("no registered models yet: grpo run CONFIG registers one")
            return
        rows = []
        for line in found:
            when = f"{line.made:%Y-%m-%d %H:%M}"
            rows.append([f"{line.name}/{line.version}", ", ".join(line.aliases), *_cells(line.figures), line.run_id[:8], when])
        extra = (*TITLES[:FIRST_TITLES], "run", *TITLES[FIRST_TITLES:], "made")
        show(Shown(columns=("model", "alias", *TITLES, "run", "made"), rows=rows, right=TITLES, extra=extra), wide=wide)
        first = f"{found[0].name}/{found[0].version}"
        hint(f"more: grpo chat {first}", f"      grpo lineage {first}", f"      grpo download {first} DIR")


def completions(
    config: Config,
    stage: Annotated[str | None, typer.Option(help="Stage. Default: the one trained last.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Update. Default: the last one that was recorded.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Those with the highest reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest reward.")] = False,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=10_000, help="How many of each.")] = 5,
    override: Set = None,
) -> None:
    """Show completions of an update with their rewards: grpo completions CONFIG --step 20 --best --worst."""
    with report_errors(reads=True):
        settings = load_config(config, override)
        prepare_environment()
        from grpo_tasks.operating.trace import read_completions

        folder = settings.resources.output_dir / settings.name
        found = read_completions(folder, stage=stage, step=step, tracking=settings.tracking)
        recorded = f"completions are recorded of updates {', '.join(map(str, found.steps))}"
        show(Shown(text=f"stage {found.stage}, update {found.step} ({recorded})"))
        by_reward = found.table.sort(REWARD, descending=True, nulls_last=True)
        if not (best or worst):
            _show_completions("first", found.table.head(limit).to_dicts())
        if best:
            _show_completions("best", by_reward.head(limit).to_dicts())
        if worst:
            _show_completions("worst", by_reward.tail(limit).reverse().to_dicts())


def _show_completions(title: str, rows: "list[dict[str, object]]") -> None:
    shown = None
    for row in rows:
        if row["prompt_id"] != shown:
            shown = row["prompt_id"]
            truth = "" if row.get("answer") is None else f" (ground truth {row['answer']})"
            show(Shown(text=f"\n{title}: prompt {shown}{truth}"))
            say(*([str(row["prompt"])] if row.get("prompt") else []))
        scores = [f"{name} {value:.3g}" for name, value in row.items() if isinstance(value, float)]
        count = row["count"]
        identical = f"{count} identical completions, " if count != 1 else ""
        show(Shown(text=f"--- {identical}{', '.join(scores)}"))
        say(str(row["completion"]))


def _cells(figures: "Mapping[str, float]") -> list[str]:
    return [figure_text(name, figures[name]) if name in figures else "" for name in HEADLINES]


def trace(
    row: Annotated[
        str,
        typer.Argument(
            metavar="ROW", help="A prompt_id (a column of every table), or FILE:LINE of the data. A JSON array counts records."
        ),
    ],
    config: Config,
    override: Set = None,
) -> None:
    """Follow one row through the last run: line, verdict, completions with rewards, evaluations."""
    with report_errors():
        settings = load_config(config, override)
        from grpo_tasks.operating.trace import trace_row

        show_trace(trace_row(settings.resources.output_dir / settings.name, row))


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


def _show_rows(title: str, rows: "pl.DataFrame", columns: "Sequence[str]") -> None:
    if rows.is_empty():
        say(f"{title}: no completions of this row were kept")
        return
    cells = [
        [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows.select(columns).iter_rows()
    ]
    show(Shown(title=title, columns=columns, rows=cells))


def doctor() -> None:
    """Check the chain that a run needs: packages, device, servers, workers, disk; the exit status is 1 if something is wrong."""
    from grpo_tasks.operating.doctor import findings

    with report_errors():
        all_well = True
        for finding in findings():
            if out.is_terminal:
                out.print(f"[{'green' if finding.ok else 'yellow'}]{finding.subject:<18}[/]", escape(finding.detail))
            else:
                pipe_row([finding.subject, "ok" if finding.ok else "wrong", finding.detail])
            all_well = all_well and finding.ok
        if not all_well:
            raise typer.Exit(1)


def cluster(
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The Ray cluster; auto for the one of this machine. Default: RAY_ADDRESS.")
    ] = "",
) -> None:
    """Show what a Ray cluster has, who uses it, and which nodes run other versions; the exit status is 1 if one does."""
    with report_errors():
        from grpo_tasks.cluster.connect import connected, overview

        with connected(address):
            nodes, holders = overview()
        rows = []
        for node in nodes:
            same = "the same as here" if node.cpus[1] else "head without CPUs: trains nothing"
            versions = "; ".join(node.faults) or same
            rows.append([node.address, *(f"{free:g} of {total:g}" for free, total in (node.cpus, node.gpus)), versions])
        headings = ("node", "CPUs free", "GPUs free", "versions")
        show(Shown(title="Nodes of the Ray cluster", columns=headings, rows=rows))
        say(*(f"{name}: {'holds nodes' if state == 'CREATED' else 'waits for nodes'}" for name, state in holders))
        if not holders:
            say("no run uses it")
        if any(node.faults for node in nodes):
            raise typer.Exit(1)


def fields(
    word: Annotated[
        str | None, typer.Argument(metavar="WORD", help="Only fields whose name or meaning contains this word.")
    ] = None,
) -> None:
    """List the fields of a config with their meaning and default: `grpo fields learning_rate`."""
    with report_errors():
        show_fields(word)


def presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this preset. Without it, list all.")] = None,
) -> None:
    """List the presets, or print one as a starting point: `grpo presets custom-csv > my.yaml`."""
    with report_errors():
        if name is None:
            first_lines = {path.stem: path.read_text(encoding="utf-8").splitlines()[0] for path in sorted(PRESETS.glob("*.yaml"))}
            rows = [[preset, line.removeprefix("# ")] for preset, line in first_lines.items()]
            show(Shown(columns=("preset", "for"), rows=rows))
        else:
            # As it is in the file: rich would wrap its lines.
            typer.echo(find_config(name).read_text(encoding="utf-8"), nl=False)


def show_fields(word: str | None = None) -> None:
    """Print every field of the config, or those whose name or meaning contains `word`; `ConfigError` where none does."""
    shown = [
        (name, field)
        for name, field in config_fields(RunConfig)
        if word is None or word.lower() in f"{name} {field.description or ''}".lower()
    ]
    if not shown:
        raise ConfigError(f"no field has to do with {word}", fix="grpo fields lists all; a part of a word is enough")
    for name, field in shown:
        default = "required" if field.is_required() else str(field.get_default(call_default_factory=True))
        say(f"{name} = {default}" if len(default) < 40 else name)
        meaning = " ".join((field.description or "").split())
        if meaning:
            say(textwrap.fill(meaning, max(40, out.width) - 1, initial_indent=_INDENT, subsequent_indent=_INDENT))


def config_fields(section: type[Section]) -> list[tuple[str, "FieldInfo"]]:
    """The dotted name and the description of every setting below a section, for example stages[].learning_rate."""
    return [(name, field) for name, field in fields_below(section) if section_in(field.annotation)[0] is None]


def plan(
    config: Config,
    override: Set = None,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of one GPU, for example 24GB or 80GiB.")] = "24GB",
) -> None:
    """Calculate the GPU memory that each stage needs; the exit status is 1 if a stage does not fit, or if this machine has a
    GPU that torch cannot use."""
    with report_errors():
        size, settings = parse_size(memory), load_config(config, override)
        # Before anything else imports transformers.
        from grpo_tasks.processes.fork_server import import_libraries

        import_libraries()
        from grpo_tasks.kit.cards import check_cards
        from grpo_tasks.planning.memory_plan import stage_plans

        plans = stage_plans(settings, size)
        for plan in plans:
            tokens = plan.pass_tokens
            rows = [
                *((item.what, f"{item.bytes / GIB:.2f}") for item in plan.standing),
                *((f"while sampling: {item.what}", f"{item.bytes / GIB:.2f}") for item in plan.sampling),
                *([("in an update: kept from sampling", f"{plan.kept / GIB:.2f}")] if plan.kept else []),
                (f"in an update: a pass of {tokens:,} tokens", f"{plan.update(tokens) / GIB:.2f}" if tokens else "-"),
                ("kept free", f"{plan.reserve / GIB:.2f}"),
                ("needed", f"{plan.needed / GIB:.2f}"),
            ]
            title = f"Stage {plan.stage.name}, per GPU (calculated, not measured)"
            show(Shown(title=title, columns=("what", "GiB"), rows=rows, right=["GiB"]))
            if plan.fits:
                say(f"It fits into {size / GIB:.1f} GiB. A pass may have up to {plan.fitting_tokens:,} tokens.\n")
            else:
                out.print(f"[red]It does not fit into {size / GIB:.1f} GiB.[/] fix: {_advice(plan)}\n")
        if settings.resources.device != "cpu":
            check_cards()
        if not all(each.fits for each in plans):
            raise typer.Exit(1)


def _advice(plan: "StagePlan") -> str:
    from schemas.config.rollout import VllmConfig

    elsewhere = {"engine": "vllm", "vllm": VllmConfig(base_urls=["http://server:8000"])}
    if plan.resources.fsdp and replace(plan, rollout=plan.rollout.model_copy(update=elsewhere)).fits:
        return "rollout.engine: vllm with rollout.vllm.base_urls, because the local engine has a complete copy on each card"
    if plan.fitting_tokens and not plan.sampling_fits:
        return "rollout.max_batch_size: a smaller one"
    if plan.fitting_tokens:
        return "max_tokens_per_microbatch: auto"
    if not plan.model.gradient_checkpointing and plan.with_checkpointing().fitting_tokens:
        return "model.gradient_checkpointing: true, and max_tokens_per_microbatch: auto"
    return "a GPU with more memory, a smaller model, or model.quantization: nf4"

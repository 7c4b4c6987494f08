"""Commands that only read: presets, fields, one row of a run, what a run needs (`grpo plan`), the state of the machine."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.cli.errors import report_errors
from flows.cli.options import Config, Set, parse_size
from flows.cli.show import out, show_memory
from grpo_tasks.planning.cards import card_named, network_named
from grpo_tasks.planning.scale_model import ADVICE, Cluster, Forecast, Layout, ScaleModel
from grpo_tasks.planning.scale_sweep import WORTH, Point, asked_layout, saturated, sweep
from grpo_tasks.planning.workload import Shape, workload
from schemas.config.load import PRESETS, find_config, load_config
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.hints.search import section_in

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from grpo_tasks.planning.memory_plan import StagePlan

_INDENT = "    "


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
        from flows.cli.show import show_trace
        from grpo_tasks.operating.trace import trace_row

        show_trace(out, trace_row(settings.resources.output_dir / settings.name, row))


def doctor() -> None:
    """Check the chain that a run needs: packages, device, servers, workers, disk; the exit status is 1 if something is wrong."""
    from grpo_tasks.operating.doctor import findings

    with report_errors():
        all_well = True
        for finding in findings():
            out.print(f"[{'green' if finding.ok else 'yellow'}]{finding.subject:<18}[/]", escape(finding.detail))
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
        from flows.cli.show import show_cluster
        from grpo_tasks.cluster.connect import connected, overview

        with connected(address):
            found = overview()
        show_cluster(out, found)
        if any(node.faults for node in found.nodes):
            raise typer.Exit(1)


def fields(
    word: Annotated[
        str | None, typer.Argument(metavar="WORD", help="Only fields whose name or meaning contains this word.")
    ] = None,
) -> None:
    """List the fields of a config with their meaning and default: `grpo fields learning_rate`."""
    with report_errors():
        show_fields(out, word)


def presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this preset. Without it, list all.")] = None,
) -> None:
    """List the presets, or print one as a starting point: `grpo presets custom-csv > my.yaml`."""
    with report_errors():
        if name is None:
            for path in sorted(PRESETS.glob("*.yaml")):
                summary = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
                out.print(f"[bold]{path.stem:<26}[/] {summary}")
        else:
            # As it is in the file: rich would wrap its lines.
            typer.echo(find_config(name).read_text(encoding="utf-8"), nl=False)


def show_fields(console: Console, word: str | None = None) -> None:
    """Print every field of the config, or those whose name or meaning contains `word`.

    Raises:
        ConfigError: no field does.
    """
    shown = [(name, field) for name, field in config_fields(RunConfig) if word is None or _matches(word, name, field)]
    if not shown:
        raise ConfigError(f"no field has to do with {word}", fix="grpo fields lists all; a part of a word is enough")
    width = max(40, console.width)
    for name, field in shown:
        default = "required" if field.is_required() else str(field.get_default(call_default_factory=True))
        # A name is printed as it is: rich would take [] for markup and would cut what does not fit.
        console.print(f"{name} = {default}" if len(default) < 40 else name, markup=False, soft_wrap=True)
        meaning = " ".join((field.description or "").split())
        if meaning:
            lines = textwrap.fill(meaning, width - 1, initial_indent=_INDENT, subsequent_indent=_INDENT)
            console.print(lines, markup=False, highlight=False, soft_wrap=True)


def _matches(word: str, name: str, field: "FieldInfo") -> bool:
    return word.lower() in f"{name} {field.description or ''}".lower()


def config_fields(model: type[BaseModel], prefix: str = "") -> list[tuple[str, "FieldInfo"]]:
    """The dotted name and the description of every field below `model`, for example stages[].learning_rate."""
    rows: list[tuple[str, FieldInfo]] = []
    for name, field in model.model_fields.items():
        inner, marker = section_in(field.annotation)
        if inner is None:
            rows.append((prefix + name, field))
        else:
            rows += config_fields(inner, f"{prefix}{name}{marker}.")
    return rows


AUTO_TOKENS = 16_384
"""Tokens of a pass where memory leaves no room for any; the stage is then refused for its memory."""
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", min=1, max=512, help="Calculate the time of an update on so many nodes, and for 1 to 512 cards."),
]
CardsPerNode = Annotated[int, typer.Option("--cards-per-node", min=1, max=512, help="Cards of a node.")]
Replicas = Annotated[
    int | None,
    typer.Option("--replicas", min=0, max=512, help="vLLM servers; the other cards train. Without it, the fastest number."),
]
CardName = Annotated[str, typer.Option("--card", metavar="NAME", help="Kind of the cards; an unknown name lists the known ones.")]
NetworkName = Annotated[str, typer.Option("--network", metavar="NAME", help="Network of a node, which its cards share.")]
MeanTokens = Annotated[
    int | None,
    typer.Option("--completion-tokens", min=1, help="Mean length of completions. Without it, rollout.max_completion_length."),
]


@dataclass(frozen=True)
class Asked:
    """The cluster that was asked for."""

    cluster: Cluster
    nodes: int
    replicas: int | None
    mean_tokens: int | None


def plan(
    config: Config,
    override: Set = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of one GPU, for example 24GB or 80GiB. Without it, 24GB or that of --card."),
    ] = None,
    nodes: Nodes = None,
    cards_per_node: CardsPerNode = 8,
    replicas: Replicas = None,
    card: CardName = "h100",
    network: NetworkName = "400gbit",
    completion_tokens: MeanTokens = None,
) -> None:
    """Calculate the GPU memory that each stage needs; the exit status is 1 if a stage does not fit.

    With --nodes, also predict the time of an update on a cluster, its bottleneck, and where more cards stop helping.
    """
    with report_errors():
        if nodes is None and (replicas is not None or completion_tokens is not None):
            raise ConfigError("the time of an update is calculated for a number of nodes", place="--nodes", fix="--nodes 1")
        kind = card_named(card)
        size = parse_size(memory or ("24GB" if nodes is None else f"{kind.memory / 1e9:.0f}GB"))
        cluster = Cluster(replace(kind, memory=size), cards_per_node, network_named(network))
        settings = load_config(config, override)
        asked = None if nodes is None else Asked(cluster, nodes, replicas, completion_tokens)
        if not _fits(settings, size, asked):
            raise typer.Exit(1)


def _fits(settings: RunConfig, memory: float, asked: Asked | None) -> bool:
    # Before anything else imports transformers.
    from grpo_tasks.policy.libraries import import_libraries

    import_libraries()
    from grpo_tasks.planning.memory_plan import stage_plans

    plans = stage_plans(settings, memory)
    if asked is None:
        show_memory(out, plans, memory)
        return all(each.fits for each in plans)
    models = [scale_model(each, asked) for each in plans]
    layouts = [asked_layout(model, asked.nodes, asked.replicas) for model in models]
    plans = [on_layout(each, layout) for each, layout in zip(plans, layouts, strict=True)]
    show_memory(out, plans, memory)
    for each, model, layout in zip(plans, models, layouts, strict=True):
        show_forecast(out, each.stage.name, model, model.forecast(layout))
        show_sweep(out, model, sweep(model))
    return all(each.fits for each in plans)


def scale_model(one: "StagePlan", asked: Asked) -> ScaleModel:
    """The model of a stage on the cluster.

    Raises:
        ModelError: the architecture is none that the model knows.
    """
    architecture = one.architecture.to_dict()
    # Before a pass is counted, which other architectures may not survive.
    Shape.of(architecture)
    work = workload(
        architecture,
        one.model,
        one.rollout,
        one.stage,
        prompt_tokens=one.prompt_length,
        mean_tokens=asked.mean_tokens,
        pass_tokens=one.fitting_tokens or AUTO_TOKENS,
        fsdp=one.resources.fsdp,
    )
    return ScaleModel(work, asked.cluster)


def on_layout(one: "StagePlan", layout: Layout) -> "StagePlan":
    """The memory plan of a process that trains, in that layout."""
    resources = one.resources.model_copy(update={"num_processes": layout.trainers})
    vllm = one.rollout.vllm
    if layout.replicas:
        vllm = vllm.model_copy(update={"replicas": layout.replicas, "devices": ["own"] * layout.replicas})
    return replace(one, resources=resources, rollout=one.rollout.model_copy(update={"vllm": vllm}))


def show_forecast(console: Console, stage: str, model: ScaleModel, found: Forecast) -> None:
    """Print what an update spends its time on."""
    table = Table(title=f"Stage {stage}, one update on {_layout_text(model, found)} (calculated)", title_justify="left")
    table.add_column("what")
    table.add_column("s", justify="right")
    for piece, seconds in found.pieces.items():
        table.add_row(piece.value, f"{seconds:.2f}")
    table.add_row("update", f"{found.step_s:.2f}", style="bold")
    console.print(table)
    sides = "sampling and training overlap" if found.overlaps else "sampling and training take turns"
    console.print(f"{found.tokens_per_s:,.0f} tokens/s are sampled; {sides}. Reward functions are not included.")
    console.print(f"Bottleneck: {found.bottleneck.value}. What helps: {ADVICE[found.bottleneck]}.\n")


def show_sweep(console: Console, model: ScaleModel, points: Sequence[Point]) -> None:
    """Print the fastest layout for each number of cards."""
    table = Table(title="The fastest layout for each number of cards (calculated)", title_justify="left")
    for heading in ("cards", "train", "replicas", "update, s", "tokens/s"):
        table.add_column(heading, justify="right")
    table.add_column("bottleneck")
    for point in points:
        if point.best is None:
            table.add_row(str(point.cards), "-", "-", "-", "-", "does not fit")
            continue
        layout, bottleneck = point.best.layout, point.best.bottleneck
        rate = f"{point.best.tokens_per_s:,.0f}"
        table.add_row(f"{point.cards}", f"{layout.trainers}", f"{layout.replicas}", f"{point.best.step_s:.2f}", rate, bottleneck)
    console.print(table)
    limit, last = saturated(points), points[-1].best
    if limit is not None and last is not None:
        rows = model.work.completions / last.layout.trainers
        console.print(f"From {limit.cards} cards on, twice as many make an update less than {WORTH:g} x faster.")
        stops = f"an update has {rows:.0f} completions for each process; {last.limit.value}"
        console.print(f"What stops it: {stops}. What helps: {ADVICE[last.limit]}.\n")


def _layout_text(model: ScaleModel, found: Forecast) -> str:
    layout, card = found.layout, model.cluster.card.name
    sampling = f", {layout.replicas} replicas of {model.work.tensor_parallel}" if layout.replicas else ""
    return f"{found.cards} x {card}: {layout.trainers} train{sampling}"

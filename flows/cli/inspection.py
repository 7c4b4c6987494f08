"""Commands that only read: presets, fields, one row of a run, what a run needs (`grpo plan`), the state of the machine."""

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from flows.cli.errors import report_errors
from flows.cli.options import Config, Set, parse_size
from flows.cli.show import out, say, show_cluster, show_memory, show_trace
from schemas.config.load import PRESETS, find_config, load_config
from schemas.config.run import RunConfig
from schemas.config.section import Section, fields_below, section_in
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


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
        from grpo_tasks.operating.trace import trace_row

        show_trace(trace_row(settings.resources.output_dir / settings.name, row))


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
        from grpo_tasks.cluster.connect import connected, overview

        with connected(address):
            nodes, holders = overview()
        show_cluster(nodes, holders)
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
            for path in sorted(PRESETS.glob("*.yaml")):
                summary = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
                out.print(f"[bold]{path.stem:<26}[/] {summary}")
        else:
            # As it is in the file: rich would wrap its lines.
            typer.echo(find_config(name).read_text(encoding="utf-8"), nl=False)


def show_fields(word: str | None = None) -> None:
    """Print every field of the config, or those whose name or meaning contains `word`.

    Raises:
        ConfigError: no field does.
    """
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
    """Calculate the GPU memory that each stage needs; the exit status is 1 if a stage does not fit."""
    with report_errors():
        size, settings = parse_size(memory), load_config(config, override)
        # Before anything else imports transformers.
        from grpo_tasks.processes.fork_server import import_libraries

        import_libraries()
        from grpo_tasks.planning.memory_plan import stage_plans

        plans = stage_plans(settings, size)
        show_memory(plans, size)
        if not all(each.fits for each in plans):
            raise typer.Exit(1)

"""Commands that only read: presets, fields, one row of a run, the state of the machine."""

from typing import Annotated

import typer

from flows.cli.errors import report_errors
from flows.cli.options import Config, Set
from flows.cli.show import out
from schemas.config.load import PRESETS, find_config, load_config


def trace(
    row: Annotated[str, typer.Argument(metavar="ROW", help="A prompt_id (a column of every table), or FILE:LINE of the data.")],
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
    """Show what is installed, which device is used, which servers answer and how much disk space is free."""
    from grpo_tasks.operating.doctor import findings

    with report_errors():
        for finding in findings():
            out.print(f"[{'green' if finding.ok else 'yellow'}]{finding.subject:<18}[/] {finding.detail}")


def fields() -> None:
    """List every field of a config with its meaning and default."""
    from flows.cli.show import show_fields

    show_fields(out)


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

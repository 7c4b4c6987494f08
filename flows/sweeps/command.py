"""The command `grpo sweep`."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flows.cli.environment import named_config, prepare_flow
from flows.cli.errors import report_errors
from flows.cli.options import OptionalConfig, Set
from flows.cli.show import out, print_table

if TYPE_CHECKING:
    from grpo_tasks.sweeping.grid import Grid
    from schemas.results.sweep import SweepResult


def sweep(
    config: OptionalConfig = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over", metavar="KEY=V1,V2", help="A field to vary, for example stages.0.learning_rate=1e-5,5e-6. Repeatable."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds for each combination.", min=1, max=1000)] = 1,
    override: Set = None,
    parallel: Annotated[int, typer.Option(help="How many runs train at the same time.", min=1, max=256)] = 1,
    no_prune: Annotated[
        bool, typer.Option("--no-prune", help="Run everything to its end, and continue what was pruned before.")
    ] = False,
    min_siblings: Annotated[
        int, typer.Option(help="Fewest other runs to compare with before a run is pruned.", min=1, max=1000)
    ] = 2,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the grid and show it with its cost, but run nothing.")
    ] = False,
) -> None:
    """Run every combination of some values and seeds, prune what lags behind, and show the table."""
    with report_errors() as command:
        from grpo_tasks.sweeping.grid import make_grid

        source = named_config(config)
        grid = make_grid(source, override or [], over or [], seeds=seeds)
        _check(grid)
        command.folder = grid.base.resources.output_dir / grid.base.name
        if dry_run:
            show_grid(grid)
            return
        typer.echo(f"{grid.base.name}: a sweep of {len(grid.variants)} runs ({command.folder / 'sweeps'})", err=True)
        prepare_flow()
        from flows.preflight import check_tracking
        from flows.sweeps.flow import sweep_flow

        check_tracking(grid.base)

        show_sweep(sweep_flow(source, over, seeds, override, parallel, not no_prune, min_siblings))


def _check(grid: "Grid") -> None:
    """The early checks of `grpo run`, for every run; rows are looked at once for each data section."""
    from flows.preflight import check_columns, check_inputs

    looked_at = set()
    for variant in grid.variants:
        check_inputs(variant.config)
        data = variant.config.data.model_dump_json()
        if data not in looked_at:
            looked_at.add(data)
            check_columns(variant.config)


def show_grid(grid: "Grid") -> None:
    """Print the runs of a sweep and what they cost."""
    from grpo_tasks.sweeping.forecast import forecast

    # A title of the table would be broken at the width of a narrow table.
    out.print(f"Sweep of {grid.base.name} (nothing was run)")
    table = Table()
    paths = [axis.path for axis in grid.axes]
    for heading in ("run", *paths, "seed"):
        table.add_column(heading, overflow="fold")
    for variant in grid.variants:
        values = [variant.settings[path] for path in paths]
        table.add_row(str(variant.number), *values, str(variant.config.seed))
    print_table(out, table, [])
    for line in forecast(grid.variants, grid.base.resources.output_dir / grid.base.name).lines():
        out.print(line)
    if grid.added:
        out.print(f"held-out evaluations that pruning goes by: {', '.join(grid.added)}")


def show_sweep(result: "SweepResult") -> None:
    """Print the table of a sweep, the best run, and how to publish it."""
    from grpo_tasks.sweeping.grid import short_names
    from grpo_tasks.sweeping.table import cells

    # Why a run ended is too long for a column.
    rows = [cells(line) | {"ended": line.end.state if line.end is not None else ""} for line in result.lines]
    names = short_names(list(result.lines[0].settings))
    out.print(result.headline(), soft_wrap=True)
    table = Table()
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in columns:
        table.add_column(names.get(name, name), overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    kept = {"run", "seed", "ended", *result.lines[0].settings}
    print_table(out, table, [names.get(name, name) for name in columns if name not in kept])
    for line in result.lines:
        if line.end is not None and line.end.state != "finished":
            out.print(f"run {line.number} {line.end.headline()}", soft_wrap=True)
    if result.computed == 0:
        out.print("nothing to do: every run of this sweep has ended")
    out.print(f"MLflow: {result.tracking_uri}, run {result.run_id}", soft_wrap=True)
    if result.publish:
        out.print(f"publish the best run: {result.publish}", soft_wrap=True)

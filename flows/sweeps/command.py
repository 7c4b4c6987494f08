"""The command `grpo sweep`."""

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.environment import named_config, prepare_flow
from flows.cli.errors import report_errors
from flows.cli.options import OptionalConfig, Set
from flows.cli.show import print_table, say, table_of

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
    say(f"Sweep of {grid.base.name} (nothing was run)")
    rows = [[str(one.number), *one.settings.values(), str(one.config.seed)] for one in grid.variants]
    print_table(table_of(("run", *(axis.path for axis in grid.axes), "seed"), rows, fold=True))
    say(*forecast(grid.variants, grid.base.resources.output_dir / grid.base.name).lines())
    if grid.added:
        say(f"held-out evaluations that pruning goes by: {', '.join(grid.added)}")


def show_sweep(result: "SweepResult") -> None:
    """Print the table of a sweep, the best run, and how to publish it."""
    from grpo_tasks.sweeping.grid import short_names
    from grpo_tasks.sweeping.table import cells

    # Why a run ended is too long for a column.
    rows = [cells(line) | {"ended": line.end.state if line.end is not None else ""} for line in result.lines]
    names = short_names(list(result.lines[0].settings))
    say(result.headline())
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    headings = [names.get(name, name) for name in columns]
    table = table_of(headings, [[row[name] for name in columns] for row in rows], fold=True)
    kept = {"run", "seed", "ended", *result.lines[0].settings}
    print_table(table, [names.get(name, name) for name in columns if name not in kept])
    for line in result.lines:
        if line.end is not None and line.end.state != "finished":
            say(f"run {line.number} {line.end.headline()}")
    if result.computed == 0:
        say("nothing to do: every run of this sweep has ended")
    say(f"MLflow: {result.tracking_uri}, run {result.run_id}")
    if result.publish:
        say(f"publish the best run: {result.publish}")

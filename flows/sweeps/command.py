"""The command `grpo sweep`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.environment import named_config, prepare_flow, report_errors
from flows.cli.options import OptionalConfig, Set, Wide
from flows.cli.show import say, show
from schemas.metrics import duration_text
from schemas.results.base import Section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from schemas.config.grid import Grid, Variant
    from schemas.config.stage import StageConfig
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
    wide: Wide = False,
) -> None:
    """Run every combination of some values and seeds, prune what lags behind, and show the table."""
    with report_errors() as command:
        from flows.preflight import check_columns, check_inputs
        from schemas.config.grid import make_grid

        source = named_config(config)
        grid = make_grid(source, override or [], over or [], seeds=seeds)
        for variant in grid.variants:
            check_inputs(variant.config)
        # Rows are looked at once for each data section.
        for variant_config in {one.config.data.model_dump_json(): one.config for one in grid.variants}.values():
            check_columns(variant_config)
        command.folder = grid.base.resources.output_dir / grid.base.name
        if dry_run:
            show_grid(grid)
            return
        typer.echo(f"{grid.base.name}: a sweep of {len(grid.variants)} runs ({command.folder / 'sweeps'})", err=True)
        prepare_flow()
        from flows.preflight import check_tracking
        from flows.sweeps.flow import sweep_flow

        check_tracking(grid.base)
        show_sweep(sweep_flow(source, over, seeds, override, parallel, not no_prune, min_siblings), wide=wide)


def show_grid(grid: "Grid") -> None:
    """Print the runs of a sweep and what they cost."""
    rows = [[str(one.number), *one.settings.values(), str(one.config.seed)] for one in grid.variants]
    title = f"Sweep of {grid.base.name} (nothing was run)"
    show(Section(title=title, columns=("run", *(axis.path for axis in grid.axes), "seed"), rows=rows))
    said = forecast(grid.variants, grid.base.resources.output_dir / grid.base.name)
    said += [f"held-out evaluations that pruning goes by: {', '.join(grid.added)}"] if grid.added else []
    show(*(Section(text=line) for line in said))


def forecast(variants: "Sequence[Variant]", folder: Path) -> list[str]:
    """What a sweep without pruning costs, in sentences. Stages that several runs share are trained once.

    The duration comes from earlier stages of the same config, if there are any in its `folder`.
    """
    from grpo_tasks.stage.journal import update_seconds
    from schemas.config.grid import NO_EFFECT

    trained: dict[str, StageConfig] = {}
    stages = 0
    for variant in variants:
        shared = variant.config.model_dump(mode="json", exclude={*NO_EFFECT, "stages", "evaluation", "lab", "validation"})
        for index, stage in enumerate(variant.config.stages, start=1):
            stages += 1
            before = [one.model_dump(mode="json") for one in variant.config.stages[:index]]
            trained[json.dumps([shared, before], sort_keys=True)] = stage
    more = f" ({stages - len(trained)} more are shared)" if stages > len(trained) else ""
    first = f"{len(variants)} runs, {len(trained)} stages to train{more}"
    lines = ["", "validation, reward lab and the evaluation of the base run once for each seed"]
    if not all(stage.max_steps for stage in trained.values()):
        return [f"{first}: length in epochs: it depends on the data", *lines[1:]]
    updates = sum(stage.max_steps or 0 for stage in trained.values())
    completions = sum((stage.max_steps or 0) * stage.completions_per_update for stage in trained.values())
    lines[0] = f"{first}: at most {updates:,} updates with {completions:,} completions"
    seconds = update_seconds(folder)
    if seconds is not None:
        lines.append(f"about {duration_text(seconds * updates)} of updates without pruning, as fast as earlier runs here")
    return lines


def show_sweep(result: "SweepResult", *, wide: bool = False) -> None:
    """Print the table of a sweep, its verdict, and how to publish the highest run."""
    from grpo_tasks.tracking.sweep import cells
    from schemas.config.grid import short_names

    # Why a run ended is too long for a column.
    pairs = zip(cells(result, gap="\n"), result.lines, strict=True)
    rows = [row | {"ended": line.end.state if line.end is not None else ""} for row, line in pairs]
    names = short_names(list(result.lines[0].settings))
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    headings = [names.get(name, name) for name in columns]
    kept = {"run", "seed", "verdict", "ended", *result.lines[0].settings}
    extra = [names.get(name, name) for name in columns if name not in kept]
    shown = [[row[name] for name in columns] for row in rows]
    show(Section(text=result.headline(), columns=headings, rows=shown, extra=extra), wide=wide)
    for line in result.lines:
        if line.end is not None and line.end.state != "finished":
            say(f"run {line.number} {line.end.headline()}")
    if result.computed == 0:
        say("nothing to do: every run of this sweep has ended")
    say(f"MLflow: {result.tracking_uri}, run {result.run_id}")
    if result.publish:
        say(f"publish {'the highest of the tie' if result.ties else 'the best run'}: {result.publish}")

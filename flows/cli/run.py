"""Commands that run the pipeline or one step of it. Each loads the config, calls a flow and shows the result."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from flows.cli.environment import checked_config, named_config, prepare_flow, prepare_step
from flows.cli.errors import report_errors
from flows.cli.options import ADAPTER_HELP, MODEL_HELP, Config, Fresh, OptionalConfig, Set
from flows.cli.show import out

if TYPE_CHECKING:
    from schemas.config.run import RunConfig


def run(
    config: OptionalConfig = None,
    override: Set = None,
    fresh: Fresh = False,
    no_champion: Annotated[
        bool, typer.Option("--no-champion", help="Decide by the base alone: the champion cannot be compared with any more.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the config and show the plan, but run nothing.")] = False,
) -> None:
    """Run the whole pipeline: validate, probe rewards, train every stage, merge, evaluate, publish."""
    with report_errors() as command:
        alone = ["promotion.against_champion=false"] if no_champion else []
        settings = checked_config(named_config(config), [*(override or []), *alone])
        command.folder = settings.resources.output_dir / settings.name
        if dry_run:
            from flows.cli.show import show_plan
            from flows.preflight import check_structure

            notes = check_structure(settings, hub=False)
            show_plan(out, settings, notes)
            return
        first_line(settings, "starting Prefect and MLflow")
        prepare_flow()
        from flows.cli.show import show_pipeline
        from flows.pipeline import grpo_pipeline
        from flows.preflight import check_tracking

        # Before a temporary server is started, which takes longer.
        check_tracking(settings)

        show_pipeline(out, settings, grpo_pipeline(settings, fresh))


def first_line(config: "RunConfig", doing: str) -> None:
    """Say on stderr what begins, before the imports that take seconds."""
    typer.echo(f"{config.name}: {doing} ({config.resources.output_dir / config.name})", err=True)


def one_step(name: str, config: "RunConfig", *, device: bool) -> Callable[..., Any]:
    """The function that runs one step: a flow where a Prefect server or a GPU slot is involved, a plain function otherwise."""
    if prepare_step(config, device=device):
        from flows import single

        return cast(Callable[..., Any], getattr(single, f"{name}_flow"))
    from flows import one_step as plain

    return cast(Callable[..., Any], getattr(plain, name))


def validate(config: Config, override: Set = None, fresh: Fresh = False) -> None:
    """Read the data and check every row."""
    with report_errors():
        settings = checked_config(config, override)
        first_line(settings, "reading the data")
        from flows.cli.show import show_data

        show_data(out, one_step("validate", settings, device=False)(settings, fresh))


def rewards(config: Config, override: Set = None, fresh: Fresh = False) -> None:
    """Run the reward lab: test every reward function of every stage before any training."""
    with report_errors():
        settings = checked_config(config, override)
        first_line(settings, "testing the rewards")
        from flows.cli.show import show_lab

        show_lab(out, one_step("rewards", settings, device=True)(settings, fresh))


def difficulty(config: Config, override: Set = None, fresh: Fresh = False) -> None:
    """Measure how often the base model solves each training prompt, before you choose keep_pass_rate of a stage."""
    with report_errors():
        settings = checked_config(config, override)
        first_line(settings, "measuring the training prompts")
        from flows.cli.show import show_difficulty

        show_difficulty(out, one_step("difficulty", settings, device=True)(settings, fresh))


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    config: Config,
    override: Set = None,
    fresh: Fresh = False,
) -> None:
    """Evaluate a model on the held-out prompts of a config."""
    with report_errors():
        settings = checked_config(config, override)
        first_line(settings, "evaluating the model")
        from flows.cli.show import show_evaluations

        show_evaluations(out, [one_step("evaluate", settings, device=True)(model, settings, fresh)])


def train(
    config: Config,
    stage: Annotated[str | None, typer.Option("--stage", metavar="NAME", help="Stage to train. Default: the first one.")] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="MODEL", help=f"Where training starts: {MODEL_HELP} Default: model.path."),
    ] = None,
    override: Set = None,
    fresh: Fresh = False,
) -> None:
    """Train one stage of a config, and publish nothing."""
    with report_errors() as command:
        settings = checked_config(config, override)
        command.folder = settings.resources.output_dir / settings.name
        name = stage or settings.stages[0].name
        first_line(settings, f"training the stage {name}")
        from flows.cli.show import show_stage

        show_stage(out, config, one_step("train", settings, device=True)(settings, name, start, fresh))


def merge(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help=ADAPTER_HELP)],
    config: Config,
    into: Annotated[Path | None, typer.Option("--into", metavar="DIR", help="Copy the merged model to this folder.")] = None,
    override: Set = None,
) -> None:
    """Merge an adapter into the base model of a config and prove that the result is the same policy."""
    with report_errors():
        settings = checked_config(config, override)
        first_line(settings, "merging the adapter")
        from flows.cli.show import show_merge

        show_merge(out, one_step("merge", settings, device=True)(adapter, settings, into))


def step(
    name: Annotated[str, typer.Argument(metavar="STEP", help="Name of a step, such as validate_data.")],
    config: Config,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help=f"For a step that takes a model: {MODEL_HELP}")
    ] = None,
    override: Set = None,
    fresh: Fresh = False,
) -> None:
    """Run any step, with the steps that it needs: also one that you have added."""
    with report_errors():
        settings = checked_config(config, override)
        first_line(settings, f"running {name}")
        result = one_step("step", settings, device=True)(name, settings, model, fresh)
        out.print(result.section() or result.headline() or f"{name} is finished", markup=False, highlight=False)
        out.print(f"files: {result.directory}", soft_wrap=True, markup=False, highlight=False)

"""Commands that run the pipeline or one step of it. Each loads the config, calls a flow and shows the result."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.environment import checked_config, named_config, prepare_flow, prepare_step
from flows.cli.errors import report_errors
from flows.cli.options import ADAPTER_HELP, MODEL_HELP, Config, Fresh, OptionalConfig, Set
from flows.cli.show import (
    say,
    show_data,
    show_difficulty,
    show_evaluations,
    show_lab,
    show_merge,
    show_pipeline,
    show_plan,
    show_stage,
)

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
            from flows.preflight import check_structure

            show_plan(settings, check_structure(settings, hub=False))
            return
        _begin(settings, "starting Prefect and MLflow")
        prepare_flow()
        from flows.pipeline import grpo_pipeline
        from flows.preflight import check_tracking

        # Before a temporary server is started, which takes longer.
        check_tracking(settings)
        show_pipeline(settings, grpo_pipeline(settings, fresh))


def _begin(config: "RunConfig", doing: str) -> None:
    """Say on stderr what begins, before the imports that take seconds."""
    typer.echo(f"{config.name}: {doing} ({config.resources.output_dir / config.name})", err=True)


def _one_step(function: str, doing: str, config: "RunConfig", /, *, device: bool = True, **inputs: Any) -> Any:
    """What one step makes: in a flow where a Prefect server or a GPU slot is involved, by a plain function otherwise."""
    _begin(config, doing)
    if prepare_step(config, device=device):
        from flows import single

        return getattr(single, f"{function}_flow")(config=config, **inputs)
    from flows import one_step

    return getattr(one_step, function)(config=config, **inputs)


def validate(config: Config, override: Set = None, fresh: Fresh = False) -> None:
    """Read the data and check every row."""
    with report_errors():
        settings = checked_config(config, override)
        show_data(_one_step("validate", "reading the data", settings, device=False, fresh=fresh))


def rewards(config: Config, override: Set = None, fresh: Fresh = False) -> None:
    """Run the reward lab: test every reward function of every stage before any training."""
    with report_errors():
        show_lab(_one_step("rewards", "testing the rewards", checked_config(config, override), fresh=fresh))


def difficulty(config: Config, override: Set = None, fresh: Fresh = False) -> None:
    """Measure how often the base model solves each training prompt, before you choose keep_pass_rate of a stage."""
    with report_errors():
        settings = checked_config(config, override)
        show_difficulty(_one_step("difficulty", "measuring the training prompts", settings, fresh=fresh))


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    config: Config,
    override: Set = None,
    fresh: Fresh = False,
) -> None:
    """Evaluate a model on the held-out prompts of a config."""
    with report_errors():
        settings = checked_config(config, override)
        show_evaluations([_one_step("evaluate", "evaluating the model", settings, model=model, fresh=fresh)])


def train(
    config: Config,
    stage: Annotated[str | None, typer.Option("--stage", metavar="NAME", help="Stage to train. Default: the first one.")] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="MODEL", help=f"Where training starts: {MODEL_HELP} Default: model.path.")
    ] = None,
    override: Set = None,
    fresh: Fresh = False,
) -> None:
    """Train one stage of a config, and publish nothing."""
    with report_errors() as command:
        settings = checked_config(config, override)
        command.folder = settings.resources.output_dir / settings.name
        name = stage or settings.stages[0].name
        doing = f"training the stage {name}"
        show_stage(config, _one_step("train", doing, settings, stage=name, start=start, fresh=fresh))


def merge(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help=ADAPTER_HELP)],
    config: Config,
    into: Annotated[Path | None, typer.Option("--into", metavar="DIR", help="Copy the merged model to this folder.")] = None,
    override: Set = None,
) -> None:
    """Merge an adapter into the base model of a config and prove that the result is the same policy."""
    with report_errors():
        settings = checked_config(config, override)
        show_merge(_one_step("merge", "merging the adapter", settings, adapter=adapter, into=into))


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
        result = _one_step("step", f"running {name}", settings, name=name, model=model, fresh=fresh)
        say(result.section() or result.headline() or f"{name} is finished", f"files: {result.directory}")

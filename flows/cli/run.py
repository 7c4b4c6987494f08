"""Commands that run the pipeline or one step of it. Each loads the config, calls a flow and shows the result."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.environment import checked_config, prepare_flow
from flows.cli.errors import report_errors
from flows.cli.options import Config, Fresh, Set
from flows.cli.show import out


def run(
    config: Config,
    override: Set = None,
    fresh: Fresh = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the config and show the plan, but run nothing.")] = False,
) -> None:
    """Run the whole pipeline: validate, probe rewards, train every stage, merge, evaluate, publish."""
    with report_errors():
        settings = checked_config(config, override)
        if dry_run:
            from flows.cli.show import show_plan

            show_plan(out, settings)
            return
        prepare_flow()
        from flows.cli.show import show_pipeline
        from flows.pipeline import grpo_pipeline

        show_pipeline(out, settings, grpo_pipeline(settings, fresh))


def validate(config: Config, override: Set = None, fresh: Fresh = False) -> None:
    """Read the data and check every row."""
    with report_errors():
        settings = checked_config(config, override)
        prepare_flow()
        from flows.cli.show import show_data
        from flows.single import validate_flow

        show_data(out, validate_flow(settings, fresh))


def rewards(config: Config, override: Set = None, fresh: Fresh = False) -> None:
    """Run the reward lab: test every reward function of every stage before any training."""
    with report_errors():
        settings = checked_config(config, override)
        prepare_flow()
        from flows.cli.show import show_lab
        from flows.single import rewards_flow

        show_lab(out, rewards_flow(settings, fresh))


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model or adapter folder, a hub id, or models:/NAME@ALIAS.")],
    config: Config,
    override: Set = None,
    fresh: Fresh = False,
) -> None:
    """Evaluate a model on the held-out prompts of a config."""
    with report_errors():
        settings = checked_config(config, override)
        prepare_flow()
        from flows.cli.show import show_evaluations
        from flows.single import evaluate_flow

        show_evaluations(out, [evaluate_flow(model, settings, fresh)])


def merge(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A folder that contains adapter_config.json.")],
    config: Config,
    into: Annotated[Path | None, typer.Option("--into", metavar="DIR", help="Copy the merged model to this folder.")] = None,
    override: Set = None,
) -> None:
    """Merge an adapter into the base model of a config and prove that the result is the same policy."""
    with report_errors():
        settings = checked_config(config, override)
        prepare_flow()
        from flows.cli.show import show_merge
        from flows.single import merge_flow

        show_merge(out, merge_flow(adapter, settings, into))

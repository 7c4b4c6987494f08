"""Retraining: does nothing if nothing has changed; otherwise trains, compares and decides. Also the watch for new data."""

import re
from typing import Literal

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event
from prefect.variables import Variable

from flows import one_step
from flows.approval import was_suspended
from flows.flow_run import pipeline_key
from flows.pipeline import run_pipeline
from flows.preflight import check_inputs, check_working_directory
from flows.temporary_server import locked_flow
from grpo_tasks.running.key import content_key
from grpo_tasks.running.slot_names import RETRAINING
from grpo_tasks.running.slots import hold
from grpo_tasks.tracking.models import fetch_champion
from grpo_tasks.tracking.registry import find_tagged
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.errors import ModelError
from schemas.paths import is_local
from schemas.results.publication import RetrainResult

DATA_CHANGED = "grpo.data.changed"


@locked_flow(
    name="grpo-retrain", description="Train again if data, code or config have changed since the last version, then decide."
)
def retrain_flow(
    source: str = "demo",
    overrides: list[str] | None = None,
    start_from: Literal["base", "champion"] = "base",
    force: bool = False,
) -> RetrainResult:
    """Retrain a registered model. Each model has one retraining at a time: the next one waits and logs which run it waits for.

    Args:
        source: a YAML file (relative to the working directory) or the name of a preset.
        overrides: settings to change for this retraining, each as key.path=value.
        start_from: the base model of the config, or the current champion.
        force: train even if nothing has changed.
    """
    check_working_directory()
    config = load_config(source, overrides)
    # A schedule and an event may start it at the same time. The second run waits here, and then finds the result of the first.
    with hold(_limit_of(config)):
        return _retrain(config, start_from, force)


def _limit_of(config: RunConfig) -> str:
    """Name of the concurrency limit of a registered model, without the characters that Prefect does not allow."""
    return RETRAINING + re.sub(r"[/%&<>\s]+", "-", config.registered_model)


def _retrain(config: RunConfig, start_from: Literal["base", "champion"], force: bool) -> RetrainResult:
    made_of = {"grpo.retrain_key": pipeline_key(config, start_from)} | _hub_digest(config)
    known = find_tagged(config.registered_model, made_of, config.tracking)
    # A run that was suspended for approval finds its own version here, and goes on with it.
    if known is not None and not force and not was_suspended():
        reason = f"nothing to do: version {known} of {config.registered_model} was made of the same data, code and config"
        return _report(config, RetrainResult(trained=False, reason=reason))
    made = run_pipeline(_from_champion(config) if start_from == "champion" else config, fresh=force, tags=made_of)
    result = RetrainResult(trained=True, reason=made.publication.reason, publication=made.publication, summary=made.headline())
    return _report(config, result)


def _hub_digest(config: RunConfig) -> dict[str, str]:
    """The digest of data from a hub, which must be downloaded first. Local files are part of `pipeline_key` by their content."""
    if all(is_local(source.path) for source in [*config.data.train, *config.data.eval]):
        return {}
    return {"grpo.data_digest": one_step.validate(config, fresh=True).digest}


def _from_champion(config: RunConfig) -> RunConfig:
    found = fetch_champion(config.registered_model, config.tracking, (config.resources.output_dir / "champions").resolve())
    if found is None:
        raise ModelError(f"{config.registered_model} has no champion to start from", fix="start_from: base")
    return config.model_copy(update={"model": config.model.model_copy(update={"path": found[1].path, "revision": None})})


def _report(config: RunConfig, result: RetrainResult) -> RetrainResult:
    get_run_logger().info(result.reason)
    create_markdown_artifact(key="retraining", markdown=f"# {config.registered_model}\n\n{result.reason}\n")
    return result


@locked_flow(name="grpo-watch-data", description="Send the event grpo.data.changed when the data files of a config have changed.")
def watch_data_flow(source: str = "demo", overrides: list[str] | None = None) -> bool:
    """Compare the content of the data with that of the previous check; True if it has changed.

    Args:
        source: name of a preset, or a YAML file in the folder where `grpo up` was called.
        overrides: settings to change, each as key.path=value.
    """
    check_working_directory()
    config = load_config(source, overrides)
    check_inputs(config)
    digest = content_key("watch", (), {"data": config.data})
    name = "grpo_data_" + "".join(letter if letter.isalnum() else "_" for letter in config.name.lower())
    before = Variable.get(name)
    if before == digest:
        get_run_logger().info("the data of %s has not changed", config.name)
        return False
    Variable.set(name, digest, overwrite=True)
    if before is None:
        get_run_logger().info("first check of the data of %s", config.name)
        return False
    get_run_logger().info("the data of %s has changed", config.name)
    payload = {"source": source, "overrides": overrides or [], "digest": digest}
    emit_event(event=DATA_CHANGED, resource={"prefect.resource.id": f"grpo.data.{config.name}"}, payload=payload)
    return True

"""Training again: a retraining when something has changed, the watch for new data, and the reproduction of a model.

A retraining does nothing if nothing has changed; otherwise it trains, compares and decides. A reproduction publishes nothing.
"""

import hashlib
import re
from pathlib import Path
from typing import Literal

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.events import Event, RelatedResource, Resource
from prefect.variables import Variable

from flows import one_step
from flows.approval import load_pending_decision, was_suspended
from flows.flow_run import open_flow_run, pipeline_key
from flows.frozen_inputs import frozen_inputs
from flows.model_names import with_pinned_model
from flows.pipeline import run_pipeline
from flows.preflight import check_inputs, check_output, check_working_directory
from flows.steps import base_model, measured_difficulty, trained_stage, validated_data
from flows.temporary_server import locked_flow
from grpo_tasks.running.key import content_key
from grpo_tasks.running.orchestrator import flow_run_id
from grpo_tasks.running.slots import RETRAINING, hold
from grpo_tasks.tracking.description import describe_environment
from grpo_tasks.tracking.models import fetch_champion
from grpo_tasks.tracking.registry import find_tagged, is_overtaken, lineage_of, recorded_config
from schemas.config.load import check_recorded, load_config, tracking_at
from schemas.config.operations import TrackingConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ModelError
from schemas.paths import is_local
from schemas.results.data import DataReport
from schemas.results.publication import Lineage, PipelineResult, Reproduction, RetrainResult

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
    asked = load_pending_decision()
    # An alias as base: its version, because another version behind it is a change as well.
    config = asked.config if asked else with_pinned_model(load_config(source, overrides))
    # Prefect allows no such characters in the name of a limit.
    limit = RETRAINING + re.sub(r"[/%&<>\s]+", "-", config.registered_model)
    # A schedule and an event may start it at the same time. The second run waits here, and then finds the result of the first.
    with hold(limit):
        # A suspended run continues with its own version, whatever has become champion or base meanwhile.
        result = _result(run_pipeline(config, fresh=force)) if asked else _retrain(config, start_from, force)
        get_run_logger().info(result.reason)
        create_markdown_artifact(key="retraining", markdown=f"# {config.registered_model}\n\n{result.reason}\n")
        return result


def _retrain(config: RunConfig, start_from: Literal["base", "champion"], force: bool) -> RetrainResult:
    check_inputs(config)
    check_output(config)
    inputs = frozen_inputs(config)
    config = inputs.given
    made_of = {"grpo.retrain_key": pipeline_key(inputs, start_from)}
    # Local files are part of the key by their content; data from a hub must be downloaded first.
    if not all(is_local(source.path) for source in [*config.data.train, *config.data.eval]):
        made_of["grpo.data_digest"] = one_step.validate(config, fresh=True).digest
    known = find_tagged(config.registered_model, made_of, config.tracking)
    # A run that an earlier release has suspended for approval finds its own version here, and continues with it.
    repeat = force or was_suspended() or (known is not None and is_overtaken(config.registered_model, known, config.tracking))
    if known is not None and not repeat:
        reason = f"nothing to do: version {known} of {config.registered_model} was made of the same data, code and config"
        return RetrainResult(trained=False, reason=reason)
    if start_from == "champion":
        found = fetch_champion(config.registered_model, config.tracking, (config.resources.output_dir / "champions").resolve())
        if found is None:
            raise ModelError(f"{config.registered_model} has no champion to start from", fix="start_from: base")
        model = config.model.model_copy(update={"path": found[1].path, "revision": None})
        config = config.model_copy(update={"model": model.locked(None), "start_from": None})
    return _result(run_pipeline(config, fresh=force, tags=made_of, copies=inputs.copies.folder))


def _result(made: PipelineResult) -> RetrainResult:
    return RetrainResult(trained=True, reason=made.publication.reason, publication=made.publication, summary=made.headline())


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
    name = variable_of(config.name)
    before = Variable.get(name)
    if before == digest:
        get_run_logger().info("the data of %s has not changed", config.name)
        return False
    if before is not None:
        get_run_logger().info("the data of %s has changed", config.name)
        # Before the variable is set: after a kill between the two, the event is sent twice, and `retrain` finds nothing to do.
        payload = {"source": source, "overrides": overrides or [], "digest": digest}
        resource = Resource({"prefect.resource.id": f"grpo.data.{config.name}"})
        run = {"prefect.resource.id": f"prefect.flow-run.{flow_run_id()}", "prefect.resource.role": "flow-run"}
        event = Event(event=DATA_CHANGED, resource=resource, related=[RelatedResource(run)], payload=payload)
        # Wait until the server has it: `emit_event` only puts it into a queue, which a kill would lose.
        with get_client(sync_client=True) as client:
            client.request("POST", "/events", json=[event.model_dump(mode="json")]).raise_for_status()
    else:
        get_run_logger().info("first check of the data of %s", config.name)
    Variable.set(name, digest, overwrite=True)
    return before is not None


def variable_of(config_name: str) -> str:
    """The variable that holds the digest of a config's data. Prefect allows lower-case letters, digits and underscores."""
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in config_name.lower())
    # Names that differ in other characters only, such as a-b and a_b, have variables of their own.
    return f"grpo_data_{plain}" + ("" if plain == config_name else f"_{hashlib.sha256(config_name.encode()).hexdigest()[:8]}")


def config_of(lineage: Lineage, tracking: TrackingConfig, output_dir: Path) -> RunConfig:
    """The config that a version was made with, but with another output folder."""
    place = f"config.yaml of run {lineage.run_id}"
    recorded = check_recorded(recorded_config(lineage, tracking), place=place)
    resources = recorded.resources.model_copy(update={"output_dir": output_dir})
    where = recorded.tracking.model_copy(update={"tracking_uri": tracking.tracking_uri})
    return recorded.model_copy(update={"resources": resources, "tracking": where})


@locked_flow(name="grpo-reproduce", description="Train a registered model again from its record, and compare the adapters.")
def reproduce_flow(model: str, output_dir: Path = Path("reproduced"), tracking_uri: str | None = None) -> Reproduction:
    """`model`: NAME@ALIAS or NAME/VERSION."""
    tracking = tracking_at(tracking_uri)
    lineage = lineage_of(model, tracking)
    config = config_of(lineage, tracking, output_dir)
    if output_dir.exists() and any(output_dir.iterdir()):
        raise ConfigError("the folder is not empty", place=str(output_dir), fix="name a new one with --output-dir")
    with open_flow_run(config, flow=f"reproduce {lineage.name} {lineage.version}", fresh=True) as run:
        run.tracked.handle.tags({"grpo.reproduces": lineage.run_id})
        data = validated_data(run)
        differences = differences_of(lineage, data)
        for difference in differences:
            get_run_logger().warning("this has changed since then: %s", difference)
        ref = base_model(run.config)
        difficulty = measured_difficulty(run, ref, data)
        for stage in run.config.stages:
            result = trained_stage(run, stage, ref, data, difficulty)
            ref = result.model
        same = result.sha256 == lineage.adapter_sha256
        run.tracked.handle.tags({"grpo.same_adapter": str(same).lower()})
        return Reproduction(
            of=lineage, run_id=run.tracked.run_id, adapter_sha256=result.sha256, same=same, differences=differences
        )


def differences_of(lineage: Lineage, data: DataReport) -> list[str]:
    """What has changed since the version was made: data, code, Python, packages."""
    now = describe_environment()
    found = []
    if data.digest != lineage.data_digest:
        found.append(f"data digest {data.digest[:12]} instead of {lineage.data_digest[:12]}")
    if now.git_commit and now.git_commit != lineage.commit:
        found.append(f"commit {now.git_commit[:12]} instead of {lineage.commit[:12]}")
    if lineage.dirty or now.git_dirty:
        found.append("uncommitted code, then or now")
    if now.python != lineage.python:
        found.append(f"Python {now.python} instead of {lineage.python}")
    for name, version in lineage.packages.items():
        if now.packages.get(name) != version:
            found.append(f"{name} {now.packages.get(name, 'missing')} instead of {version}")
    return found

"""Train a registered model again from its record, and compare the adapters. Publishes nothing."""

from pathlib import Path

from prefect import get_run_logger

from flows.flow_run import open_flow_run
from flows.steps import base_model, measured_difficulty, trained_stage, validated_data
from flows.temporary_server import locked_flow
from grpo_tasks.tracking.description import describe_environment
from grpo_tasks.tracking.registry import lineage_of, recorded_config
from schemas.config.load import check_recorded, tracking_at
from schemas.config.operations import TrackingConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.results.data import DataReport
from schemas.results.publication import Lineage, Reproduction


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
        ref = base_model(config)
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

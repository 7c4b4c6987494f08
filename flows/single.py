"""Single steps as flows of their own, and the pipeline started from a preset."""

import os
import shutil
from pathlib import Path

from flows.flow_run import open_flow_run
from flows.pipeline import grpo_pipeline
from flows.preflight import check_model
from flows.steps import base_model, evaluation_of, probed_rewards, rivals_of, trained_stage, validated_data
from flows.temporary_server import locked_flow
from grpo_tasks.merge_adapter import merge_adapter
from grpo_tasks.publish_model import publish_model
from grpo_tasks.tracking.models import download_model
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ModelError
from schemas.paths import is_local
from schemas.results.data import DataReport
from schemas.results.evaluation import EvalReport
from schemas.results.lab import LabReport
from schemas.results.model import MergeProof, ModelRef, StageResult
from schemas.results.publication import PipelineResult, Publication


@locked_flow(name="grpo-validate", description="Read the data and check every row.")
def validate_flow(config: RunConfig, fresh: bool = False) -> DataReport:
    """Read the data and check every row."""
    with open_flow_run(config, flow="validate", fresh=fresh) as run:
        return validated_data(run)


@locked_flow(name="grpo-rewards", description="Run the reward lab, without any training.")
def rewards_flow(config: RunConfig, fresh: bool = False) -> LabReport:
    """Test every reward of every stage."""
    with open_flow_run(config, flow="rewards", fresh=fresh) as run:
        return probed_rewards(run, validated_data(run))


@locked_flow(name="grpo-evaluate", description="Evaluate a model on the held-out prompts.")
def evaluate_flow(model: str, config: RunConfig, fresh: bool = False) -> EvalReport:
    """`model`: a model folder, an adapter folder, a hub id, or models:/NAME@ALIAS."""
    with open_flow_run(config, flow="evaluate", fresh=fresh) as run:
        folder = (run.output / "downloads").resolve()
        ref = download_model(model, config.tracking, folder) if model.startswith("models:/") else named_model(model, config)
        return evaluation_of(run, "model", ref, validated_data(run))


@locked_flow(name="grpo-merge", description="Merge an adapter into the base model and prove the merge.")
def merge_flow(adapter: Path, config: RunConfig, into: Path | None = None) -> MergeProof:
    """`adapter`: a folder that contains adapter_config.json; `into`: where to copy the merged model."""
    ref = _adapter(adapter, config)
    if into is not None and into.exists() and any(into.iterdir()):
        raise ModelError("the folder is not empty", place=str(into), fix="name a new folder with --into")
    with open_flow_run(config, flow="merge") as run:
        template = config.rollout.chat_template_kwargs
        proof = merge_adapter(run, ref, validated_data(run), model=config.model, chat_template_kwargs=template)
    if into is not None:
        shutil.copytree(proof.model.path, into, dirs_exist_ok=True)
    return proof


@locked_flow(name="grpo-train", description="Train one stage of a config, from its base model or from an adapter.")
def train_flow(config: RunConfig, stage: str, start: str | None = None, fresh: bool = False) -> StageResult:
    """`stage`: name of a stage of the config; `start`: an adapter folder or a model to start from, by default the base model."""
    if stage not in [known.name for known in config.stages]:
        known = ", ".join(known.name for known in config.stages)
        raise ConfigError(f"no stage {stage} in this config", place="stage", fix=f"one of {known}")
    with open_flow_run(config, flow="train", fresh=fresh) as run:
        ref = named_model(start, config) if start else base_model(config)
        return trained_stage(run, config.stage(stage), ref, validated_data(run))


@locked_flow(name="grpo-publish", description="Merge an adapter, compare it with base and champion, register it, decide.")
def publish_flow(adapter: Path, config: RunConfig, fresh: bool = False) -> Publication:
    """`adapter`: a folder that contains adapter_config.json, trained from the base model of the config."""
    ref = _adapter(adapter, config)
    with open_flow_run(config, flow="publish", fresh=fresh) as run:
        data = validated_data(run)
        base = evaluation_of(run, "base", base_model(config), data)
        template = config.rollout.chat_template_kwargs
        merged = merge_adapter(run, ref, data, model=config.model, chat_template_kwargs=template)
        final = evaluation_of(run, "merged", merged.model, data)
        champion, rivals = rivals_of(run, merged, base, data)
        return publish_model(run, merged, final, rivals, champion=champion, promotion=config.promotion)


@locked_flow(name="grpo-preset", description="Run the pipeline from a preset or a YAML file, with a few settings changed.")
def preset_flow(source: str = "demo", overrides: list[str] | None = None, fresh: bool = False) -> PipelineResult:
    """`source`: name of a preset, or a YAML file; `overrides`: settings as key.path=value, e.g. stages.0.learning_rate=1e-5."""
    return grpo_pipeline(load_config(source, overrides), fresh)


def _adapter(folder: Path, config: RunConfig) -> ModelRef:
    if not _is_adapter(folder):
        raise ModelError("no adapter there", place=str(folder), fix="name a folder that contains adapter_config.json")
    return named_model(str(folder), config)


def _is_adapter(folder: Path) -> bool:
    return os.path.exists(folder / "adapter_config.json")  # noqa: PTH110 - unlike Path, accepts a name of any length


def named_model(name: str, config: RunConfig) -> ModelRef:
    """The model that a name stands for: an adapter folder is combined with the base model; anything else is a model."""
    path = Path(name)
    if _is_adapter(path):
        return base_model(config).model_copy(update={"adapter": path.resolve()})
    check_model(name, "MODEL")
    return ModelRef(path=str(path.resolve()) if is_local(name) else name)

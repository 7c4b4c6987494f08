"""Beside the pipeline: each step as a flow of its own, and the pipeline from a preset."""

import os
import shutil
from pathlib import Path

from prefect import flow

from flows.checks import check_model
from flows.parts import checked_data, evaluated, first_model, probed, rivals_of, trained
from flows.pipeline import grpo_pipeline
from flows.session import session
from grpo_tasks.merge_adapter import merge_adapter
from grpo_tasks.publish_model import publish_model
from grpo_tasks.tracking.models import download_model
from schemas.config.load import load_config
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ModelError
from schemas.paths import is_local
from schemas.results import DataReport, EvalReport, LabReport, MergeProof, ModelRef, PipelineResult, Publication, StageResult


@flow(name="grpo-validate", description="Read the data and judge every row.")
def validate_flow(config: RunConfig, fresh: bool = False) -> DataReport:
    """Data, judged."""
    with session(config, flow="validate", fresh=fresh) as run:
        return checked_data(run)


@flow(name="grpo-rewards", description="The reward lab alone.")
def rewards_flow(config: RunConfig, fresh: bool = False) -> LabReport:
    """Rewards, probed."""
    with session(config, flow="rewards", fresh=fresh) as run:
        return probed(run, checked_data(run))


@flow(name="grpo-evaluate", description="Evaluate a model on the held-out prompts.")
def evaluate_flow(model: str, config: RunConfig, fresh: bool = False) -> EvalReport:
    """`model`: a model folder, an adapter folder, a hub id, or models:/NAME@ALIAS."""
    with session(config, flow="evaluate", fresh=fresh) as run:
        folder = (run.output / "downloads").resolve()
        ref = download_model(model, config.tracking, folder) if model.startswith("models:/") else named_model(model, config)
        return evaluated(run, "model", ref, checked_data(run))


@flow(name="grpo-merge", description="Merge an adapter into the base model and prove it.")
def merge_flow(adapter: Path, config: RunConfig, into: Path | None = None) -> MergeProof:
    """`adapter`: a folder with adapter_config.json; `into`: where to copy the merged model."""
    ref = _adapter(adapter, config)
    if into is not None and into.exists() and any(into.iterdir()):
        raise ModelError("the folder is not empty", place=str(into), fix="name a new folder with --into")
    with session(config, flow="merge") as run:
        proof = merge_adapter(run, ref, checked_data(run), model=config.model)
    if into is not None:
        shutil.copytree(proof.model.path, into, dirs_exist_ok=True)
    return proof


@flow(name="grpo-train", description="Train one stage of a config, from its base model or from an adapter.")
def train_flow(config: RunConfig, stage: str, start: str | None = None, fresh: bool = False) -> StageResult:
    """`stage`: name of one of the config's stages; `start`: an adapter folder or model to go on from, none for the base model."""
    if stage not in [known.name for known in config.stages]:
        known = ", ".join(known.name for known in config.stages)
        raise ConfigError(f"no stage {stage} in this config", place="stage", fix=f"one of {known}")
    with session(config, flow="train", fresh=fresh) as run:
        ref = named_model(start, config) if start else first_model(config)
        return trained(run, config.stage(stage), ref, checked_data(run))


@flow(name="grpo-publish", description="Merge an adapter, evaluate it against base and champion, register it, decide.")
def publish_flow(adapter: Path, config: RunConfig, fresh: bool = False) -> Publication:
    """`adapter`: a folder with adapter_config.json, trained from the config's base model."""
    ref = _adapter(adapter, config)
    with session(config, flow="publish", fresh=fresh) as run:
        data = checked_data(run)
        base = evaluated(run, "base", first_model(config), data)
        merged = merge_adapter(run, ref, data, model=config.model)
        final = evaluated(run, "merged", merged.model, data)
        champion, rivals = rivals_of(run, merged, base, data)
        return publish_model(run, merged, final, rivals, champion=champion, promotion=config.promotion)


@flow(name="grpo-preset", description="The pipeline from a preset or YAML file, with a few settings changed.")
def preset_flow(source: str = "demo", overrides: list[str] | None = None, fresh: bool = False) -> PipelineResult:
    """`source`: a preset's name or a YAML file; `overrides`: settings as key.path=value, e.g. stages.0.learning_rate=1e-5."""
    return grpo_pipeline(load_config(source, overrides), fresh)


def _adapter(folder: Path, config: RunConfig) -> ModelRef:
    if not _is_adapter(folder):
        raise ModelError("no adapter there", place=str(folder), fix="name a folder that holds adapter_config.json")
    return named_model(str(folder), config)


def _is_adapter(folder: Path) -> bool:
    return os.path.exists(folder / "adapter_config.json")  # noqa: PTH110 - takes a name of any length


def named_model(name: str, config: RunConfig) -> ModelRef:
    """What a user means by a name: an adapter folder goes on the config's base; anything else is a model."""
    path = Path(name)
    if _is_adapter(path):
        return first_model(config).model_copy(update={"adapter": path.resolve()})
    check_model(name, "MODEL")
    return ModelRef(path=str(path.resolve()) if is_local(name) else name)

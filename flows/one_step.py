"""One step of the pipeline, with the steps that it needs, as plain functions: `grpo validate` without a server calls these.

single.py makes flows of them, whose forms show these docstrings. Here nothing imports Prefect, so that a command answers at once.
"""

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import grpo_tasks.steps
from flows.flow_run import open_flow_run, warn
from flows.model_names import adapter_model, copy_model, is_adapter, named_model, with_local_model
from flows.preflight import check_learning_rates, check_start, check_structure
from flows.steps import (
    base_model,
    evaluation_of,
    measured_at_start,
    measured_difficulty,
    trained_stage,
    validate_guards,
    validated_data,
)
from grpo_tasks.running.step import Step
from grpo_tasks.steps.merge_adapter import merge_adapter
from grpo_tasks.steps.prepare_data import prepare_data
from grpo_tasks.steps.probe_rewards import probe_rewards
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ModelError
from schemas.results.base import StepResult
from schemas.results.data import DataReport, LabReport, PreparedData
from schemas.results.evaluation import DifficultyReport, EvalReport
from schemas.results.model import MergeProof, ModelRef, StageResult

ALONE = (RunConfig, ModelRef, PreparedData, DataReport, LabReport)
"""What `step` gives a step that runs without a pipeline."""


def validate(config: RunConfig, fresh: bool = False) -> DataReport:
    """Read the data and check every row.

    Args:
        config: the configuration. Fields that are rarely changed are folded away.
        fresh: run every step again, even if its inputs have not changed.
    """
    # On a machine without the GPU of the training, perhaps.
    config = with_local_model(config, computes=False)
    with open_flow_run(config, flow="validate", fresh=fresh, steps=2 + len(config.promotion.guards)) as run:
        data = validated_data(run)
        validate_guards(run)
        return data


def rewards(config: RunConfig, fresh: bool = False) -> LabReport:
    """Test every reward of every stage.

    Args:
        config: the configuration. Fields that are rarely changed are folded away.
        fresh: run every step again, even if its inputs have not changed.
    """
    config = with_local_model(config)
    with open_flow_run(config, flow="rewards", fresh=fresh, steps=3) as run:
        return probe_rewards(run, run.config, base_model(run.config), validated_data(run))


def difficulty(config: RunConfig, fresh: bool = False) -> DifficultyReport:
    """Measure how often the base model solves each training prompt, by the rewards of each stage.

    Args:
        config: the configuration. Fields that are rarely changed are folded away.
        fresh: run every step again, even if its inputs have not changed.
    """
    given = config.difficulty
    if given.samples == 0 and given.pass_rate_column is None:
        raise ConfigError("nothing would be sampled", place="difficulty.samples", fix="--set difficulty.samples=8")
    config = with_local_model(config)
    # Every stage, also one that would measure from its own start, which only a run has.
    neutral = {"measure_difficulty": False, "keep_pass_rate": None, "min_pass_at_group": None}
    stages = [stage.model_copy(update=neutral) for stage in config.stages]
    config = config.model_copy(update={"stages": stages})
    with open_flow_run(config, flow="difficulty", fresh=fresh, steps=3) as run:
        report = measured_difficulty(run, base_model(run.config), validated_data(run))
    assert report is not None, "there are samples or a column"
    return report


def evaluate(model: str, config: RunConfig, fresh: bool = False) -> EvalReport:
    """Evaluate a model on the held-out prompts.

    Args:
        model: a model folder, an adapter folder, a hub id, or a registered model: NAME, NAME@ALIAS or NAME/VERSION.
        config: the configuration. Fields that are rarely changed are folded away.
        fresh: run every step again, even if its inputs have not changed.
    """
    config = with_local_model(config)
    with open_flow_run(config, flow="evaluate", fresh=fresh, steps=3) as run:
        return evaluation_of(run, "model", named_model(model, config), validated_data(run))


def merge(adapter: str, config: RunConfig, into: Path | None = None) -> MergeProof:
    """Merge an adapter into the base model and prove the merge.

    Args:
        adapter: a folder with adapter_config.json, a hub id, or a registered version.
        config: the configuration. Fields that are rarely changed are folded away.
        into: a new folder for a copy of the merged model. Empty: no copy.
    """
    config = with_local_model(config)
    ref = adapter_model(adapter, config)
    # A model may be what this command copied before it was killed; `copy_model` compares.
    if into is not None and into.exists() and any(into.iterdir()) and not (into / "config.json").exists():
        raise ModelError("the folder is not empty", place=str(into), fix="name a new folder with --into")
    with open_flow_run(config, flow="merge", steps=3) as run:
        proof = merge_adapter(run, run.config, ref, validated_data(run))
    if into is not None:
        copy_model(Path(proof.model.path), into)
    return proof


def train(config: RunConfig, stage: str, start: str | None = None, fresh: bool = False) -> StageResult:
    """Train one stage, and publish nothing.

    Args:
        config: the configuration. Fields that are rarely changed are folded away.
        stage: name of a stage of the config.
        start: an adapter folder or a model to start from. Empty: start_from of the config, or its base model.
        fresh: run every step again, even if its inputs have not changed.
    """
    if stage not in [known.name for known in config.stages]:
        known = ", ".join(known.name for known in config.stages)
        raise ConfigError(f"no stage {stage} in this config", place="stage", fix=f"one of {known}")
    config = with_local_model(config)
    measured = bool(measured_at_start(config)) + config.stage(stage).measure_difficulty
    with open_flow_run(config, flow="train", fresh=fresh, steps=3 + measured) as run:
        if start:
            config = config.model_copy(update={"start_from": Path(start) if is_adapter(Path(start)) else None})
        notes = check_start(config, place="--from" if start else "start_from")
        for note in [*notes, *check_structure(config, hub=True), *check_learning_rates(config)]:
            warn(note)
        ref = named_model(start, config) if start else base_model(run.config)
        data = validated_data(run)
        return trained_stage(run, run.config.stage(stage), ref, data, measured_difficulty(run, ref, data))


def step(name: str, config: RunConfig, model: str | None = None, fresh: bool = False) -> StepResult:
    """Run any step, with the steps that it needs.

    Args:
        name: name of the step, that of its file in grpo_tasks/steps.
        config: the configuration. Fields that are rarely changed are folded away.
        model: a step that takes a model takes this one. Empty: the base model.
        fresh: run every step again, even if its inputs have not changed.
    """
    known = sorted(found.name for found in iter_modules(grpo_tasks.steps.__path__))
    if name not in known:
        raise ConfigError(f"there is no step {name}", place="step", fix=f"one of {', '.join(known)}")
    wanted: Step[..., StepResult] = getattr(import_module(f"grpo_tasks.steps.{name}"), name)
    inputs = [one for one in list(signature(wanted.body, eval_str=True).parameters.values())[1:] if one.default is one.empty]
    if missing := [one.name for one in inputs if one.annotation not in ALONE]:
        fix = "grpo run, or the command of this step"
        raise ConfigError(f"{name} needs {', '.join(missing)}, which only a whole run has", place="step", fix=fix)
    config = with_local_model(config)
    with open_flow_run(config, flow=name, fresh=fresh) as run:

        def start() -> ModelRef:
            return named_model(model, config) if model else base_model(run.config)

        make: dict[Any, Callable[[], object]] = {
            RunConfig: lambda: run.config,
            ModelRef: start,
            PreparedData: lambda: prepare_data(run, run.config),
            DataReport: lambda: validated_data(run),
            LabReport: lambda: probe_rewards(run, run.config, start(), validated_data(run)),
        }
        return wanted(run, **{one.name: make[one.annotation]() for one in inputs})

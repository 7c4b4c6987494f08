"""A stage's settings as TRL's GRPOConfig. Settings that TRL does not support are refused by name, never dropped."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from trl.trainer.grpo_config import GRPOConfig

from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError

NATIVE_ONLY = {
    "baseline",
    "max_refills",
    "max_tokens_per_microbatch",
    "importance_sampling_correction",
    "importance_sampling_clip_max",
    "importance_sampling_clip_min",
    "max_sampling_logp_difference",
    "skip_dead_groups",
}
"""Settings of the native engine that TRL has no equivalent for."""
HANDLED = {"name", "engine", "rewards", "trl", "reference", "early_stop", "log_completions_steps", "guards", "kl_every_steps"} | {
    "eval_steps",
    "num_eval_prompts",
    "load_best_model_at_end",
    "early_stopping_patience",
}
"""Settings that this module handles itself, and held-out evaluations, which the configuration refuses for this engine."""
QUIET = {"skip_dead_groups", "max_sampling_logp_difference"}
"""Settings of NATIVE_ONLY that are not refused at any value: TRL behaves as if they were off, which the documentation says."""


def grpo_config(spec: StageSpec, output: Path, device: torch.device) -> GRPOConfig:
    """GRPOConfig of a stage; the options in `stage.trl` override everything else.

    Raises:
        ConfigError: a setting that TRL does not support is not at its default, or an option in `trl` does not exist.
    """
    stage = spec.stage
    _refuse(spec)
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    shared = {name: value for name, value in stage.model_dump().items() if name in known and name not in HANDLED}
    unknown = sorted(set(stage.trl) - known)
    if unknown:
        raise ConfigError(
            f"GRPOConfig of TRL has no {unknown[0]}", place=f"stages {stage.name}: trl", fix="see TRL's documentation"
        )
    rollout = spec.rollout
    options: dict[str, Any] = {
        "output_dir": str(output),
        "seed": spec.seed,
        "use_cpu": device.type == "cpu",
        "bf16": spec.model.dtype == "bfloat16",
        "fp16": spec.model.dtype == "float16",
        "max_steps": stage.max_steps or -1,
        "warmup_steps": stage.warmup_steps or stage.warmup_ratio,
        "max_completion_length": rollout.max_completion_length,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p or None,
        "repetition_penalty": rollout.repetition_penalty,
        "gradient_checkpointing": spec.model.gradient_checkpointing,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "ddp_timeout": round(60 * spec.resources.distributed_timeout_minutes),
        "save_strategy": "steps",
        "log_completions": False,
    }
    return GRPOConfig(**{name: value for name, value in (shared | options | stage.trl).items() if value is not None})


def _refuse(spec: StageSpec) -> None:
    stage = spec.stage
    defaults = StageConfig(name=stage.name, rewards=stage.rewards)
    for name in sorted(NATIVE_ONLY - QUIET):
        if getattr(stage, name) != getattr(defaults, name):
            _refuse_setting(stage, name, "leave it out, or engine: native")
    if stage.has_kl_term and stage.reference == "base" and spec.start.adapter is not None:
        _refuse_setting(
            stage, "reference: base for a stage that continues an adapter", "reference: stage_start, or engine: native"
        )
    if spec.rollout.stop or spec.rollout.stop_token_ids:
        _refuse_setting(stage, "rollout.stop", "trl: {generation_kwargs: ...}, or engine: native")
    if spec.resources.num_processes > 1:
        _refuse_setting(stage, "resources.num_processes", "start it with torchrun, or engine: native")


def _refuse_setting(stage: StageConfig, what: str, fix: str) -> None:
    raise ConfigError(f"engine trl does not support {what}", place=f"stages {stage.name}", fix=fix)

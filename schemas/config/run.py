"""The one tree that describes a run: YAML file, command line, Prefect form and MLflow parameters are views of it.

    RunConfig
      model       base model, adapter (LoRA) or full fine-tuning
      data        where prompts and answers come from
      validation  which rows are refused, and how many may be
      rewards     tags, answer equality, reward functions with weights
      rollout     how completions are sampled
      stages[]    GRPO, one entry a stage; each starts from the one before
      evaluation  held-out samples, before and after
      promotion   when the alias `champion` moves
      tracking    MLflow
      resources   device, threads, where files go

Field names are those of TRL's GRPOConfig where it has one. Reading a config needs pydantic and nothing heavier; what
can only be known with the data or the tokenizer at hand is checked by the validation step. Loading a file and naming
the nearest right key is `schemas/config/load.py`.
"""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from schemas.config.data import DataConfig, ValidationConfig
from schemas.config.evaluation import EvaluationConfig, PromotionConfig
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig, TrackingConfig
from schemas.config.rewards import BUILTIN_REWARDS, LabConfig, RewardsConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.section import Section
from schemas.config.stage import StageConfig
from schemas.config.types import Name
from schemas.secret import has_password, secrets_in


class RunConfig(Section):
    """A whole run."""

    GROUPS: ClassVar = {
        "machine_and_checks": (
            "validation",
            "lab",
            "tracking",
            "resources",
        ),
    }

    name: Name = "grpo"
    """Name of the run: MLflow experiment, registered model and folder are called so unless set otherwise."""
    seed: int = Field(42, ge=0, lt=2**31)
    """Seed of everything random: split, order of prompts, sampling, initial adapter."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The base model."""
    data: DataConfig
    """Prompts with their ground truth."""
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    """Which rows are refused."""
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    """How completions are scored."""
    lab: LabConfig = Field(default_factory=LabConfig)
    """What the reward lab tries before training."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """How completions are sampled."""
    stages: list[StageConfig] = Field(min_length=1)
    """GRPO stages, in order; each starts from the model of the one before."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Held-out evaluation."""
    promotion: PromotionConfig = Field(default_factory=PromotionConfig)
    """When the new model becomes the champion."""
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    """MLflow."""
    resources: ResourcesConfig = Field(default_factory=ResourcesConfig)
    """Machine settings."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        names = [stage.name for stage in self.stages]
        for name in names:
            if names.count(name) > 1 or name in ("base", "merged", "champion"):
                raise ValueError(f"stage name {name} is taken; fix: give each stage a name of its own")
        for index, stage in enumerate(self.stages):
            for reward in stage.rewards:
                self._check_reward(f"stages.{index}.rewards", reward)
        for name, reward_config in self.rewards.functions.items():
            function = reward_config.function or name
            if ":" not in function and function not in BUILTIN_REWARDS:
                raise ValueError(
                    f"rewards.functions.{name}: {function} is not built in; fix: one of {', '.join(BUILTIN_REWARDS)}, "
                    "or function: package.module:function"
                )
        if self.rewards.tags.reasoning == self.rewards.tags.answer:
            raise ValueError("rewards.tags: reasoning and answer have the same name; fix: choose two names")
        self._check_addresses()
        vllm, model = self.rollout.vllm, self.model
        if self.rollout.engine == "vllm" and vllm.sync == "adapter" and model.lora is None:
            raise ValueError("rollout.vllm.sync adapter needs one; fix: model.lora: {}, or sync: auto")
        if self.rollout.engine == "vllm" and vllm.sync == "merged" and model.quantization != "none":
            raise ValueError("weights in 4 bits cannot be merged for a server; fix: rollout.vllm.sync: adapter")
        if self.rollout.engine == "vllm" and self.resources.num_processes > 1 and not vllm.base_urls:
            raise ValueError("several processes share servers that run already; fix: rollout.vllm.base_urls: [...]")
        if self.rollout.engine == "vllm" and vllm.overlap:
            self._check_overlap()
        if self.resources.fsdp:
            self._check_shards()
        return self

    def _check_addresses(self) -> None:
        if has_password(self.tracking.tracking_uri or ""):
            raise ValueError(
                "tracking.tracking_uri holds a password, and a config is recorded; fix: leave it empty and export "
                "MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if any(has_password(address) for address in self.rollout.vllm.base_urls):
            raise ValueError("rollout.vllm.base_urls holds a password, and a config is recorded; fix: export VLLM_API_KEY")
        for flag in ("--host", "--port", "--api-key"):
            if any(given.partition("=")[0] == flag for given in self.rollout.vllm.extra_args):
                raise ValueError(
                    f"rollout.vllm.extra_args: {flag} is not for a server started here, which listens on 127.0.0.1 alone; fix: "
                    "leave it out; a key comes from VLLM_API_KEY, a server for others is started by hand and named in base_urls"
                )
        for place in secrets_in(self.model_dump()):
            raise ValueError(
                f"{place} holds a password, token or key, and a config is recorded; fix: read it from the environment"
            )

    def _check_overlap(self) -> None:
        if self.resources.num_processes > 1:
            raise ValueError("rollout.vllm.overlap is for one process; fix: resources.num_processes: 1, or overlap: false")
        for index, stage in enumerate(self.stages):
            if stage.engine == "native" and stage.importance_sampling_correction == "none":
                raise ValueError(
                    "rollout.vllm.overlap trains on completions of an older policy; "
                    f"fix: stages.{index}.importance_sampling_correction: token_truncate"
                )

    def _check_shards(self) -> None:
        if self.model.quantization != "none":
            raise ValueError("weights in 4 bits cannot be spread over processes; fix: resources.fsdp: false")
        if self.model.dtype == "float16":
            raise ValueError("float16 scales its gradients, which resources.fsdp cannot; fix: model.dtype: bfloat16")
        for index, stage in enumerate(self.stages):
            if stage.optim.endswith("8bit"):
                raise ValueError(f"stages.{index}.optim {stage.optim} cannot be spread by resources.fsdp; fix: adamw_torch")
            if stage.engine != "native":
                raise ValueError(f"stages.{index}.engine {stage.engine} knows no resources.fsdp; fix: engine: native")

    def _check_reward(self, place: str, reward: str) -> None:
        resolved = self.rewards.resolve(reward)
        if resolved is None:
            known = sorted({*BUILTIN_REWARDS, *self.rewards.functions})
            raise ValueError(
                f"{place} names {reward}, which is neither built in nor under rewards.functions; "
                f"fix: one of {', '.join(known)}, or add it with function: package.module:function"
            )
        if resolved.function == "soft_overlong" and not {"max_completion_length", "soft_punish_cache"} <= resolved.params.keys():
            limit = self.rollout.max_completion_length
            raise ValueError(
                f"{place}: {reward} wants two params; fix: rewards.functions.{reward}.params: "
                f"{{max_completion_length: {limit}, soft_punish_cache: {max(1, limit // 5)}}}"
            )

    @property
    def experiment(self) -> str:
        """MLflow experiment name in force."""
        return self.tracking.experiment or self.name

    @property
    def registered_model(self) -> str:
        """Name in the model registry in force."""
        return self.tracking.registered_model or self.name

    def stage(self, name: str) -> StageConfig:
        """The stage of that name; KeyError when there is none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)


class JudgeInputs(Section):
    """The part of a run that decides which rows are good and on which side they are."""

    data: DataConfig
    """Columns, pattern and split."""
    validation: ValidationConfig
    """Limits and rules."""
    rewards: RewardsConfig
    """For the tag names, which no ground truth may contain, and the equality, which each must fit."""
    seed: int
    """Of the split."""


class LabInputs(Section):
    """The part of a run that the reward lab tries."""

    rewards: RewardsConfig
    """The functions."""
    stages: list[StageConfig]
    """For the names of their rewards."""
    lab: LabConfig
    """How much is tried."""

"""The one tree that describes a run: YAML file, command line, Prefect form and MLflow parameters are views of it.

Reading a config needs pydantic and nothing heavier. Checks of the fields of one section stand in that section, those across
sections here, and the validation step checks what depends on the data or the tokenizer.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field

from schemas.config.completion import CompletionConfig
from schemas.config.data import DataConfig, ValidationConfig
from schemas.config.evaluation import GUARD, EvaluationConfig, PromotionConfig
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig, TrackingConfig
from schemas.config.rewards import BUILTIN_REWARDS, LabConfig, RewardConfig, RewardsConfig
from schemas.config.rollout import InteractionConfig, RolloutConfig
from schemas.config.section import Folded, Section, T
from schemas.config.stage import DifficultyConfig, StageConfig
from schemas.config.types import Name
from schemas.metrics import REWARD, REWARD_MEAN, member
from schemas.secret import secrets_in

MachineAndChecks = Annotated[T, Folded("machine_and_checks")]

MEASURING_SEED = 0
"""Seed of measured pass rates. It is not the seed of the run, so that runs with other seeds use the same measurement."""
RESERVED_NAMES = ("base", "merged", "champion")
"""Labels of evaluations, which no stage may take."""


class RunConfig(Section):
    """A whole run."""

    name: Name = "grpo"
    """Name of the run, and by default of its folder, MLflow experiment and registered model."""
    seed: int = Field(42, ge=0, lt=2**31)
    """Seed of everything random: split, order of prompts, sampling and initial adapter."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The base model."""
    start_from: Path | None = None
    """Adapter that the first stage continues from; with it the base model is the base of every comparison. A folder with
    adapter_config.json and adapter_model.safetensors, such as checkpoint-500 of TRL's or transformers' Trainer. Only its weights
    are taken, not its optimizer, schedule or position. Empty: a new adapter."""
    data: DataConfig
    """Prompts with their ground truth."""
    validation: MachineAndChecks[ValidationConfig] = Field(default_factory=ValidationConfig)
    """Which rows are rejected."""
    completion: CompletionConfig = Field(default_factory=CompletionConfig)
    """What an answer is, and when it is right."""
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    """How completions are scored."""
    lab: MachineAndChecks[LabConfig] = Field(default_factory=LabConfig)
    """How the reward lab probes reward functions before training."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """How completions are sampled."""
    interaction: MachineAndChecks[InteractionConfig] = Field(default_factory=InteractionConfig)
    """Tools and environments that answer the policy between its turns."""
    difficulty: MachineAndChecks[DifficultyConfig] = Field(default_factory=DifficultyConfig)
    """How hard the training prompts are for the model, known before training."""
    stages: list[StageConfig] = Field(min_length=1)
    """Stages, in order. Each starts from the model of the previous one."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Held-out evaluation."""
    promotion: PromotionConfig = Field(default_factory=PromotionConfig)
    """When the new model becomes the champion."""
    tracking: MachineAndChecks[TrackingConfig] = Field(default_factory=TrackingConfig)
    """MLflow."""
    resources: MachineAndChecks[ResourcesConfig] = Field(default_factory=ResourcesConfig)
    """Machine settings."""

    def _faults(self) -> Iterator[str]:
        yield from self._faults_of_names()
        yield from self._faults_of_tasks()
        yield from self.difficulty.faults_of(self.stages)
        yield from self._faults_of_interaction()
        yield from self._faults_of_evaluation()
        for place in secrets_in(self.model_dump()):
            yield f"{place} contains a password, token or key, and a config is recorded; fix: read it from the environment"
        yield from self._faults_of_added_tokens()
        yield from self._faults_of_machines()
        if self.start_from is not None and self.model.added_tokens:
            yield "the adapter of start_from has no rows for model.added_tokens; fix: remove one of the two"

    def _faults_of_names(self) -> Iterator[str]:
        names = [stage.name for stage in self.stages]
        for name in names:
            if names.count(name) > 1 or name in RESERVED_NAMES or (name.startswith(GUARD) and self.promotion.guards):
                yield f"stage name {name} is taken; fix: give each stage a unique name"
        for index, stage in enumerate(self.stages):
            for reward in stage.rewards:
                yield from self._faults_of_reward(f"stages.{index}.rewards", reward)

    def _faults_of_tasks(self) -> Iterator[str]:
        for task in self.data.tasks:
            allowed = self.data.rewards_of(task)
            if allowed is None:
                continue
            used = sorted({reward for stage in self.stages for reward in stage.rewards})
            for reward in sorted(allowed - set(used)):
                yield f"data.tasks.{task}.rewards names {reward}, which no stage uses; fix: one of {', '.join(used)}"
            for index, stage in enumerate(self.stages):
                if stage.rewards and allowed.isdisjoint(stage.rewards):
                    yield (
                        f"no reward of stages.{index} applies to the task {task}; "
                        f"fix: data.tasks.{task}.rewards: [{stage.rewards[0]}, ...]"
                    )

    def _faults_of_interaction(self) -> Iterator[str]:
        if not self.interaction.active:
            return
        for index, stage in enumerate(self.stages):
            if stage.engine == "trl":
                yield f"engine trl plays no conversations; fix: stages.{index}.engine: native"
        most, turn = self.interaction.max_tokens, self.rollout.max_completion_length
        if most < turn:
            yield (
                f"interaction.max_tokens {most} is less than one turn of rollout.max_completion_length {turn}; "
                f"fix: interaction.max_tokens: {4 * turn}"
            )

    def _faults_of_evaluation(self) -> Iterator[str]:
        for reward in self.evaluation.rewards or []:
            yield from self._faults_of_reward("evaluation.rewards", reward)
        for name, function in self.evaluation.evaluators.items():
            place = f"evaluation.evaluators.{name}"
            if ":" not in function and function not in BUILTIN_REWARDS:
                yield f"{place}: {function} is not built in; fix: package.module:function"
            if name in self._evaluation_rewards:
                yield f"{place} has the name of a reward of the evaluation; fix: choose another name"
            if refusal := self.completion.refusal(function):
                yield f"{place}: {refusal}"
        metric = self.promotion.metric or ""
        function = self.promotion.decides_by(metric)
        if function and function not in {*self._evaluation_rewards, *self.evaluation.evaluators}:
            yield f"promotion.metric: the evaluation does not measure {function}; fix: evaluation.rewards: [{function}]"
        if metric == REWARD and not self._evaluation_rewards:
            yield "promotion.metric: the evaluation measures no reward; fix: leave evaluation.rewards empty"
        for index, guard in enumerate(self.promotion.guards):
            if guard.needs_truth and not self.completion.has_answer:
                yield f"promotion.guards.{index}: {guard.metric} needs an answer, and completions have none; fix: another metric"
        if self.promotion.needs_truth and not self.completion.has_answer:
            fix = f"set {self.completion.answer_fix or 'promotion.metric: reward'}"
            yield f"promotion.metric: {metric} needs an answer, and completions have none; fix: {fix}"

    @property
    def _evaluation_rewards(self) -> list[str]:
        return self.stages[-1].rewards if self.evaluation.rewards is None else self.evaluation.rewards

    def _functions(self, names: Iterable[str]) -> dict[str, RewardConfig]:
        """These reward functions as they score outside of a stage: the configured weight counts."""
        found = {name: self.rewards.resolve(name) for name in names}
        return {name: one.model_copy(update={"adaptive": None}) for name, one in found.items() if one is not None}

    def scoring(self) -> "Scoring | None":
        """The functions that score held-out completions; None when there are none."""
        rewards, evaluators = self._evaluation_rewards, self.evaluation.evaluators
        if not rewards and not evaluators:
            return None
        functions = self._functions(rewards)
        functions |= {name: RewardConfig(function=function, weight=0.0) for name, function in evaluators.items()}
        section = self.rewards.model_copy(update={"functions": functions})
        return Scoring(
            rewards=section, weighted=list(dict.fromkeys(rewards)), reported=list(evaluators), tasks=self.task_rewards(evaluators)
        )

    @property
    def figures(self) -> list[str]:
        """Evaluation metrics that this config asks for by name: the one that decides, and those of the evaluators."""
        decides = self.promotion.metric
        return ([decides] if decides else []) + [member(REWARD_MEAN, name) for name in self.evaluation.evaluators]

    def difficulty_of(self, stages: Sequence[StageConfig], *, measured: bool = False, adapter: bool = False) -> Self:
        """The config with these stages only and the functions that they use, for pass rates by their rewards.

        `measured`: even where a column of the data holds them. `adapter`: the measured policy has one.
        """
        functions = self._functions(sorted({name for stage in stages for name in stage.rewards}))
        difficulty = self.difficulty.model_copy(update={"pass_rate_column": None} if measured else {})
        rewards = self.rewards.model_copy(update={"functions": functions})
        update = {"stages": list(stages), "rewards": rewards, "difficulty": difficulty}
        if self.model.lora is not None and not adapter:
            # A server needs the rank of an adapter. Nothing else of it is a reason to measure again.
            update["model"] = self.model.model_copy(update={"lora": ModelConfig().lora})
        return self.model_copy(update=update if self.model.added_tokens else update | {"seed": MEASURING_SEED})

    def task_rewards(self, everywhere: Iterable[str] = ()) -> dict[str, list[str] | None]:
        """The functions that apply to each task: those that data.tasks lists, and those that apply everywhere; None: all."""
        tasks = self.data.tasks.items()
        return {name: None if task.rewards is None else [*task.rewards, *everywhere] for name, task in tasks}

    def _faults_of_reward(self, place: str, reward: str) -> Iterator[str]:
        resolved = self.rewards.resolve(reward)
        if resolved is None:
            known = sorted({*BUILTIN_REWARDS, *self.rewards.functions})
            yield (
                f"{place} names {reward}, which is neither built in nor under rewards.functions; "
                f"fix: one of {', '.join(known)}, or add it with function: package.module:function"
            )
            return
        if refusal := self.completion.refusal(resolved.function or ""):
            yield f"{place} names {reward}: {refusal}"
        if resolved.function == "environment" and self.interaction.environment is None:
            yield f"{place} names {reward}, and no environment answers; fix: interaction.environment: module:Class"
        if missing := resolved.missing(reward, max_completion_length=self.rollout.max_completion_length):
            yield f"{place}: {missing}"

    def _faults_of_added_tokens(self) -> Iterator[str]:
        vllm, model = self.rollout.vllm, self.model
        if not model.added_tokens:
            return
        if self.resources.fsdp and model.lora is not None:
            yield "the trained rows of model.added_tokens cannot be sharded; fix: resources.fsdp: false"
        if "vllm" not in (self.rollout.engine, self.evaluation.engine):
            return
        if vllm.base_urls:
            yield (
                "a running server has no rows for model.added_tokens; fix: remove rollout.vllm.base_urls, and the run starts one"
            )
        if vllm.sync == "adapter":
            yield "vLLM's adapters cannot carry the rows of model.added_tokens; fix: rollout.vllm.sync: auto"
        if model.quantization != "none" and self.rollout.engine == "vllm":
            yield (
                "vLLM gets the rows of model.added_tokens with merged weights, and 4-bit weights cannot be merged for it; "
                "fix: rollout.engine: local, or model.quantization: none"
            )

    def _faults_of_machines(self) -> Iterator[str]:
        resources, cluster = self.resources, self.resources.cluster.engine == "ray"
        for index, stage in enumerate(self.stages):
            if cluster and stage.engine == "trl":
                # Only our own checkpoints travel back from a node.
                yield f"engine trl trains on one machine only; fix: stages.{index}.engine: native"
        if cluster and self.model.dtype == "auto":
            yield "model.dtype auto is decided where a run starts, and its stages run elsewhere; fix: model.dtype: bfloat16"
        if cluster and self.model.added_tokens and self.rollout.engine == "vllm":
            yield (
                "a rollout server on a cluster has no rows for model.added_tokens; fix: rollout.engine: local, "
                "or resources.cluster.engine: local"
            )
        if self.rollout.engine == "vllm":
            yield from self._faults_of_servers()
        if resources.fsdp and self.model.quantization != "none":
            yield "4-bit weights cannot be sharded; fix: resources.fsdp: false"
        if resources.fsdp and self.model.dtype == "float16":
            yield "resources.fsdp does not support the loss scaling of float16; fix: model.dtype: bfloat16"
        for index, stage in enumerate(self.stages):
            if resources.fsdp and stage.optim.endswith("8bit"):
                yield f"stages.{index}.optim {stage.optim} does not support resources.fsdp; fix: adamw_torch"
            if resources.fsdp and stage.engine != "native":
                yield f"stages.{index}.engine {stage.engine} does not support resources.fsdp; fix: engine: native"

    def _faults_of_servers(self) -> Iterator[str]:
        vllm, model, most = self.rollout.vllm, self.model, self.rollout.max_staleness
        if vllm.sync == "adapter" and model.lora is None:
            yield "rollout.vllm.sync: adapter needs an adapter; fix: model.lora: {}, or sync: auto"
        if vllm.sync == "merged" and model.quantization != "none":
            yield "4-bit weights cannot be merged for a server; fix: rollout.vllm.sync: adapter"
        # On a cluster, where num_processes is 1, the driver starts servers that all processes share.
        if self.resources.num_processes > 1 and not vllm.base_urls:
            yield "several processes need running servers that they share; fix: rollout.vllm.base_urls: [...]"
        for index, stage in enumerate(self.stages if most else []):
            if stage.engine == "native" and stage.importance_sampling_correction == "none":
                yield (
                    f"rollout.max_staleness {most} trains on completions of an older policy; "
                    f"fix: stages.{index}.importance_sampling_correction: auto, which is token_truncate"
                )
            if most < stage.updates_per_rollout:
                yield (
                    f"a rollout of stages.{index} feeds {stage.updates_per_rollout} updates, so the next one would be that many "
                    f"updates old; fix: rollout.max_staleness: {stage.updates_per_rollout}, or 0"
                )

    @property
    def experiment(self) -> str:
        """That of MLflow."""
        return self.tracking.experiment or self.name

    @property
    def registered_model(self) -> str:
        """Name in the model registry."""
        return self.tracking.registered_model or self.name

    def with_module_dir(self, folder: Path, *, replace: bool = False) -> Self:
        """The config with a folder of own modules in the sections that name functions and no folder; with `replace`, in all."""

        def put(section: Any) -> Any:
            return section.model_copy(update={"module_dir": folder}) if replace or section.module_dir is None else section

        stages = [
            stage.model_copy(update={"demonstrations": put(stage.demonstrations)}) if stage.demonstrations else stage
            for stage in self.stages
        ]
        interaction = put(self.interaction) if replace or self.interaction.active else self.interaction
        return self.model_copy(update={"rewards": put(self.rewards), "stages": stages, "interaction": interaction})

    def evaluated(self) -> Self:
        """The config with the sampling engine of an evaluation."""
        engine = self.evaluation.engine or self.rollout.engine
        return self.model_copy(update={"rollout": self.rollout.model_copy(update={"engine": engine})})

    @property
    def supervised_first(self) -> bool:
        """Whether the base model need not earn any reward yet."""
        return self.stages[0].kind == "sft"

    @property
    def merged_system_prompt(self) -> str | None:
        """System prompt that the chat template of the merged model gets."""
        return self.data.system_prompt if self.model.merged_system_prompt else None

    def stage(self, name: str) -> StageConfig:
        """The stage of this name; raises `KeyError`."""
        return {stage.name: stage for stage in self.stages}[name]


class Scoring(Section):
    """The functions that score held-out completions."""

    rewards: RewardsConfig
    weighted: list[str]
    """Functions whose weighted sum is the reward; the others are reported."""
    reported: list[str]
    tasks: dict[str, list[str] | None] = Field(default_factory=dict)
    """Functions that apply to each task; None: all of them."""

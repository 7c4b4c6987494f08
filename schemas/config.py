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
the nearest right key is `schemas/load.py`.
"""

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, GetJsonSchemaHandler, StringConstraints, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from schemas.metrics import TRAINING
from schemas.secret import has_password, secrets_in
from schemas.section import Section


def _url(address: str) -> str:
    try:
        urlsplit(address)
    except ValueError as error:
        raise ValueError(f"not an address: {error}; mend: http://HOST:PORT") from error
    return address


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Address = Annotated[str, StringConstraints(min_length=1, max_length=2_000)]
"""A path, a hub id or a URL."""
Url = Annotated[Address, AfterValidator(_url)]
MlflowName = Annotated[str, StringConstraints(pattern=r"^[^/:@\x00-\x1f]{1,200}$")]
"""MLflow refuses the other characters and longer names, but only when the model is published."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
TagName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,31}$")]

# Upper bounds: generous to any real run, and far below where a slip of the finger (10**12 updates, bytes instead of tokens) fills
# the memory, overflows a timer or trains for a thousand years.
MOST_UPDATES = 10_000_000
"""A year of updates of three seconds."""
MOST_COMPLETIONS = 1_000_000
"""At once, in one batch, round or group."""
MOST_TOKENS = 10_000_000
"""The longest contexts of 2026 hold this many."""
MOST_ROWS = 1_000_000_000
"""Rows of a table, or tokens of a batch."""
MOST_PROCESSES = 4_096
"""Processes or threads on one machine."""
MOST_TIMES = 1_000
"""Repetitions."""
LONGEST_S = 1_000_000.0
"""Eleven days in seconds; the system's own timers overflow at 24."""

BUILTIN_REWARDS: dict[str, float] = {
    "format": 1.0,
    "incremental_format": 1.0,
    "correctness": 2.0,
    "length": 0.2,
    "repetition": 0.5,
    "style": 0.5,
    "soft_overlong": 1.0,
}
"""Built-in reward functions and their default weights; a test holds it equal to `grpo_tasks.rewards.builtin`."""


def _plain(value: Any, name: str = "") -> Any:
    """Values that JSON has a word for: they travel to other processes, to MLflow and to Prefect's form as JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            _plain(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _plain(item, f"{name}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}, not a finite number; mend: leave it out or give a number")
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise ValueError(f"{name} is a {type(value).__name__}, which JSON has no word for; mend: quote it: '{str(value)[:40]}'")
    return value


FreeSettings = Annotated[dict[str, Any], AfterValidator(_plain)]
"""Settings that somebody else checks."""


class LoraConfig(Section):
    """Low-rank adapter (LoRA, arXiv:2106.09685) trained instead of the whole model."""

    GROUPS: ClassVar = {
        "details": (
            "lora_dropout",
            "target_modules",
            "use_rslora",
        ),
    }

    r: int = Field(16, ge=1, le=512, title="Rank")
    """Rank of the update matrices."""
    lora_alpha: int = Field(32, ge=1, le=100_000)
    """Scale: the update is multiplied by lora_alpha / r. Twice the rank is customary."""
    lora_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Dropout probability on the adapter's input while training."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Names of the layers that get an adapter, for example [q_proj, v_proj]; all-linear takes every linear layer but the head."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead (rank-stabilised LoRA)."""


class ModelConfig(Section):
    """The base model."""

    GROUPS: ClassVar = {
        "details": (
            "revision",
            "merged_dtype",
            "attn_implementation",
            "quantization",
            "gradient_checkpointing",
        ),
    }

    path: Address = "embedded:base"
    """Local directory or hub id of a causal language model; embedded:base is the tiny model inside this project."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); none for local directories."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the base weights and of the forward pass. Adapter weights are always trained in float32. With float16 the loss
    is scaled, so that small gradients do not become 0; bfloat16 needs no scaling."""
    merged_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision the merged model is saved in. The merge itself is computed in float32."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel."""
    quantization: Literal["none", "nf4"] = "none"
    """nf4: the base in 4 bits under the adapter while training (QLoRA, arXiv:2305.14314; extra [gpu]). Merging and evaluation use
    the base as it is."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third slower."""
    lora: LoraConfig | None = Field(default_factory=LoraConfig, title="LoRA")
    """Adapter settings; null trains every weight (full fine-tuning)."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.quantization != "none" and self.lora is None:
            raise ValueError("a 4-bit base cannot be trained itself; mend: lora: {}, or quantization: none")
        return self


class DataSource(Section):
    """One file or hub data set."""

    GROUPS: ClassVar = {
        "details": (
            "format",
            "name",
            "split",
            "revision",
            "max_rows",
        ),
    }

    path: Address
    """JSONL, CSV or Parquet file (relative to the working directory), a hub id such as openai/gsm8k, or embedded:FILE."""
    format: Literal["auto", "jsonl", "csv", "parquet", "hub"] = "auto"
    """How to read it; auto goes by the ending of the name, and takes what has none and does not exist as a hub id."""
    name: str | None = None
    """Configuration name of a hub data set, for example main."""
    split: str = "train"
    """Split of a hub data set."""
    revision: str | None = None
    """Revision of a hub data set (branch, tag or commit)."""
    max_rows: int | None = Field(None, ge=1, le=MOST_ROWS)
    """Take only the first so many rows; none takes all."""


class DataConfig(Section):
    """Prompts with their ground truth."""

    GROUPS: ClassVar = {
        "columns_and_split": (
            "eval_fraction",
            "question_column",
            "prompt_column",
            "answer_column",
            "answer_pattern",
        ),
    }

    train: list[DataSource] = Field(min_length=1)
    """Where training prompts come from."""
    eval: list[DataSource] = Field(default_factory=list)
    """Where held-out prompts come from; empty: a share of the training data is held out."""
    eval_fraction: float = Field(0.1, gt=0.0, lt=1.0)
    """Share of rows held out when no eval source is given; chosen by a hash of the row, so a row never changes sides."""
    question_column: str = "question"
    """Column with the bare question; used when there is no prompt column."""
    prompt_column: str = "prompt"
    """Column with ready chat messages (list of {role, content})."""
    answer_column: str = "answer"
    """Column with the ground truth."""
    answer_pattern: str | None = None
    r"""Pattern whose first group is the ground truth inside the answer column, for example `#### (.+)`; the last match
    counts. Linear-time syntax (Rust regex): no look-around, no back-references."""
    system_prompt: str | None = None
    """System message put in front of every question, and of ready prompts that have none."""


class ValidationConfig(Section):
    """Which rows are refused. Refused rows go to the quarantine table, never silently away."""

    max_invalid_fraction: Fraction = 0.01
    """Share of rows that may be quarantined before the run stops."""
    max_prompt_length: int = Field(512, ge=1, le=MOST_TOKENS)
    """Longest prompt in tokens after the chat template; longer ones are quarantined, never cut."""
    min_train_rows: int = Field(1, ge=1, le=MOST_ROWS)
    """Fewest good training rows to go on with."""
    min_eval_rows: int = Field(1, ge=1, le=MOST_ROWS)
    """Fewest good held-out rows to go on with."""
    ignore_rules: list[str] = Field(default_factory=list)
    """Names of row rules that are not applied (see the validation report for the names)."""


class TagsConfig(Section):
    """Names of the two blocks a completion should consist of."""

    reasoning: TagName = "reasoning"
    """Tag around the working: <reasoning>...</reasoning>."""
    answer: TagName = "answer"
    """Tag around the final answer: <answer>...</answer>."""


class AdaptiveWeightConfig(Section):
    """Moves a reward's weight by its success rate, bounded."""

    low: Fraction = 0.3
    """Below this success rate the weight grows."""
    high: Fraction = 0.8
    """Above this success rate the weight shrinks."""
    grow: float = Field(1.2, ge=1.0)
    """Factor applied when the success rate is low."""
    shrink: float = Field(0.9, gt=0.0, le=1.0)
    """Factor applied when the success rate is high."""
    min_scale: float = Field(0.25, gt=0.0, le=1.0)
    """Smallest weight, as a multiple of the configured one."""
    max_scale: float = Field(4.0, ge=1.0)
    """Largest weight, as a multiple of the configured one."""
    every_steps: int = Field(10, ge=1, le=MOST_UPDATES)
    """Updates between two adjustments; the success rate is taken over them."""


class RewardConfig(Section):
    """One reward function."""

    GROUPS: ClassVar = {
        "limits": (
            "time_limit_s",
            "on_error",
            "full_score",
            "adaptive",
        ),
    }

    function: str | None = None
    """Built-in name or package.module:function; empty: the entry's own name."""
    weight: float | None = None
    """Factor of its score in the sum; empty: the built-in's default, or 1."""
    params: FreeSettings = Field(default_factory=dict)
    """Extra keyword arguments of the function."""
    time_limit_s: float = Field(30.0, gt=0.0, le=LONGEST_S)
    """Longest time in seconds for one call with a whole batch of completions."""
    on_error: Literal["raise", "zero", "skip"] = "raise"
    """After an exception, a hang or a broken result: raise stops the run, zero scores the batch 0, skip leaves the
    function out of that batch. zero and skip are logged each time."""
    full_score: float | None = None
    """Score from which a completion counts as a success of this function (adaptive weight, success rate); empty: 1, and 0 for
    repetition and soft_overlong."""
    adaptive: AdaptiveWeightConfig | None = None
    """Adaptive weight; none keeps the weight fixed."""


class RewardsConfig(Section):
    """How completions are scored. Also tells the evaluation what an answer is; the evaluation uses no reward."""

    tags: TagsConfig = Field(default_factory=TagsConfig)
    """Names of the two blocks."""
    equality: Literal["exact", "numeric", "math", "choice"] = "numeric"
    """When an answer equals the ground truth: exact text, numeric value, mathematical expression (math-verify), or the
    letter of a multiple choice."""
    functions: dict[Name, RewardConfig] = Field(default_factory=dict)
    """Reward functions by name. Built-in ones need no entry unless a setting is changed."""
    memory_limit_gb: float = Field(8.0, gt=0.0, allow_inf_nan=False)
    """Most memory in GB (1e9 bytes) that the process of the reward functions and all it starts may use together; a model that a
    function loads counts. Measured every 0.05 s as resident memory, shared pages once. Never more than 80 % of the machine's."""
    module_dir: Path | None = None
    """Folder with the modules of your own functions, searched after the installed packages and the working directory; relative
    to the working directory. Empty: the config file's folder, when such a module lies there."""

    def module_dirs(self) -> list[Path]:
        """Folders in which the modules of own functions are looked for, after the installed packages."""
        return [Path.cwd(), *([self.module_dir] if self.module_dir is not None else [])]

    def resolve(self, name: str) -> RewardConfig | None:
        """The full settings of one reward, function and weight filled in; None when nothing is known by that name."""
        given = self.functions.get(name)
        if given is None and name not in BUILTIN_REWARDS:
            return None
        given = given or RewardConfig()
        function = given.function or name
        weight = given.weight if given.weight is not None else BUILTIN_REWARDS.get(function, 1.0)
        return given.model_copy(update={"function": function, "weight": weight})


VLLM_HOTTEST = 2.0


class VllmConfig(Section):
    """A vLLM server for rollouts."""

    GROUPS: ClassVar = {
        "server_details": (
            "python",
            "gpu_memory_utilization",
            "sleep",
            "overlap",
            "replicas",
            "devices",
            "tensor_parallel_size",
            "max_model_len",
            "extra_args",
            "start_timeout_s",
            "request_timeout_s",
            "concurrency",
            "retries",
            "max_restarts",
        ),
    }

    base_urls: list[Url] = Field(default_factory=list)
    """Servers that run elsewhere, such as http://10.0.0.7:8000; requests are spread over them. Empty: one is started here, and
    ended with the stage. They must read the files that the trainer writes: the same machine or a shared folder. A key they
    ask for is taken from VLLM_API_KEY."""
    sync: Literal["auto", "adapter", "merged"] = "auto"
    """How the servers take over the policy at each update. adapter: the adapter is swapped. merged: whole weights are written and
    read, which full fine-tuning always does. auto: adapter, but merged where our own server decodes on a CPU."""
    python: Address = ".venv-vllm/bin/python"
    """Python of the environment that vLLM is installed in (make vllm)."""
    gpu_memory_utilization: float = Field(0.4, gt=0.0, le=1.0)
    """Share of the card's memory that the server takes."""
    sleep: bool = False
    """The server gives the card's memory back while the policy trains (a GPU's only): for one card that both share."""
    overlap: bool = False
    """Sample the next batch while the policy trains on this one: it then comes from a policy one batch older, which
    importance_sampling_correction puts right. A checkpoint waits for no batch: the one after it is sampled anew."""
    replicas: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Servers started here; requests are spread over them."""
    devices: list[str] = Field(default_factory=list)
    """Cards of the servers, one entry a replica, such as "1", or "2,3" with tensor_parallel_size 2; empty: the trainer's."""
    tensor_parallel_size: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Cards that one server spreads the model over."""
    max_model_len: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Longest prompt and completion together in tokens; empty: what the model allows."""
    extra_args: list[str] = Field(default_factory=list)
    """Further flags of the server's command line."""
    start_timeout_s: float = Field(600.0, gt=0.0, le=LONGEST_S)
    """Longest time in seconds until the server is up."""
    request_timeout_s: float = Field(300.0, gt=0.0, le=LONGEST_S)
    """Longest time in seconds for one completion."""
    concurrency: int = Field(64, ge=1, le=MOST_COMPLETIONS)
    """Requests under way at once."""
    retries: int = Field(3, ge=0, le=MOST_TIMES)
    """Times a request is repeated after a fault of the connection."""
    max_restarts: int = Field(2, ge=0, le=MOST_TIMES)
    """Times that servers which died are started again before the stage stops."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.overlap and self.sleep:
            raise ValueError("a server that sleeps while the policy trains cannot sample meanwhile; mend: overlap or sleep")
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(f"devices has {len(self.devices)} entries for {self.replicas} replicas; give one for each")
        return self


class RolloutConfig(Section):
    """How completions are sampled, in every stage and in the evaluation."""

    GROUPS: ClassVar = {
        "sampling_details": (
            "top_p",
            "top_k",
            "stop",
            "include_stop_str_in_output",
            "stop_token_ids",
            "max_batch_size",
        ),
    }

    engine: Literal["local", "vllm"] = "local"
    """local: our own decoding loop in the trainer's process. vllm: a vLLM server in an environment of its own."""
    vllm: VllmConfig = Field(default_factory=VllmConfig, title="vLLM")
    """Settings of engine vllm."""
    max_completion_length: int = Field(256, ge=1, le=MOST_TOKENS)
    """Longest completion in tokens."""
    temperature: float = Field(1.0, gt=0.0, le=100.0)
    """Sampling temperature while training; the policy's log-probabilities are taken at the same temperature."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling: keep the smallest set of tokens with this probability; 1 keeps all."""
    top_k: int = Field(0, ge=0, le=MOST_TOKENS)
    """Keep only the k likeliest tokens; 0 keeps all."""
    stop: list[Annotated[str, StringConstraints(min_length=1)]] = Field(default_factory=list)
    """Strings that end a completion, for example </answer>. A stop string may contain a special token, which is then kept in the
    text with it."""
    include_stop_str_in_output: bool = True
    """Keep the stop string in the completion's text and tokens; off: text and tokens end before it."""
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(default_factory=list)
    """Token ids that end a completion, besides the tokenizer's and generation config's own end tokens."""
    max_batch_size: int = Field(256, ge=1, le=MOST_COMPLETIONS)
    """Most completions decoded at once; more only costs memory."""

    @model_validator(mode="after")
    def _what_vllm_takes(self) -> Self:
        if self.engine == "vllm" and self.temperature > VLLM_HOTTEST:
            raise ValueError(f"vLLM takes temperatures up to {VLLM_HOTTEST:g}, not {self.temperature:g}; or engine: local")
        return self


class EarlyStopConfig(Section):
    """Ends a stage when a metric has reached its target."""

    metric: Annotated[str, StringConstraints(max_length=200)] = "reward"
    """Name of a training metric, such as reward, kl or rewards/NAME/mean (see schemas/metrics.py)."""
    target: float
    """The stage ends once the mean of the metric is at least this (at most this, for metrics where lower is better)."""
    window: int = Field(10, ge=1, le=MOST_UPDATES)
    """Updates the mean is taken over."""
    min_steps: int = Field(1, ge=1, le=MOST_UPDATES)
    """Fewest updates before the stage may end."""


GuardAction = Literal["off", "warn", "stop", "rollback"]


class GuardConfig(Section):
    """A guard: the action alone (`kl_blow_up: stop`), or with the threshold (`kl_blow_up: {action: stop, threshold: 0.3}`)."""

    model_config = ConfigDict(title="Action and threshold")

    action: GuardAction = "warn"
    """off, warn (an event in log, Prefect and MLflow), stop, or rollback (to the last good checkpoint, with a smaller learning
    rate)."""

    @model_validator(mode="before")
    @classmethod
    def _action_alone(cls, given: Any) -> Any:
        given = {"action": given} if isinstance(given, str | bool) else given
        # YAML 1.1 reads a bare off as false.
        off = isinstance(given, Mapping) and given.get("action") is False
        return {**given, "action": "off"} if off else given


class _OrActionAlone:
    """Says in the schema of a field that the action alone will do: what starts a deployment is checked against the schema."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        # In the field, not in the guard's own definition: there Prefect's form would show a box for raw JSON.
        action = {"title": "Action alone", "type": "string", "enum": list(get_args(GuardAction))}
        return {"anyOf": [handler(core_schema), action]}


class KlBlowUp(GuardConfig):
    """KL from the reference too high."""

    threshold: float = Field(0.5, gt=0.0, allow_inf_nan=False)
    """Highest KL in nats a token, median of 10 updates (of 3 measurements where kl_every_steps measures it)."""


class RewardStdCollapse(GuardConfig):
    """Rewards that hardly differ inside a group."""

    threshold: float = Field(0.01, gt=0.0, allow_inf_nan=False)
    """Smallest reward_std (in units of the reward), median of 10 updates."""


class FlatReward(GuardConfig):
    """A reward that does not rise."""

    threshold: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    """Smallest rise of the mean reward (in units of the reward) from the first 25 updates to the last 25; chance, two standard
    errors, has to be exceeded as well."""


class DeadGroups(GuardConfig):
    """Too many groups whose completions earn the same."""

    threshold: float = Field(0.9, gt=0.0, lt=1.0)
    """Largest share of dead groups, median of 10 updates."""


class Truncation(GuardConfig):
    """Too many completions cut off."""

    threshold: float = Field(0.5, gt=0.0, lt=1.0)
    """Largest share of completions cut off at the length limit, median of 10 updates."""


class EntropyCollapse(GuardConfig):
    """A policy that gets too sure of itself."""

    threshold: float = Field(0.2, gt=0.0, lt=1.0)
    """Smallest entropy as a multiple of that of the first 10 updates, medians of 10 updates."""


class LengthExplosion(GuardConfig):
    """Completions that get too long."""

    threshold: float = Field(2.0, gt=1.0, allow_inf_nan=False)
    """Largest mean length as a multiple of that of the first 10 updates, medians of 10 updates."""


class FormatRegression(GuardConfig):
    """A format that is unlearnt."""

    threshold: float = Field(0.2, gt=0.0, lt=1.0)
    """Largest fall of a format reward's success (a share) below its best, medians of 10 updates."""


class SamplerMismatch(GuardConfig):
    """A sampler that is not the policy."""

    threshold: float = Field(0.1, gt=0.0, allow_inf_nan=False)
    """Largest mean difference of log-probabilities in nats a token, median of 10 updates."""


class GuardsConfig(Section):
    """What is done when the figures of a stage go wrong: off, warn (an event in log, Prefect and MLflow), stop, or rollback (to
    the last good checkpoint, with a smaller learning rate)."""

    GROUPS: ClassVar = {
        "details": (
            "max_rollbacks",
            "rollback_learning_rate",
        ),
    }

    not_finite: Literal["stop", "rollback"] = "stop"
    """A loss or a gradient that is not finite; the update is never made."""
    kl_blow_up: Annotated[KlBlowUp, _OrActionAlone()] = Field(default_factory=KlBlowUp, title="KL blow up")
    """KL from the reference above the threshold."""
    reward_std_collapse: Annotated[RewardStdCollapse, _OrActionAlone()] = Field(default_factory=RewardStdCollapse)
    """reward_std below the threshold, while some function succeeds less than 9 times in 10."""
    flat_reward: Annotated[FlatReward, _OrActionAlone()] = Field(default_factory=FlatReward)
    """The reward of the last 25 updates is no better than that of the first 25, while some function succeeds less than 9 times
    in 10."""
    dead_groups: Annotated[DeadGroups, _OrActionAlone()] = Field(default_factory=DeadGroups)
    """More dead groups than the threshold, while some function succeeds less than 9 times in 10."""
    truncation: Annotated[Truncation, _OrActionAlone()] = Field(default_factory=Truncation)
    """More completions cut off than the threshold."""
    entropy_collapse: Annotated[EntropyCollapse, _OrActionAlone()] = Field(default_factory=EntropyCollapse)
    """Entropy below the threshold times that of the first 10 updates, without more reward."""
    length_explosion: Annotated[LengthExplosion, _OrActionAlone()] = Field(default_factory=LengthExplosion)
    """Completions longer than the threshold times those of the first 10 updates, without more reward."""
    format_regression: Annotated[FormatRegression, _OrActionAlone()] = Field(default_factory=FormatRegression)
    """Success of a format reward further below the best 10 updates of the stage than the threshold."""
    sampler_mismatch: Annotated[SamplerMismatch, _OrActionAlone()] = Field(default_factory=SamplerMismatch)
    """Sampler and trainer differ by more than the threshold."""
    max_rollbacks: int = Field(2, ge=0, le=MOST_TIMES)
    """Times a stage is rolled back before it stops."""
    rollback_learning_rate: float = Field(0.5, gt=0.0, le=1.0)
    """Factor of the learning rate after each roll back."""

    @property
    def rolls_back(self) -> bool:
        """Whether any guard does."""
        actions = [guard.action for _, guard in self if isinstance(guard, GuardConfig)]
        return "rollback" in [self.not_finite, *actions]


_METRICS = [metric.name for metric in TRAINING]


class StageConfig(Section):
    """One GRPO stage (arXiv:2402.03300)."""

    GROUPS: ClassVar = {
        "batches": (
            "num_train_epochs",
            "gradient_accumulation_steps",
            "max_tokens_per_microbatch",
            "max_refills",
            "steps_per_generation",
            "num_iterations",
        ),
        "optimizer": (
            "lr_scheduler_type",
            "warmup_ratio",
            "warmup_steps",
            "optim",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "weight_decay",
            "max_grad_norm",
        ),
        "loss_details": (
            "scale_rewards",
            "baseline",
            "multi_objective_aggregation",
            "kl_every_steps",
            "reference",
            "epsilon",
            "epsilon_high",
            "delta",
            "sapo_temperature_pos",
            "sapo_temperature_neg",
            "use_bias_correction_kl",
            "importance_sampling_level",
            "mask_truncated_completions",
            "skip_dead_groups",
            "top_entropy_quantile",
            "entropy_coef",
        ),
        "sampler_mismatch": (
            "importance_sampling_correction",
            "importance_sampling_clip_max",
            "importance_sampling_clip_min",
            "max_sampling_logp_difference",
        ),
        "engine_choice": (
            "engine",
            "trl",
        ),
        "logs_and_checkpoints": (
            "eval_steps",
            "num_eval_prompts",
            "load_best_model_at_end",
            "early_stopping_patience",
            "logging_steps",
            "save_steps",
            "save_total_limit",
            "log_completions_steps",
            "early_stop",
            "guards",
        ),
    }

    name: Name
    """Name of the stage; also of its child run in MLflow."""
    rewards: list[Name] = Field(min_length=1)
    """Names of the reward functions of this stage."""
    engine: Literal["native", "trl"] = "native"
    """What trains the stage: our own engine, or TRL's GRPOTrainer (extra [trl]) on the same data, rewards and adapter."""
    trl: FreeSettings = Field(default_factory=dict, title="TRL options")
    """Further options of TRL's GRPOConfig, for engine trl only; they win over the settings here."""
    max_steps: int | None = Field(None, ge=1, le=MOST_UPDATES)
    """Number of updates; empty: by num_train_epochs."""
    num_train_epochs: float = Field(1.0, gt=0.0, le=1_000_000.0)
    """Passes over the training prompts; max_steps, when given, wins."""
    num_generations: int = Field(8, ge=2, le=MOST_COMPLETIONS)
    """Completions per prompt (the group, G)."""
    per_device_train_batch_size: int = Field(8, ge=1, le=MOST_COMPLETIONS)
    """Completions per forward and backward pass."""
    gradient_accumulation_steps: int = Field(1, ge=1, le=MOST_COMPLETIONS)
    """Forward and backward passes per update; batch size times this is the number of completions of an update."""
    max_tokens_per_microbatch: int | None = Field(None, ge=1, le=MOST_ROWS)
    """Tokens of prompts and completions, padding included, that go through the model at once. Completions are then sorted by
    length and cut into passes of this size, whatever per_device_train_batch_size says; the update is the same."""
    max_refills: int = Field(0, ge=0, le=MOST_TIMES)
    """Times dead groups are replaced by groups of further prompts before an update (dynamic sampling, arXiv:2503.14476)."""
    steps_per_generation: int | None = Field(None, ge=1, le=MOST_COMPLETIONS)
    """Forward and backward passes fed by one round of sampling; a multiple of gradient_accumulation_steps. Empty: equal to it."""
    num_iterations: int = Field(1, ge=1, le=MOST_TIMES)
    """Times each round of completions is trained on; above 1 the clipped ratio comes into play."""
    learning_rate: float = Field(1e-6, gt=0.0, le=10.0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    """Shape of the learning rate after the warm-up."""
    warmup_ratio: Fraction = 0.0
    """Share of the updates over which the learning rate rises from 0; warmup_steps, when above 0, wins."""
    warmup_steps: int = Field(0, ge=0, le=MOST_UPDATES)
    """Number of updates over which the learning rate rises from 0."""
    optim: Literal["adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"] = "adamw_torch"
    """Optimizer; the 8-bit ones need bitsandbytes."""
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    adam_epsilon: float = Field(1e-8, gt=0.0)
    """Term that keeps the optimizer from dividing by zero."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, ge=0.0)
    """Largest gradient norm; larger ones are scaled down. 0 switches clipping off."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"] = "dapo"
    """Loss. The first four clip the ratio and differ in the average: grpo per sequence, then over sequences; bnpo over the tokens
    of a micro-batch; dapo over the tokens of the whole update; dr_grpo over completions times max_completion_length (no length
    bias). cispo caps the ratio as a weight and keeps every token's gradient (average of dapo); sapo damps it smoothly (average
    of grpo)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the reward minus the group's mean is divided by: the group's or the rollout's standard deviation, or nothing."""
    baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What a reward is compared with: the mean of its group, or the mean of the others in it (RLOO, arXiv:2402.14740)."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How several reward functions become one advantage: summed with their weights and then scaled as scale_rewards says, or each
    scaled by its own spread in the group, summed with the weights and scaled by the rollout's spread (GDPO)."""
    beta: float = Field(0.0, ge=0.0)
    """Weight of the KL term towards the reference in the loss; at 0 no reference is computed for the loss."""
    kl_every_steps: int = Field(10, ge=0, le=10_000_000)
    """Updates between two measurements of the KL at beta 0, for the metric kl and its guard; each costs a forward pass without
    gradients. 0: never. Above beta 0 every update measures it; full fine-tuning at beta 0 has no reference and never does."""
    reference: Literal["base", "stage_start"] = "base"
    """Reference policy of the KL: the base model, or the policy this stage starts from."""
    epsilon: float = Field(0.2, gt=0.0)
    """Clip range of the probability ratio below 1."""
    epsilon_high: float | None = Field(None, gt=0.0)
    """Clip range above 1; empty: equal to epsilon. For cispo the cap of the ratio itself, to be given; 5 is customary."""
    delta: float | None = Field(None, gt=0.0)
    """Upper bound of the ratio also for negative advantages (two-sided clip); empty: none. Must be above 1 + epsilon."""
    sapo_temperature_pos: float = Field(1.0, gt=0.0)
    """sapo: how sharply the ratio is damped for positive advantages (arXiv:2511.20347)."""
    sapo_temperature_neg: float = Field(1.05, gt=0.0)
    """sapo: the same for negative advantages; a little sharper keeps training stable."""
    use_bias_correction_kl: bool = False
    """Multiply the KL estimate by the ratio, so that it stays unbiased when the policy has moved since it sampled."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio per token, or one per sequence (GSPO, arXiv:2507.18071)."""
    mask_truncated_completions: bool = False
    """Leave completions that were cut off at the length limit out of the loss."""
    skip_dead_groups: bool = True
    """Do not compute groups whose completions all earn the same. Off: they are computed, and keep their KL term."""
    top_entropy_quantile: Fraction = 1.0
    """Share of an update's tokens, those of highest entropy, whose policy term counts; 0.2 is customary (arXiv:2506.01939). Below
    1 each update computes its tokens' entropies first, one more forward pass."""
    entropy_coef: float = Field(0.0, ge=0.0)
    """Weight of the mean entropy per token that is added as a bonus; above 0 dead groups are computed too."""
    importance_sampling_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """Makes up for a sampler whose probabilities differ from the trainer's: the policy term is multiplied by their ratio, per
    token or per sequence, truncated to the bounds or set to 0 outside of them. Of use with a rollout server."""
    importance_sampling_clip_max: float | None = Field(3.0, gt=0.0)
    """Upper bound of that ratio; empty: none."""
    importance_sampling_clip_min: float | None = Field(None, gt=0.0)
    """Lower bound of that ratio; empty: none."""
    max_sampling_logp_difference: float | None = Field(0.5, gt=0.0)
    """Mean difference in nats between the sampler's and the trainer's log-probabilities above which the stage stops: the
    completions then come from another model. Empty: never."""
    logging_steps: int = Field(10, ge=1, le=MOST_UPDATES)
    """Updates between two lines of the progress log. The journal and MLflow get every update all the same."""
    save_steps: int = Field(50, ge=1, le=MOST_UPDATES)
    """Updates between two checkpoints; the last update always has one."""
    save_total_limit: int = Field(2, ge=1, le=MOST_COMPLETIONS)
    """Checkpoints kept."""
    log_completions_steps: int = Field(20, ge=1, le=MOST_UPDATES)
    """Updates between two tables of sampled completions."""
    eval_steps: int | None = Field(None, ge=1, le=MOST_UPDATES)
    """Updates between two looks at held-out prompts: one completion each, scored by the stage's rewards (eval_reward). The last
    update has one too. Empty: none."""
    num_eval_prompts: int = Field(64, ge=1, le=MOST_ROWS)
    """Held-out prompts looked at; taken from the other end of them than those of the evaluation."""
    load_best_model_at_end: bool = True
    """With eval_steps: the stage's result is the policy of the highest eval_reward, not the last one (but for a stage that ended
    at its early_stop target)."""
    early_stopping_patience: int | None = Field(None, ge=1, le=MOST_UPDATES)
    """End the stage after so many looks without a higher eval_reward; empty: never."""
    early_stop: EarlyStopConfig | None = None
    """End the stage early when a target is reached; none trains all updates."""
    guards: GuardsConfig = Field(default_factory=GuardsConfig)
    """What is done when the figures go wrong."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        completions = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if completions % self.num_generations:
            raise ValueError(
                f"per_device_train_batch_size {self.per_device_train_batch_size} x gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} = {completions} completions an update, which is not a multiple of "
                f"num_generations {self.num_generations}; mend: {_nearest_batch(self)}"
            )
        if completions > MOST_COMPLETIONS:
            raise ValueError(f"{completions:,} completions an update; mend: at most {MOST_COMPLETIONS:,}, by smaller batches")
        if self.early_stop is not None:
            self._check_metric(self.early_stop.metric)
        if self.steps_per_generation and self.steps_per_generation % self.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation {self.steps_per_generation} is not a multiple of gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}; mend: leave it out or make it a multiple"
            )
        if self.delta is not None and self.delta <= 1 + self.epsilon:
            raise ValueError(f"delta {self.delta} must be above 1 + epsilon = {1 + self.epsilon}; mend: 4 is customary")
        if self.trl and self.engine != "trl":
            raise ValueError("options under trl are for engine trl; mend: engine: trl, or leave them out")
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError("cispo caps the ratio at epsilon_high, which is not given; mend: epsilon_high: 5")
        if self.early_stopping_patience is not None and self.eval_steps is None:
            raise ValueError("early_stopping_patience counts evaluations; mend: eval_steps: 20, say")
        if self.engine == "trl" and self.eval_steps is not None:
            raise ValueError("engine trl looks at no held-out prompts; mend: leave eval_steps out, or engine: native")
        if self.engine == "trl" and self.guards.rolls_back:
            raise ValueError("engine trl cannot roll back; mend: warn or stop under guards, or engine: native")
        if self.loss_type == "cispo" and self.importance_sampling_level == "sequence":
            raise ValueError("cispo weighs tokens; mend: importance_sampling_level: token")
        twice = sorted({name for name in self.rewards if self.rewards.count(name) > 1})
        if twice:
            raise ValueError(f"reward {twice[0]} is listed twice; mend: list it once and raise its weight")
        return self

    def _check_metric(self, metric: str) -> None:
        known = [name.replace("*", reward) for name in _METRICS for reward in (self.rewards if "*" in name else [""])]
        if metric not in known:
            near = difflib.get_close_matches(metric, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"early_stop.metric: {metric[:80]} is no metric of this stage; did you mean {near}?")
        if metric.startswith("eval_") and self.eval_steps is None:
            raise ValueError(f"early_stop.metric: {metric} is measured on held-out prompts only; mend: eval_steps: 20, say")

    @property
    def completions_per_update(self) -> int:
        """Completions that one optimizer step learns from, however many processes share the work."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps taken on one round of sampled completions."""
        rounds = (self.steps_per_generation or self.gradient_accumulation_steps) // self.gradient_accumulation_steps
        return rounds * self.num_iterations


def _nearest_batch(stage: StageConfig) -> str:
    groups = max(1, round(stage.completions_per_update / stage.num_generations))
    wanted = groups * stage.num_generations
    if wanted % stage.gradient_accumulation_steps == 0:
        return f"per_device_train_batch_size: {wanted // stage.gradient_accumulation_steps}"
    return f"per_device_train_batch_size: {stage.num_generations} with gradient_accumulation_steps: {groups}"


class EvaluationConfig(Section):
    """Held-out samples, the same prompts for base, stages and merged model."""

    GROUPS: ClassVar = {
        "details": (
            "temperature",
            "greedy",
            "stages",
            "confidence",
        ),
    }

    engine: Literal["local", "vllm"] | None = None
    """What samples; empty: as in training (rollout.engine)."""
    max_prompts: int | None = Field(256, ge=1, le=MOST_ROWS)
    """Held-out prompts used, the first by hash of the row; empty: all."""
    num_samples: int = Field(4, ge=1, le=MOST_COMPLETIONS)
    """Sampled completions per prompt (k of pass@k)."""
    temperature: float = Field(1.0, gt=0.0, le=100.0)
    """Sampling temperature of the evaluation."""
    greedy: bool = True
    """Also decode each prompt greedily, once."""
    stages: bool = True
    """Also evaluate after each stage, not only base and merged model."""
    confidence: float = Field(0.95, gt=0.0, lt=1.0)
    """Level of the confidence intervals (bootstrap over prompts)."""


class LabConfig(Section):
    """The reward lab: what is tried before any training."""

    num_rows: int = Field(32, ge=1, le=MOST_ROWS)
    """Training rows from which probe completions are made."""
    num_prompts: int = Field(16, ge=1, le=MOST_ROWS)
    """Training prompts for which the base model samples a group."""
    max_seconds_per_completion: float = Field(0.1, gt=0.0, le=LONGEST_S)
    """Longest time in seconds a built-in or own reward may take for one completion; ten times that for one of 1 MB."""
    min_signal: Fraction = 0.05
    """Smallest share of groups whose completions earn different rewards, on samples of the base model, first stage."""
    ignore_checks: list[str] = Field(default_factory=list)
    """Checks that only warn instead of stopping the run, as check or function/check, for example style/order."""


class PromotionConfig(Section):
    """When the new model becomes the champion."""

    metric: Literal["accuracy", "format_rate", "lenient_accuracy", "pass_at_k"] = "accuracy"
    """Evaluation figure that decides, paired over the same prompts."""
    alpha: float = Field(0.05, gt=0.0, lt=1.0)
    """Significance level of the one-sided paired test against base and present champion. Both have to be beaten, so the
    chance of promoting a model that is no better stays within alpha."""
    max_format_drop: Fraction = 0.02
    """Largest drop of the format rate against the champion (the base, where there is none)."""
    max_truncation_growth: Fraction = 0.02
    """Largest growth of the share of truncated completions against the champion (the base, where there is none)."""
    max_length_growth: float = Field(0.5, ge=0.0)
    """Largest growth of the mean completion length against the champion, as a share of its length. Not held against the base:
    learning to reason makes completions longer."""


class TrackingConfig(Section):
    """MLflow."""

    tracking_uri: Url | None = None
    """Where MLflow is; empty: the environment's MLFLOW_TRACKING_URI, else sqlite:///mlflow.db in the working directory. Never
    with a password, because all of this is recorded: an address that has one belongs into MLFLOW_TRACKING_URI."""
    experiment: Annotated[str, StringConstraints(min_length=1, max_length=250)] | None = None
    """Experiment name; empty: the run's name."""
    registered_model: MlflowName | None = None
    """Name in the model registry; empty: the run's name."""
    flush_interval_s: float = Field(5.0, gt=0.0, le=LONGEST_S)
    """Seconds between two shipments of the training journal to MLflow; the end of a stage ships what is left."""
    patience_s: float = Field(600.0, ge=0.0, le=LONGEST_S)
    """Longest time in seconds to wait for a server that goes away in the middle of a run. Training never waits for it."""


class ResourcesConfig(Section):
    """Machine settings; they do not change what a run means."""

    GROUPS: ClassVar = {
        "speed": (
            "num_threads",
            "num_processes",
            "fsdp",
            "distributed_timeout_minutes",
            "max_hours",
            "compile",
            "share_prompts",
            "fold_adapter",
            "fuse_kernels",
            "deterministic",
        ),
    }

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes a GPU when there is one."""
    gpu_slot: str = "auto"
    """Slot a run holds while it uses the card, so that no two share one: auto has one per card (none on a CPU), shared never
    waits, anything else is the name of a global concurrency limit in Prefect."""
    num_threads: int | None = Field(None, ge=1, le=MOST_PROCESSES)
    """CPU threads of torch; empty: all cores."""
    num_processes: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Processes on this machine that train a stage together, one per card. They share the work of each update, which stays
    per_device_train_batch_size x gradient_accumulation_steps completions: raise gradient_accumulation_steps with them."""
    fsdp: bool = False
    """Spread weights, gradients and optimizer state over the processes (FSDP2), for a model that one card does not hold while it
    trains; off: every process has all of them. Sampling here needs a whole copy of the weights on each card all the same."""
    distributed_timeout_minutes: float = Field(120.0, gt=0.0, le=10_000.0)
    """Longest time in minutes that one of several processes waits for the others before the stage ends with an error (the time
    limit of NCCL and gloo). It has to be longer than the longest round of sampling and rewards."""
    compile: bool = False
    """torch.compile the model's layers for training. The first passes take minutes; it pays in long stages on a GPU."""
    share_prompts: bool = True
    """Encode and store the prompt of a group once, in sampling and in training; off: once for every completion."""
    fold_adapter: bool = True
    """Sample from a copy of the weights with the adapter folded in; off: through the adapter."""
    fuse_kernels: bool = True
    """Decode models of Llama's shape in fewer and larger kernels."""
    deterministic: bool = True
    """Use deterministic kernels, so that the same seed gives the same bytes (always so on CPU)."""
    max_hours: float | None = Field(None, gt=0.0, le=100_000)
    """Longest time in hours that a stage trains in one go: it then writes a checkpoint and stops, and the same command goes on
    from there. Empty: no limit."""
    output_dir: Path = Path("runs")
    """Directory for everything a run writes, besides MLflow."""


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
                raise ValueError(f"stage name {name} is taken; mend: give each stage a name of its own")
        for index, stage in enumerate(self.stages):
            for reward in stage.rewards:
                self._check_reward(f"stages.{index}.rewards", reward)
        for name, reward_config in self.rewards.functions.items():
            function = reward_config.function or name
            if ":" not in function and function not in BUILTIN_REWARDS:
                raise ValueError(
                    f"rewards.functions.{name}: {function} is not built in; mend: one of {', '.join(BUILTIN_REWARDS)}, "
                    "or function: package.module:function"
                )
        if self.rewards.tags.reasoning == self.rewards.tags.answer:
            raise ValueError("rewards.tags: reasoning and answer have the same name; mend: choose two names")
        self._check_addresses()
        vllm, model = self.rollout.vllm, self.model
        if self.rollout.engine == "vllm" and vllm.sync == "adapter" and model.lora is None:
            raise ValueError("rollout.vllm.sync adapter needs one; mend: model.lora: {}, or sync: auto")
        if self.rollout.engine == "vllm" and vllm.sync == "merged" and model.quantization != "none":
            raise ValueError("weights in 4 bits cannot be merged for a server; mend: rollout.vllm.sync: adapter")
        if self.rollout.engine == "vllm" and self.resources.num_processes > 1 and not vllm.base_urls:
            raise ValueError("several processes share servers that run already; mend: rollout.vllm.base_urls: [...]")
        if self.rollout.engine == "vllm" and vllm.overlap:
            self._check_overlap()
        if self.resources.fsdp:
            self._check_shards()
        return self

    def _check_addresses(self) -> None:
        if has_password(self.tracking.tracking_uri or ""):
            raise ValueError(
                "tracking.tracking_uri holds a password, and a config is recorded; mend: leave it empty and export "
                "MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        if any(has_password(address) for address in self.rollout.vllm.base_urls):
            raise ValueError("rollout.vllm.base_urls holds a password, and a config is recorded; mend: export VLLM_API_KEY")
        for flag in ("--host", "--port", "--api-key"):
            if any(given.partition("=")[0] == flag for given in self.rollout.vllm.extra_args):
                raise ValueError(
                    f"rollout.vllm.extra_args: {flag} is not for a server started here, which listens on 127.0.0.1 alone; mend: "
                    "leave it out; a key comes from VLLM_API_KEY, a server for others is started by hand and named in base_urls"
                )
        for place in secrets_in(self.model_dump()):
            raise ValueError(
                f"{place} holds a password, token or key, and a config is recorded; mend: read it from the environment"
            )

    def _check_overlap(self) -> None:
        if self.resources.num_processes > 1:
            raise ValueError("rollout.vllm.overlap is for one process; mend: resources.num_processes: 1, or overlap: false")
        for index, stage in enumerate(self.stages):
            if stage.engine == "native" and stage.importance_sampling_correction == "none":
                raise ValueError(
                    "rollout.vllm.overlap trains on completions of an older policy; "
                    f"mend: stages.{index}.importance_sampling_correction: token_truncate"
                )

    def _check_shards(self) -> None:
        if self.model.quantization != "none":
            raise ValueError("weights in 4 bits cannot be spread over processes; mend: resources.fsdp: false")
        if self.model.dtype == "float16":
            raise ValueError("float16 scales its gradients, which resources.fsdp cannot; mend: model.dtype: bfloat16")
        for index, stage in enumerate(self.stages):
            if stage.optim.endswith("8bit"):
                raise ValueError(f"stages.{index}.optim {stage.optim} cannot be spread by resources.fsdp; mend: adamw_torch")
            if stage.engine != "native":
                raise ValueError(f"stages.{index}.engine {stage.engine} knows no resources.fsdp; mend: engine: native")

    def _check_reward(self, place: str, reward: str) -> None:
        resolved = self.rewards.resolve(reward)
        if resolved is None:
            known = sorted({*BUILTIN_REWARDS, *self.rewards.functions})
            raise ValueError(
                f"{place} names {reward}, which is neither built in nor under rewards.functions; "
                f"mend: one of {', '.join(known)}, or add it with function: package.module:function"
            )
        if resolved.function == "soft_overlong" and not {"max_completion_length", "soft_punish_cache"} <= resolved.params.keys():
            limit = self.rollout.max_completion_length
            raise ValueError(
                f"{place}: {reward} wants two params; mend: rewards.functions.{reward}.params: "
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

"""What an update has to do, as numbers: the shape of the model, and the completions of an update."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from schemas.config.model import LoraConfig, ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.stage import StageConfig
from schemas.errors import ModelError

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Settings of an architecture that has several networks for each layer and uses some of them for a token."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder like Llama's: attention with grouped keys, and a network of three matrices. Biases and norms are left out."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """The embeddings are the output layer too."""

    @classmethod
    def of(cls, architecture: Mapping[str, Any]) -> Self:
        """The shape in the config.json of a model.

        Raises:
            ModelError: the model has another architecture.
        """
        if any(architecture.get(name) for name in EXPERTS):
            raise _unknown("it has several experts for each layer")
        try:
            hidden, heads = int(architecture["hidden_size"]), int(architecture["num_attention_heads"])
            return cls(
                int(architecture["num_hidden_layers"]),
                hidden,
                int(architecture["intermediate_size"]),
                heads,
                int(architecture.get("num_key_value_heads") or heads),
                int(architecture.get("head_dim") or hidden // heads),
                int(architecture["vocab_size"]),
                bool(architecture.get("tie_word_embeddings", False)),
            )
        except (KeyError, TypeError) as error:
            raise _unknown(f"its config does not name {error}") from error

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the matrices of a layer, by the names that LoRA targets."""
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def body(self) -> int:
        """Weights of all layers, without embeddings and output layer."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.matrices.values())

    @property
    def head(self) -> int:
        """Weights of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.body + self.head * (1 if self.tied else 2)

    @property
    def attention(self) -> int:
        """Operations of attention for one token and one token before it, forward: scores and weighted values."""
        return 4 * self.layers * self.heads * self.head_dim

    def lora(self, config: LoraConfig | None) -> int:
        """Weights of an adapter; 0 without one."""
        if config is None:
            return 0
        chosen = self.matrices if config.target_modules == "all-linear" else config.target_modules
        return self.layers * config.r * sum(sum(self.matrices[name]) for name in chosen if name in self.matrices)

    def cache(self, width: float) -> float:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.key_heads * self.head_dim * width


@dataclass(frozen=True, slots=True)
class Workload:
    """One update of a stage."""

    shape: Shape
    trained: int
    """Weights that are trained."""
    full: bool
    """All weights are trained, not an adapter."""
    width: float
    """Bytes of a frozen weight, and of an element of the key-value cache."""
    completions: int
    """Completions that an update trains on."""
    group_size: int
    rollout_updates: int
    """Updates that train on a rollout, each on its own completions."""
    iterations: int
    """How often a rollout is trained on."""
    prompt_tokens: int
    completion_tokens: int
    """Mean length of a completion."""
    longest_tokens: int
    """Length of the longest completion of a rollout."""
    forwards: float
    """Forward passes of an update for each backward pass, those of checkpointing and reference among them."""
    pass_rows: int
    """The most completions of a pass."""
    rows_at_once: int
    """The most completions that one sampler decodes at once."""
    sampler_memory: float
    """Share of a card's memory that a replica uses."""
    tensor_parallel: int
    served: bool
    """Replicas sample (engine vllm), not the processes that train."""
    merged: bool
    """Replicas get all weights, not the adapter."""
    fsdp: bool
    max_staleness: int
    save_steps: int

    @property
    def prompts(self) -> int:
        """Prompts of a rollout."""
        return self.completions * self.rollout_updates // self.group_size

    @property
    def weight_bytes(self) -> float:
        """Bytes of the model as it is sampled from."""
        return self.shape.parameters * self.width

    @property
    def sync_bytes(self) -> float:
        """Bytes that a replica gets after an update: an adapter in float32, or all weights."""
        return self.weight_bytes if self.merged else 4.0 * self.trained

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients, which are float32."""
        return 4.0 * self.trained

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of a checkpoint: trained weights and the two moments of the optimizer."""
        return 12.0 * self.trained


def workload(
    architecture: Mapping[str, Any],
    model: ModelConfig,
    rollout: RolloutConfig,
    stage: StageConfig,
    *,
    prompt_tokens: int,
    mean_tokens: int | None = None,
    pass_tokens: int,
    fsdp: bool = False,
) -> Workload:
    """An update of a stage.

    Args:
        architecture: contents of the model's config.json.
        model: section of the config.
        rollout: section of the config.
        stage: section of the config.
        prompt_tokens: length of the prompts.
        mean_tokens: mean length of the completions; None takes the longest.
        pass_tokens: the most tokens of a pass, for `max_tokens_per_microbatch: auto`.
        fsdp: weights, gradients and optimizer are sharded over the processes that train.

    Raises:
        ModelError: the model is none that this knows.
    """
    shape, longest, group = Shape.of(architecture), rollout.max_completion_length, stage.num_generations
    mean = min(mean_tokens or longest, longest)
    limit = pass_tokens if stage.max_tokens_per_microbatch == "auto" else stage.max_tokens_per_microbatch
    rows = stage.per_device_train_batch_size if limit is None else max(1, int(limit / (mean + prompt_tokens / group)))
    served = rollout.engine == "vllm"
    return Workload(
        shape=shape,
        trained=shape.lora(model.lora) if model.lora is not None else shape.parameters,
        full=model.lora is None,
        width=4.0 if model.dtype == "float32" else 2.0,
        completions=stage.completions_per_update,
        group_size=group,
        rollout_updates=stage.updates_per_rollout // stage.num_iterations,
        iterations=stage.num_iterations,
        prompt_tokens=prompt_tokens,
        completion_tokens=mean,
        longest_tokens=longest,
        forwards=_forwards(model, stage),
        pass_rows=rows,
        rows_at_once=rollout.vllm.concurrency * group if served else rollout.max_batch_size,
        sampler_memory=rollout.vllm.gpu_memory_utilization,
        tensor_parallel=rollout.vllm.tensor_parallel_size if served else 1,
        served=served,
        merged=model.lora is None or rollout.vllm.sync == "merged",
        fsdp=fsdp,
        max_staleness=rollout.max_staleness // stage.updates_per_rollout,
        save_steps=stage.save_steps,
    )


def _forwards(model: ModelConfig, stage: StageConfig) -> float:
    forwards = 1.0 + model.gradient_checkpointing + (stage.top_entropy_quantile < 1)
    if stage.updates_per_rollout > 1:
        forwards += 1 / stage.num_iterations
    if stage.beta > 0:
        return forwards + 1
    return forwards + (1 / stage.kl_every_steps if stage.kl_every_steps and model.lora is not None else 0.0)


def _unknown(why: str) -> ModelError:
    return ModelError(
        f"the time of an update cannot be calculated for this model: {why}",
        place="model.path",
        fix="leave --nodes out: memory alone is calculated for every model",
    )

"""The memory that a stage needs on a GPU, by calculation: what stands all the time, then the larger of sampling and an update.

Sampling holds the keys and values of all rows that are decoded at once, and their logits. An update is one forward and backward
pass, counted on the meta device in groups of the longest prompts and completions. Its peak is either in the head, whose chunks
of logits have one size, or in the backward pass of a layer, whatever the size of the pass:

    bytes   head     kept for the backward pass + chunks of logits        the larger one up to some thousand tokens
            layers   kept for the backward pass + gradients of a layer    the larger one above

Both grow with the tokens and else depend on little, so two counted passes give the two lines, and these every other pass. A pass
that predicts fewer tokens than a chunk of logits has takes less: where a single completion does, a third one is counted.
Nothing here has been measured on a GPU: RESERVE stands for what a calculation cannot see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from grpo_tasks.planning.live_memory import MASKED, LiveMemory, cuda_kernels
from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model, decoder_of
from grpo_tasks.policy.load import load_errors, new_policy
from grpo_tasks.policy.logprobs import OwnHead, chunk_rows, completion_logprobs
from grpo_tasks.policy.recurrent_layers import state_bytes
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.errors import ModelError
from schemas.paths import resolve

GIB = 2**30
RESERVE = 1.5 * 2**30
"""Bytes of a card left free: the CUDA context, the libraries' workspaces and what the allocator cannot use."""
OPTIMIZER_BYTES = {"adamw_torch": 8.0, "adamw_torch_fused": 8.0, "adamw_8bit": 2.0, "paged_adamw_8bit": 0.0}
"""Bytes per trained weight of the two moments; a paged optimizer keeps them in the memory of the host."""
NF4_BYTES = 0.5 + 4 / 64
"""Bytes per 4-bit weight: half a byte, and a float32 scale for each 64 weights."""
LOGIT_BYTES, CHANGED_LOGIT_BYTES, NUCLEUS_BYTES = 18.0, 23.0, 43.0
"""Bytes of a step per row and token of the vocabulary: logits as the model gives them and in float32, probabilities, and what
torch's sum makes of these in float64; with the copies that `top_k`, `min_p` or `repetition_penalty` make; and with those that
`top_p` sorts (rollout/decoding_loop.py)."""
GRAPHS, GRAPH_LAYER_BYTES = 8, 2.0**20
"""Captured graphs at most (rollout/graphs.py), and what the driver keeps for a layer of each, outside of torch's allocator. An
estimate: CUDA documents no number, and vLLM's logs show 24 to 28 MiB a graph (its pull request 22897 and issue 50780)."""
SMALL_SHARE = 1 / 64
"""Of keys and values: what a step reads besides, such as random numbers and the places of rows."""
KEPT_SHARE = 1 / 16
"""The local engine keeps what it samples with during an update where that is at most this share of the card. To capture its graph
again takes a tenth of a second for each rollout; on a small card, passes that are smaller for it would take longer."""


COUNTED_TOKENS = 32_768
"""Tokens of the smaller counted pass, about; the other one has twice as many. Both have more than a few chunks of the head, so
that a chunk is part of what is fixed, and so many that the gradient of trained embeddings is small against their layers."""

_PEAKS: dict[tuple[object, ...], "Peaks"] = {}
"""By architecture, model settings and shape of the groups."""

META = torch.device("meta")
SERVER = "vLLM server"
"""The item of a server that shares the card, awake."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a plan."""

    what: str
    bytes: float


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes that grow with the tokens of a pass."""

    fixed: float
    slope: float

    @classmethod
    def through(cls, one: tuple[float, float], two: tuple[float, float]) -> "Line":
        """The line through two points (tokens, bytes)."""
        slope = (two[1] - one[1]) / (two[0] - one[0])
        return cls(one[1] - slope * one[0], slope)

    def at(self, tokens: float) -> float:
        """Bytes of so many tokens."""
        return self.fixed + self.slope * tokens

    def within(self, size: float) -> float:
        """Tokens of so many bytes."""
        return (size - self.fixed) / self.slope


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes of a pass at its peaks, by its tokens."""

    head: tuple[Line, ...]
    """With full chunks of logits, and with fewer rows than a chunk has; the smaller one counts."""
    layers: Line

    def at(self, tokens: int) -> float:
        """Bytes of so many tokens."""
        return max(min(line.at(tokens) for line in self.head), self.layers.at(tokens))

    def within(self, size: float) -> float:
        """Tokens of so many bytes."""
        return min(max(line.within(size) for line in self.head), self.layers.within(size))


@dataclass(frozen=True)
class StagePlan:
    """What one process of a stage needs on its GPU."""

    reserve: ClassVar[float] = RESERVE
    model: ModelConfig
    rollout: RolloutConfig
    stage: StageConfig
    resources: ResourcesConfig
    architecture: PreTrainedConfig
    prompt_length: int
    """Longest prompt in tokens."""
    memory: float
    """Bytes of the GPU."""
    taken: float = 0.0
    """Of these, what others hold: other processes, the CUDA context. 0: not known, RESERVE stands for it."""
    turn_length: int | None = None
    """Tokens of one turn where completions are conversations, and their length that of all turns."""
    _policy: CausalLM = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_policy", meta_policy(self.architecture, self.model))

    @cached_property
    def standing(self) -> list[Item]:
        """What is there all the time. Bytes, as everywhere here."""
        policy, shards, width = self._policy, self._shards, _width(self.model.dtype)
        frozen = [parameter for parameter in policy.parameters() if not parameter.requires_grad]
        complete = sum(parameter.numel() for parameter in policy.parameters())
        trained = complete - sum(parameter.numel() for parameter in frozen)
        sizes = {
            "frozen weights": self._frozen_bytes(frozen) / shards,
            "trained weights": trained * 4.0 / shards,
            "gradients": trained * 4.0 / shards,
            "optimizer": trained * OPTIMIZER_BYTES[self.stage.optim] / shards,
            "gathered weights": self._gathered() if shards > 1 else 0,
            "copy to sample from": self._copied() * self._sampled_width if self.rollout.engine == "local" else 0,
            "reference model": complete * width if not isinstance(policy, PeftModel) and self.stage.has_kl_term else 0,
            SERVER: self.rollout.vllm.gpu_memory_utilization * self.memory if self._shares_card else 0,
        }
        return [Item(what, size) for what, size in sizes.items() if size]

    @cached_property
    def sampling(self) -> list[Item]:
        """What the local engine needs in addition while it samples; nothing where servers sample."""
        if self.rollout.engine == "vllm":
            return []
        config = self.architecture.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        token = 2 * self._key_layers * key_heads * head_dim * self._sampled_width
        steps = self.stage.steps_per_generation or self.stage.gradient_accumulation_steps
        round_size = self.stage.per_device_train_batch_size * steps // self.resources.ranks
        rows = max(1, min(self.rollout.max_batch_size, round_size))
        prompts, own = -(-rows // self.stage.num_generations), rows * self.rollout.max_completion_length
        # Contexts are padded: a few of them to 512 tokens, and many by half at most (`Buckets.context` of decoding_loop.py).
        contexts = max(1.5 * prompts * self.prompt_length, min(512 * prompts, own / 4))
        encoded = 0
        if self.turn_length is not None:
            # From the second turn on each row has a context of its own. All are as wide as the longest one, and they are encoded
            # in addition to those of the turn before.
            encoded = rows * (self.prompt_length + self.rollout.max_completion_length)
            own, contexts = rows * self.turn_length, 1.5 * encoded
        seen = rows * config.vocab_size if self.rollout.repetition_penalty != 1.0 else 0
        states = rows * state_bytes(self._policy)
        return [
            Item(f"keys and values of {rows} rows", (own + contexts) * token * (1 + SMALL_SHARE) + seen + states),
            Item("logits of a decoding step", _logit_bytes(self.rollout) * rows * config.vocab_size),
            Item(f"at most {GRAPHS} captured graphs", GRAPHS * config.num_hidden_layers * GRAPH_LAYER_BYTES),
            *([Item("contexts of the next turn", encoded * token)] if encoded else []),
        ]

    @property
    def kept(self) -> float:
        """Of what sampling needs, the bytes that stay during an update: all or nothing."""
        needed = sum(item.bytes for item in self.sampling)
        return needed if needed <= KEPT_SHARE * self.memory else 0.0

    @property
    def kept_values(self) -> float:
        """Of these, keys and values: the engine knows the size of nothing else (`Graphs.num_bytes`)."""
        return self.sampling[0].bytes if self.kept else 0.0

    @property
    def available(self) -> float:
        """What a pass may use."""
        return self.memory - self.taken - RESERVE - self.kept - sum(item.bytes for item in self.standing)

    def update(self, tokens: int) -> float:
        """Of a pass of that many tokens, logits included."""
        return self._peaks.at(tokens)

    @cached_property
    def fitting_tokens(self) -> int:
        """Most tokens of a pass; 0 if not even one completion of full length fits."""
        tokens = self.tokens_within()
        return tokens if tokens >= self.prompt_length + self.rollout.max_completion_length else 0

    def tokens_within(self, factor: float = 1.0) -> int:
        """Most tokens of a pass that takes `factor` times the calculated bytes."""
        return int(self._peaks.within(self.available / factor))

    @property
    def pass_tokens(self) -> int:
        """The most tokens that a pass of this stage has."""
        completion, limit = self.rollout.max_completion_length, self.stage.max_tokens_per_microbatch
        count = self.stage.per_device_train_batch_size
        whole = count * completion + -(-count // self.stage.num_generations) * self.prompt_length
        if limit is None:
            return whole
        total = self.stage.completions_per_update // max(1, self.resources.ranks)
        most = total * completion + -(-total // self.stage.num_generations) * self.prompt_length
        if limit == "auto":
            return min(most, self.fitting_tokens)
        return min(most, max(limit, self.prompt_length + completion))

    @property
    def needed(self) -> float:
        """At the peak of the stage, RESERVE included."""
        most = max(self.kept + self.update(self.pass_tokens), sum(item.bytes for item in self.sampling))
        return RESERVE + sum(item.bytes for item in self.standing) + most

    @property
    def sampling_fits(self) -> bool:
        """True if there is room for sampling."""
        return sum(item.bytes for item in self.sampling) <= self.available + self.kept

    @property
    def fits(self) -> bool:
        """True if the GPU has that much memory."""
        return self.needed <= self.memory - self.taken and self.pass_tokens > 0

    def with_checkpointing(self) -> "StagePlan":
        """The plan with gradient checkpointing."""
        return replace(self, model=self.model.model_copy(update={"gradient_checkpointing": True}))

    @property
    def _peaks(self) -> Peaks:
        length, prompt = self.rollout.max_completion_length, self.prompt_length
        # Very long completions are counted in smaller groups.
        size = min(self.stage.num_generations, max(1, COUNTED_TOKENS // length))
        entropies = self.stage.entropy_coef > 0
        # Stages of a run differ in other things, and counting takes seconds.
        key = self.architecture.to_json_string(), self.model.model_dump_json(), prompt, size, length, entropies
        if key not in _PEAKS:

            def counted(groups: Groups) -> PassCounts:
                return count_pass(self._policy, groups, entropy_gradients=entropies)

            prompts = max(1, COUNTED_TOKENS // (prompt + size * length))
            one, two = (counted(Groups.equal(times * prompts, prompt, size, length)) for times in (1, 2))
            head = [Line.through((one.tokens, one.head), (two.tokens, two.head))]
            rows = chunk_rows(OwnHead(self._policy).out_features, META)
            if 1 < length < rows:
                alone = counted(Groups.equal(1, prompt, 1, length))
                # A chunk is full with so many tokens of one prompt. The last token of a completion predicts nothing.
                full = prompt + rows * (length - 1) / length
                head.append(Line.through((alone.tokens, alone.head), (full, head[0].at(full))))
            _PEAKS[key] = Peaks(tuple(head), Line.through((one.tokens, one.layers), (two.tokens, two.layers)))
        return _PEAKS[key]

    @property
    def _shards(self) -> int:
        return self.resources.ranks if self.resources.fsdp else 1

    @property
    def _sampled_width(self) -> float:
        # Full fine-tuning keeps its weights in float32, and the local engine samples with them (policy/load.py).
        return 4.0 if self.model.lora is None else _width(self.model.dtype)

    @property
    def _shares_card(self) -> bool:
        vllm = self.rollout.vllm
        if self.rollout.engine != "vllm" or vllm.sleep or vllm.devices or vllm.base_urls:
            return False
        # On a cluster each server reserves cards of its own (cluster/placement.py).
        if self.resources.cluster.engine == "ray":
            return False
        # One server has the card of the trainer, several have the last ones of the machine (rollout/vllm_server.py). Only if that
        # is all of them, the first one is among them. A machine without cards plans for one that has enough.
        return vllm.replicas == 1 or torch.cuda.device_count() == vllm.replicas * vllm.tensor_parallel_size

    @property
    def _key_layers(self) -> int:
        # Layers with a state of their own have none. All attention of transformers says whether it is causal, but for BLOOM's.
        found = {
            module.layer_idx for module in self._policy.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")
        }
        return len(found) or int(self.architecture.get_text_config().num_hidden_layers)

    def _gathered(self) -> float:
        """What a sharded model holds complete at once (policy/sharded.py): all outside the layers, and of the layers three."""
        causal, width = causal_model(self._policy), _width(self.model.dtype)

        def size(unit: nn.Module) -> float:
            # The gradients of trained weights are complete until the processes have added them up.
            return sum(each.numel() * (2 * 4.0 if each.requires_grad else width) for each in unit.parameters())

        layers = [size(module) for module in causal.modules() if type(module).__name__ in (causal._no_split_modules or ())]
        # The present one, the one that is fetched next and the one that is sent last.
        return size(causal) - sum(layers) + sum(sorted(layers)[-3:])

    def _frozen_bytes(self, frozen: list[nn.Parameter]) -> float:
        width = _width(self.model.dtype)
        if self.model.quantization == "none":
            return sum(parameter.numel() for parameter in frozen) * width
        linear = {id(module.weight) for module in self._policy.modules() if isinstance(module, nn.Linear)}
        head = id(self._policy.get_output_embeddings().weight)
        return sum(p.numel() * (NF4_BYTES if id(p) in linear and id(p) != head else width) for p in frozen)

    def _copied(self) -> int:
        """Weights that the local engine has a second time."""
        # Fused kernels read some projections as one (rollout/fused_decoder.py): adapted or not, they get a copy of their own.
        if self._shards > 1:
            return sum(parameter.numel() for parameter in self._policy.parameters())
        if not self.resources.fold_adapter or self.model.quantization != "none" or not isinstance(self._policy, PeftModel):
            return 0
        fused = _fused(self._policy) if self.resources.fuse_kernels and self.resources.share_prompts else []
        known = {id(layer) for stack in fused for layer in stack}
        alone = [[module] for module in self._policy.modules() if isinstance(module, LoraLinear) and id(module) not in known]
        return sum(self._copied_of(stack, fused=True) for stack in fused) + sum(self._copied_of(stack) for stack in alone)

    def _copied_of(self, stack: Sequence[Any], *, fused: bool = False) -> int:
        # Of projections with one input: W + B A in float32, else A and B, and W only where it is fused.
        bases = [layer.base_layer if isinstance(layer, LoraLinear) else layer for layer in stack]
        # Fused queries, keys and values leave room for a second result of the size of the keys, the second of the three.
        shapes = [tuple(base.weight.shape) for base in [*bases, *(bases[1:2] if len(bases) > 2 else [])]]
        rows, width = sum(shape[0] for shape in shapes), shapes[0][1]
        folded = self.model.dtype == "float32"
        ranks = [layer.r[name] for layer in stack if isinstance(layer, LoraLinear) for name in layer.active_adapters]
        return (rows * width if folded or fused else 0) + (0 if folded else sum(ranks) * (rows + width))


def _logit_bytes(rollout: RolloutConfig) -> float:
    if rollout.top_p < 1.0:
        return NUCLEUS_BYTES
    changed = rollout.top_k or rollout.min_p or rollout.repetition_penalty != 1.0
    return CHANGED_LOGIT_BYTES if changed else LOGIT_BYTES


def _fused(policy: CausalLM) -> list[list[nn.Module]]:
    # The projections of each layer that fused kernels read as one; none in a model of another shape.
    causal: Any = causal_model(policy)
    if getattr(causal.config, "hidden_act", None) != "silu":
        return []
    try:
        layers = [(layer.self_attn, layer.mlp) for layer in getattr(causal, causal.base_model_prefix).layers]
        attention = [[one.v_proj, one.k_proj, one.q_proj] for one, _ in layers]
        return attention + [[mlp.gate_proj, mlp.up_proj] for _, mlp in layers]
    except AttributeError:
        return []


def stage_plans(settings: RunConfig, memory: float) -> list[StagePlan]:
    """The plan of each stage of a run on GPUs with so many bytes; of the model only the config is read, else ModelError."""
    model = settings.model
    if model.dtype == "auto":
        # Not what this machine would take: the plan is for cards.
        model = model.model_copy(update={"dtype": "bfloat16"})
    with load_errors("the config of the model", f"model.path: {model.path}"):
        architecture = AutoConfig.from_pretrained(resolve(model.path), revision=model.revision)
    length = settings.interaction.longest_prompt(settings.validation.max_prompt_length)
    rollout = settings.rollout.model_copy(update={"max_completion_length": settings.interaction.longest(settings.rollout)})
    turn = settings.rollout.max_completion_length if settings.interaction.active else None
    return [
        StagePlan(model, rollout, stage, settings.resources, architecture, length, memory, turn_length=turn)
        for stage in settings.stages
    ]


def _width(dtype: str) -> float:
    return 4.0 if dtype == "float32" else 2.0


def tokens_that_fit(plan: StagePlan) -> int:
    """Of a pass for `max_tokens_per_microbatch: auto`; ModelError where not even one completion of full length fits."""
    if not plan.fitting_tokens:
        raise does_not_fit(plan)
    return plan.fitting_tokens


def does_not_fit(plan: StagePlan) -> ModelError:
    """For a stage whose pass does not fit, however small."""
    others = f", of which {plan.taken / GIB:.1f} GiB are taken by others" if plan.taken else ""
    free = "a card that nothing else uses (nvidia-smi shows what does), " if plan.taken else ""
    return ModelError(
        f"one completion of {plan.rollout.max_completion_length} tokens with a prompt of {plan.prompt_length} does not fit into "
        f"{plan.memory / GIB:.0f} GiB{others}",
        place=f"stage {plan.stage.name}",
        fix=f"{free}model.gradient_checkpointing: true, a shorter rollout.max_completion_length, or quantization: nf4",
    )


@dataclass(frozen=True, slots=True)
class Groups:
    """Lengths of prompts, and of the completions of each."""

    prompts: Sequence[int]
    completions: Sequence[Sequence[int]]

    @classmethod
    def equal(cls, prompts: int, prompt_length: int, group_size: int, completion_length: int) -> "Groups":
        """Groups of one shape."""
        return cls([prompt_length] * prompts, [[completion_length] * group_size] * prompts)

    @property
    def tokens(self) -> int:
        """Tokens that count: the prompts once, and each completion without its last token, which predicts nothing."""
        return sum(self.prompts) + sum(length - 1 for group in self.completions for length in group)


@dataclass(frozen=True, slots=True)
class PassCounts:
    """What one pass needs on CUDA, beyond the weights."""

    tokens: int
    """Tokens that went through the model, padding included."""
    saved: int
    """Bytes kept for the backward pass, gradient of the head included."""
    head: int
    """The most bytes that lived at once while the head computed scores and gradients, the latter's sum not included."""
    layers: int
    """The same while the layers computed, in the forward or in the backward pass."""
    kernels: int
    """Operations that are no views, forward and backward."""
    attention: Mapping[str, int]
    """Calls in the forward passes by kernel (`AttentionCalls`)."""

    @property
    def peak(self) -> int:
        """The most bytes that lived at once, besides the gradients."""
        return max(self.head, self.layers)

    @property
    def masks(self) -> int:
        """Attention calls with a dense mask."""
        return sum(count for kernel, count in self.attention.items() if kernel.endswith(MASKED))


def meta_policy(architecture: PreTrainedConfig, config: ModelConfig) -> CausalLM:
    """A policy in training mode, without numbers; quantization is ignored."""
    with META:
        dtype = getattr(torch, config.dtype)
        base = AutoModelForCausalLM.from_config(architecture, dtype=dtype, attn_implementation=config.attn_implementation)
        return new_policy(base.requires_grad_(False), config).train()


def count_pass(policy: CausalLM, groups: Groups, *, entropy_gradients: bool = False) -> PassCounts:
    """Run a pass on the meta device, with the kernels of CUDA; RuntimeError where the code waits for a number of the device.

    With `entropy_gradients` the entropies have gradients too, as in a stage with an entropy bonus.
    """
    lengths = [length for group in groups.completions for length in group]
    # Different from the first token on: completions that begin alike would have less to compute.
    completions = [[index] * length for index, length in enumerate(lengths)]
    prompt_of = [prompt for prompt, group in enumerate(groups.completions) for _ in group]
    batch = token_batch([[0] * length for length in groups.prompts], completions, prompt_of, device=META)
    for parameter in policy.parameters():
        # As in every pass after the first one of an update: gradients are there, and each new one is added to them.
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    through: list[int] = []
    head, layers = [0], [0]

    def ends(part: list[int]) -> None:
        part.append(memory.peak)
        memory.peak = memory.now

    def begin_head(_: nn.Module, __: Any, out: Any) -> None:
        ends(layers)
        if out.last_hidden_state.requires_grad:
            # Its gradient is complete: the head is done, and the layers follow.
            out.last_hidden_state.register_hook(lambda _: ends(head))

    embeddings = causal_model(policy).get_input_embeddings()
    watches = [
        embeddings.register_forward_pre_hook(lambda _, given: through.append(given[0].numel())),
        decoder_of(policy).register_forward_hook(begin_head),
    ]
    try:
        with cuda_kernels() as calls, LiveMemory() as memory:
            scores = completion_logprobs(policy, batch, temperature=1.0, entropy_gradients=entropy_gradients)
            saved = memory.now
            (scores.logps + scores.entropies if entropy_gradients else scores.logps).sum().backward()
            ends(layers)
    finally:
        for watch in watches:
            watch.remove()
    return PassCounts(sum(through), saved, max(head), max(layers), memory.kernels, calls.found)

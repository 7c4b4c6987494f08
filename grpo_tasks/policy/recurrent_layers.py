"""Which layers of a model have a state of their own, and how they take part in a pass with a `shared_prompt`.

A mixer is found by what it can do and not by its name: it has a number among the layers and a depthwise convolution, and its
forward pass takes a cache. Its class is replaced by one that hands the pass to `shared_prompt.recur` (attention/recurrent.py) and
is the old one without a shared prompt. What a mixer of a new kind then computes is compared with the model's own forward pass
before it is used, like everything else (forward_check.py). That shows values only, and a kernel may return the right state
without a gradient; so the trainer compares gradients too (`lost_gradient`).
"""

import inspect
from collections.abc import Callable, Container
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from grpo_tasks.attention.packed_attention import PackedAttention
from grpo_tasks.attention.recurrent import RecurrentStates, mix_prompts
from grpo_tasks.attention.shared_prompt import Mixer, PackedRow, SharedPrompt, no_mask, use_shared_prompts
from grpo_tasks.policy.batch import TokenBatch, position_ids
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model, decoder_of
from grpo_tasks.policy.lean_layers import published_class, subclass_of
from grpo_tasks.policy.sharded import forward_pass

SCAN = "mamba_selective_scan"
"""What transformers calls the scan of Mamba 1, in every model that has it."""

GRADIENT_TOLERANCE = 0.1
"""Largest difference of the gradient at a token of a prompt, as a share of its norm. Rounding in 16 bits explains 0.02. Where a
state has lost its gradient, the tokens before the reach of the convolution get none, and the share is 1."""
FAINT = 1e-4
"""Gradients below this share of the largest one at a token are rounding."""

_DONE = "_mixers_share_prompts"
"""Attribute of a model whose mixers have been found. A copy of the model has it, and their classes and hooks."""


def share_prompts(model: CausalLM) -> None:
    """Let attention and mixers of a model follow the `shared_prompt` of a pass from now on, in place; as before without one."""
    use_shared_prompts(causal_model(model))
    find_mixers(model)


def find_mixers(model: CausalLM) -> None:
    """Let the mixers alone follow it; `recurrent_layers` has them then."""
    causal = causal_model(model)
    if getattr(causal, _DONE, False):
        return  # each pass begins here, and a walk through all modules costs as much as a layer of a small model
    setattr(causal, _DONE, True)
    for parent in list(causal.modules()):
        found = [child for child in parent.children() if not isinstance(child, RecurrentLayer) and _is_mixer(child)]
        for mixer in found:
            mixer.__class__ = subclass_of(type(mixer), RecurrentLayer, cache_argument=_cache_argument(type(mixer)))
        if found:
            # Hooks of the layer around the mixer, because only some hand their arguments on. With gradient checkpointing the
            # layer runs again in the backward pass, and so do they.
            parent.register_forward_pre_hook(_begin, with_kwargs=True)
            parent.register_forward_hook(_end, always_call=True)


def _cache_argument(kind: type[nn.Module]) -> str | None:
    """The name of the argument that takes the cache; None for a class without one, or without a mask."""
    names = inspect.signature(kind.forward).parameters
    found = [name for name in ("cache_params", "past_key_values") if name in names]
    return found[0] if found and "attention_mask" in names else None


def _is_mixer(module: nn.Module) -> bool:
    if not hasattr(module, "layer_idx") or _cache_argument(type(module)) is None:
        return False
    return any(isinstance(child, nn.Conv1d) and child.groups == child.in_channels > 1 for child in module.children())


def mixer_kernels(model: CausalLM) -> str:
    """By which packages the layers with a state compute, for people; empty for a model without such layers."""
    found: dict[str, set[str]] = {}
    for module in causal_model(model).modules():
        if not isinstance(module, RecurrentLayer) and not _is_mixer(module):
            continue
        kind: Any = published_class(module)
        mixer = inspect.unwrap(kind.forward)
        for name in mixer.__code__.co_names:
            function = mixer.__globals__.get(name)
            # transformers chooses between a package and torch when it is imported, and keeps its choice in a closure.
            kept = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
            if "is_new_implementation" in kept:
                package = kept["package"] if kept["is_new_implementation"] else f"torch, without {kept['package']}"
                found.setdefault(package, set()).add(kept["func_name"])
    return "; ".join(f"{', '.join(sorted(names))} by {package}" for package, names in sorted(found.items()))


def recurrent_layers(model: CausalLM) -> "dict[int, RecurrentLayer]":
    """The mixers of a model that `find_mixers` has found, by their numbers among the layers."""
    return {module.layer_idx: module for module in causal_model(model).modules() if isinstance(module, RecurrentLayer)}


@torch.no_grad()
def state_bytes(model: CausalLM) -> int:
    """Bytes of the states of one row, of all layers; works on a model without weights."""
    share_prompts(model)
    total, width = 0, causal_model(model).config.get_text_config().hidden_size
    for mixer in recurrent_layers(model).values():
        states, module = RecurrentStates(), cast(nn.Module, mixer)
        weight = next(module.parameters())
        module(weight.new_zeros(1, 2, width), **{mixer.cache_argument: states})
        total += sum(state.nbytes for state in (*states.conv_states.values(), *states.recurrent_states.values()))
    return total


class Contexts(PackedAttention):
    """Takes what decoding continues from out of a pass over a packed row of contexts: prompts without their last token."""

    def __init__(self, row: PackedRow) -> None:
        # The hidden states after the last layer are not read; one is computed, because none at all is a shape of its own.
        super().__init__(row, torch.zeros(1, dtype=torch.long, device=row.device), last_layer=-1)
        self.keys: dict[int, Float[Tensor, "P K S _"]] = {}
        """Of each layer with attention, padded on the right."""
        self.values: dict[int, Float[Tensor, "P K S _"]] = {}
        self.states: dict[int, RecurrentStates] = {}
        """Of each layer with a state, at the end of each context."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        """See `SharedPrompt`."""
        # Decoding reads them at every step, so they are brought into its order once.
        self.keys[layer], self.values[layer] = (self.row.prompts.read(given).contiguous() for given in (key, value))
        return super().attend(layer, query, key, value, scale, window)

    def recur(self, layer: int, mixer: Mixer, hidden: Float[Tensor, "1 L H"]) -> Float[Tensor, "1 L H"]:
        """See `SharedPrompt`."""
        outputs, self.states[layer] = mix_prompts(self.beginnings, mixer, hidden[0])
        return outputs[None]


def encode_contexts(model: CausalLM, batch: TokenBatch) -> Contexts:
    """Keys, values and states of each prompt without its last token, computed as one row."""
    share_prompts(model)
    ids, mask, lengths = batch.context_ids, batch.context_mask, [length - 1 for length in batch.packed.stem_lengths]
    nothing = not any(lengths)
    if nothing:
        # No model takes a row without tokens, so that of each prompt stands in for its context. Its keys lie behind the length 0.
        ids, mask, lengths = batch.prompt_ids, batch.prompt_mask, list(batch.packed.stem_lengths)
    contexts = Contexts(PackedRow(lengths, [], [], mask.device))
    decoder_of(model)(
        input_ids=ids[mask][None],
        position_ids=position_ids(mask)[mask][None],
        attention_mask=no_mask(mask.device),
        use_cache=False,
        shared_prompt=contexts,
    )
    if nothing:
        contexts.states = {layer: states.begin(torch.zeros_like) for layer, states in contexts.states.items()}
    return contexts


class GradientCheck(PackedAttention):
    """Compares the gradient that completions send to their prompts through a state with that of rows which carry none."""

    def __init__(self, row: PackedRow, layers: Container[int]) -> None:
        # As of `Contexts`: nobody reads what comes after the last layer.
        super().__init__(row, torch.zeros(1, dtype=torch.long, device=row.device), last_layer=-1)
        self.layers = layers
        self.wrong: list[int] = []
        """Those of the layers whose gradient differs."""

    def recur(self, layer: int, mixer: Mixer, hidden: Float[Tensor, "1 L H"]) -> Float[Tensor, "1 L H"]:
        """See `SharedPrompt`."""
        if layer not in self.layers:
            return super().recur(layer, mixer, hidden)
        row, inputs = self.row, hidden.detach().requires_grad_()
        end = sum(row.prompt_lengths)
        with torch.enable_grad():
            mixed = super().recur(layer, mixer, inputs)
            prompts, owns = inputs[0, :end].split(row.prompt_lengths), inputs[0, end:].split(row.own_lengths)
            alone = [
                mixer(torch.cat([prompts[prompt], own])[None], RecurrentStates(), None)[0, -len(own) :]
                for prompt, own in zip(row.prompts_of, owns, strict=True)
            ]
            slopes = torch.randn(mixed[0, end:].shape, generator=torch.Generator().manual_seed(0)).to(mixed)
            found, true = (torch.autograd.grad(out, inputs, slopes)[0][0, :end] for out in (mixed[0, end:], torch.cat(alone)))
        off, size = (found.float() - true.float()).norm(dim=-1), true.float().norm(dim=-1)  # [S] of all prompts
        # Not `>`, which is false of nan.
        if not (off <= GRADIENT_TOLERANCE * (size + FAINT * size.max())).all():
            self.wrong.append(layer)
        return mixed.detach()


@torch.no_grad()
def lost_gradient(model: CausalLM, batch: TokenBatch) -> str | None:
    """What is wrong with the gradients through the states at the ends of prompts; None if nothing, or without such layers.

    Of one layer of each class, not of the complete model: there, a lost state may take away less than rounding in 16 bits does.
    """
    mixers = recurrent_layers(model)
    first = {type(mixer): layer for layer, mixer in reversed(mixers.items())}
    if not first:
        return None
    packed = batch.packed
    row = PackedRow(packed.stem_lengths, packed.own_lengths, packed.stem_of, packed.ids.device)
    check = GradientCheck(row, first.values())
    inputs = {"input_ids": packed.ids, "position_ids": packed.positions, "attention_mask": no_mask(packed.ids.device)}
    forward_pass(model, lambda: decoder_of(model)(**inputs, use_cache=False, shared_prompt=check))
    names = [published_class(cast(nn.Module, mixers[layer])).__name__ for layer in check.wrong]
    return f"{', '.join(names)} loses gradients at the end of a prompt" if names else None


# The compiler would compile the layer again for each pass, whose index tensors differ.
@torch.compiler.disable
def _begin(layer: nn.Module, _: tuple[Any, ...], options: dict[str, Any]) -> None:
    _hand_over(layer, options.get("shared_prompt"))


@torch.compiler.disable
def _end(layer: nn.Module, *_: Any) -> None:
    _hand_over(layer, None)


def _hand_over(layer: nn.Module, shared_prompt: SharedPrompt | None) -> None:
    for child in layer.children():
        if isinstance(child, RecurrentLayer):
            child.shared_prompt = shared_prompt


class RecurrentLayer:
    """A mixer that reads its prompt's state."""

    shared_prompt: SharedPrompt | None = None
    layer_idx: int
    cache_argument: str

    @torch.compiler.disable
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The mixer of tokens [N, T, H]; with a shared prompt their order and their states are its own."""
        own = super().forward  # type: ignore[misc]
        if self.shared_prompt is None:
            alone: Tensor = own(hidden_states, *args, **kwargs)
            return alone
        mixed: Tensor = self.shared_prompt.recur(self.layer_idx, partial(_mix, own, self.cache_argument), hidden_states)
        return mixed


def _mix(forward: Any, name: str, rows: Tensor, states: RecurrentStates, mask: Tensor | None) -> Tensor:
    function = inspect.unwrap(forward.__func__)
    if SCAN in function.__code__.co_names:
        # The mixer as it is, but for the meaning of one name in it.
        names = function.__globals__ | {SCAN: partial(_scan, function.__globals__[SCAN], states)}
        copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
        forward = MethodType(copied, forward.__self__)
    mixed: Tensor = forward(rows, **{name: states, "attention_mask": mask})
    return mixed


def _scan(
    scan: Callable[..., Any],
    states: RecurrentStates,
    hidden: Float[Tensor, "N I T"],
    dt: Float[Tensor, "N I T"],
    a: Float[Tensor, "I n"],
    b: Float[Tensor, "N n T"],
    c: Float[Tensor, "N n T"],
    *,
    z: Float[Tensor, "N I T"],
    delta_bias: Float[Tensor, " I"],
    **options: Any,
) -> tuple[Float[Tensor, "N I T"], Float[Tensor, "N I n"]]:
    """The scan of Mamba 1 (arXiv:2312.00752) from a state, or to a state that has gradients; its outputs and a state.

    transformers' scan begins with nothing, and its kernel gives the last state no gradients. The state obeys
    h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t, so what is left of h_0 after t tokens is exp(A s_t) h_0 with the sum s_t of dt.
    """
    outputs, _ = scan(hidden, dt, a, b, c, z=z, delta_bias=delta_bias, **options)
    steps = functional.softplus(dt.float() + delta_bias[:, None])
    passed = steps.cumsum(-1)  # [N, I, T]
    # One number of the state after the other: all of them at once take n times the memory of the outputs.
    if states.has_previous_state():
        first, left = states.recurrent_states[0].float(), torch.zeros_like(passed)
        for at in range(a.shape[1]):
            left = left + (a[:, at, None] * passed).exp() * first[:, :, at, None] * c[:, None, at].float()
        # The state after a completion is not read, so any will do.
        return outputs + (left * functional.silu(z.float())).to(outputs.dtype), first
    taken, remaining = steps * hidden.float(), passed[..., -1:] - passed
    ends = [((a[:, at, None] * remaining).exp() * taken * b[:, None, at].float()).sum(-1) for at in range(a.shape[1])]
    return outputs, torch.stack(ends, dim=-1)

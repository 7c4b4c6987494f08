"""Attention in which the completions of a group read one copy of their prompt's keys and values.

A key-value cache that is repeated for every completion is read, copied and (in training) differentiated G times. Here the queries
of a whole group are put side by side and meet the prompt's keys once; their own keys they meet apart, and the two results are
merged by their log-sum-exp:

    out = sum_i exp(lse_i - lse) out_i,   lse = logaddexp(lse_prompt, lse_own)

It hangs into Hugging Face models as an attention implementation, so it works for any of them whose layers attend to everything
before; sliding windows, soft caps and sinks are refused, and the caller then takes the repeated cache.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

NAME = "grpo_shared_prompt"
"""The attention implementation's name in transformers."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class UnsupportedError(Exception):
    """This model's attention is of another kind."""


@runtime_checkable
class SharedPrompt(Protocol):
    """What a forward pass is given as `shared_prompt=`."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "N H T D"],
        key: Float[Tensor, "N K T D"],
        value: Float[Tensor, "N K T D"],
        scale: float,
    ) -> Float[Tensor, "N H T D"]:
        """Attention of new tokens to their prompt and to each other."""


@contextmanager
def shared_prompt_attention(model: PreTrainedModel) -> Iterator[None]:
    """While it lasts the model attends through the `shared_prompt` that its forward is given."""
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - part of the signature
    *,
    shared_prompt: SharedPrompt,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kinds: Any,
) -> tuple[Tensor, None]:
    other = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if kinds.get(name) is not None]
    if other or dropout:
        raise UnsupportedError(f"attention with {', '.join(other) or 'dropout'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return shared_prompt.attend(module.layer_idx, query, key, value, scale).transpose(1, 2), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attention)


class PromptGroups:
    """N rows that belong to P prompts."""

    def __init__(self, prompt_of: Int[Tensor, " N"], num_prompts: int) -> None:
        counts = torch.bincount(prompt_of, minlength=num_prompts)
        self.num_prompts, self.width = num_prompts, int(counts.max())
        order = prompt_of.argsort(stable=True)
        first = (counts.cumsum(0) - counts)[prompt_of[order]]
        slots = torch.empty_like(prompt_of)
        slots[order] = prompt_of[order] * self.width + torch.arange(len(order), device=order.device) - first
        dense = len(slots) == num_prompts * self.width and bool((slots[1:] > slots[:-1]).all())
        self.slots = None if dense else slots

    def fold(self, rows: Float[Tensor, "N H T D"], heads: int) -> Float[Tensor, "P K M D"]:
        """Rows of a group (and the query heads that share a key head) side by side: M = width H / K T."""
        if self.slots is not None:
            padded = rows.new_zeros(self.num_prompts * self.width, *rows.shape[1:])
            rows = padded.index_copy(0, self.slots, rows)
        split = rows.view(self.num_prompts, self.width, heads, -1, *rows.shape[2:])
        return split.transpose(1, 2).reshape(self.num_prompts, heads, -1, rows.shape[-1])

    def unfold(self, folded: Float[Tensor, "P K M D"], length: int) -> Float[Tensor, "N H T D"]:
        """The inverse of `fold`, for rows of `length` tokens."""
        prompts, heads, _, depth = folded.shape
        split = folded.reshape(prompts, heads, self.width, -1, length, depth).transpose(1, 2)
        rows = split.reshape(prompts * self.width, -1, length, depth)
        return rows if self.slots is None else rows.index_select(0, self.slots)


@dataclass(slots=True)
class TrainedPrompt:
    """For training on a CPU: gradients flow into the prompt's keys and values."""

    keys: Sequence[Float[Tensor, "P K S D"]]
    """Layer by layer."""
    values: Sequence[Float[Tensor, "P K S D"]]
    mask: Bool[Tensor, "P S"]
    groups: PromptGroups

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `SharedPrompt`. Rows are padded on the right, so that no token that counts sees padding."""
        padded = None if self.mask.all() else _bias(self.mask, query.dtype)
        attended: Tensor = _Merged.apply(query, key, value, self.keys[layer], self.values[layer], padded, self.groups, scale)
        return attended


class _Merged(torch.autograd.Function):
    """Two flash passes, merged. Backward is flash's own, pass by pass, with the merged output and log-sum-exp: those are all that
    it knows of the softmax (arXiv:2205.14135, algorithm 4)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor, mask: Any, groups: PromptGroups, scale: float
    ) -> Tensor:
        heads, length = k.shape[1], q.shape[2]
        folded = groups.fold(q, heads)
        wide = None if mask is None else mask.expand(-1, -1, folded.shape[2], -1)
        prompt, prompt_lse = _flash(folded, pk, pv, 0.0, False, attn_mask=wide, scale=scale)
        own, own_lse = _flash(q, _repeat(k, q), _repeat(v, q), 0.0, True, scale=scale)
        prompt = groups.unfold(prompt, length)
        prompt_lse = groups.unfold(prompt_lse[..., None], length).squeeze(-1)
        lse = torch.logaddexp(prompt_lse, own_lse)
        out = prompt * (prompt_lse - lse).exp()[..., None].to(q.dtype) + own * (own_lse - lse).exp()[..., None].to(q.dtype)
        ctx.save_for_backward(q, k, v, pk, pv, out, lse)
        ctx.mask, ctx.groups, ctx.scale = mask, groups, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, pk, pv, out, lse = ctx.saved_tensors
        groups, scale, heads, length = ctx.groups, ctx.scale, k.shape[1], q.shape[2]
        grad = grad.contiguous()
        dq, dk, dv = _flash_backward(grad, q, _repeat(k, q), _repeat(v, q), out, _like_flash(lse), 0.0, True, scale=scale)
        folded_q, folded_grad, folded_out = (groups.fold(rows, heads) for rows in (q, grad, out))
        folded_lse = groups.fold(lse[..., None], heads).squeeze(-1)
        wide = None if ctx.mask is None else ctx.mask.expand(-1, -1, folded_q.shape[2], -1)
        prompt_dq, prompt_dk, prompt_dv = _flash_backward(
            folded_grad, folded_q, pk, pv, folded_out, _like_flash(folded_lse), 0.0, False, attn_mask=wide, scale=scale
        )
        dq = dq + groups.unfold(prompt_dq.contiguous(), length)
        return dq, _summed(dk, k), _summed(dv, v), prompt_dk, prompt_dv, None, None, None


def _bias(mask: Bool[Tensor, "P S"], dtype: torch.dtype) -> Float[Tensor, "P 1 1 S"]:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)[:, None, None, :]


def _repeat(keys: Tensor, like: Tensor) -> Tensor:
    times = like.shape[1] // keys.shape[1]
    return keys if times == 1 else keys.repeat_interleave(times, dim=1)


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    return grad if grad.shape == like.shape else grad.view(like.shape[0], like.shape[1], -1, *like.shape[2:]).sum(2)


def _like_flash(lse: Float[Tensor, "N H T"]) -> Float[Tensor, "N H T"]:
    # The kernel keeps it as [N, T, H] in memory and reads it so.
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


class DecodedPrompt:
    """For decoding: one new token a row and step; rows can be let go."""

    def __init__(
        self,
        keys: Sequence[Float[Tensor, "P K S D"]],
        values: Sequence[Float[Tensor, "P K S D"]],
        mask: Bool[Tensor, "P S"],
        prompt_of: Int[Tensor, " N"],
        max_length: int,
    ) -> None:
        self._keys, self._values = list(keys), list(values)
        self._bias = None if mask.all() else _bias(mask, torch.float32)
        self._prompt_of = prompt_of
        self._groups = PromptGroups(prompt_of, len(mask))
        self._own: list[tuple[Tensor, Tensor]] = []
        self._max_length = max_length
        self.length = 0
        """Tokens of each row so far, the present one not counted."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `SharedPrompt`; T is 1."""
        own_keys, own_values = self._remember(layer, key, value)
        rows, heads = key.shape[:2]
        query = query * scale
        prompt = torch.matmul(self._groups.fold(query, heads), self._keys[layer].transpose(2, 3)).float()
        if self._bias is not None:
            prompt = prompt + self._bias
        own = torch.matmul(query.view(rows, heads, -1, query.shape[-1]), own_keys.transpose(2, 3)).float()
        # What is large stays folded; what goes back and forth is the rows' own, a few tokens each.
        folded = self._groups.fold(own.view(rows, -1, 1, own.shape[-1]), heads)
        weights = torch.cat([prompt, folded], dim=-1).softmax(-1).to(value.dtype)
        size = prompt.shape[-1]
        from_prompt = torch.matmul(weights[..., :size], self._values[layer])
        own_weights = self._groups.unfold(weights[..., size:], 1).view(own.shape)
        return self._groups.unfold(from_prompt, 1) + torch.matmul(own_weights, own_values).view(query.shape)

    def keep(self, rows: Int[Tensor, " M"]) -> None:
        """Let all other rows go, and prompts that have none left."""
        self._prompt_of = self._prompt_of[rows]
        alive, self._prompt_of = torch.unique(self._prompt_of, return_inverse=True)
        if len(alive) < self._groups.num_prompts:
            self._keys = [keys[alive] for keys in self._keys]
            self._values = [values[alive] for values in self._values]
            self._bias = None if self._bias is None else self._bias[alive]
        self._groups = PromptGroups(self._prompt_of, len(alive))
        self._own = [(self._kept(keys, rows), self._kept(values, rows)) for keys, values in self._own]

    def _remember(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer == len(self._own):
            shape = (*key.shape[:2], self._max_length, key.shape[3])
            self._own.append((key.new_empty(shape), value.new_empty((*shape[:3], value.shape[3]))))
        keys, values = self._own[layer]
        keys[:, :, self.length] = key[:, :, 0]
        values[:, :, self.length] = value[:, :, 0]
        return keys[:, :, : self.length + 1], values[:, :, : self.length + 1]

    def _kept(self, own: Tensor, rows: Tensor) -> Tensor:
        kept = own.new_empty((len(rows), *own.shape[1:]))
        kept[:, :, : self.length] = own[:, :, : self.length][rows]
        return kept

"""Attention over one packed row of prompts and completions, without padding around it, without a cache and without a mask.

CPU              the flash kernels of torch, called with a merged log-sum-exp (`CpuAttention`)
CUDA             one call of a kernel for sequences of different lengths (varlen.py), where torch has one
everything else  scaled dot-product attention with a mask over [prompt | own] (`masked_attention`)
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_tasks.attention.recurrent import Beginnings, mix_packed
from grpo_tasks.attention.shared_prompt import Mixer, PackedRow, Spans
from grpo_tasks.attention.varlen import Sequences, VarlenAttention, repeat_heads, sum_heads, varlen_kernel
from grpo_tasks.kit.pinned import moved

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

FEW_KEYS = 256
"""With fewer keys, the causal pass back takes up to 3.5 times as long in 16 bits as in float32, conversions included. With 512
keys both take the same time. Measured on a CPU with AMX."""


class PackedAttention:
    """The `SharedPrompt` of a packed row. After the layer `last_layer` only the tokens `predicting` are read."""

    def __init__(self, row: PackedRow, predicting: Int[Tensor, " R"], last_layer: int) -> None:
        self.row, self.predicting, self.last_layer = row, predicting, last_layer
        # Made by the first layer, for all layers of the pass.
        self._masks: dict[tuple[int | None, bool], Masks] = {}
        self._sequences: Sequences | None = None

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 H L D"],
        key: Float[Tensor, "1 K L D"],
        value: Float[Tensor, "1 K L _"],
        scale: float,
        window: int | None = None,
    ) -> Float[Tensor, "1 H L _"]:
        """See `SharedPrompt`."""
        device = query.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            # Autocast casts for the kernels that it knows, and those here are called below it. With float32 weights the values
            # have 16 bits then, as linear layers return them, and queries and keys have 32 after their rotation.
            query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
        depth = value.shape[-1]
        if depth < query.shape[-1]:
            # Multi-head latent attention (DeepSeek) has narrower values; the kernels want heads of one width.
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - depth))
        kernel = varlen_kernel(query, window)
        if kernel is not None:
            if self._sequences is None:
                self._sequences = Sequences.of(self.row)
            attended: Tensor = VarlenAttention.apply(query, key, value, self._sequences, kernel, scale, window)
        elif device == "cpu":
            last = layer == self.last_layer
            if (window, last) not in self._masks:
                self._masks[window, last] = Masks.of(self.row, window, query, tails=last)
            asking = self.row.tails if last else self.row.prompts
            attended = CpuAttention.apply(query, key, value, self.row, asking, self._masks[window, last], scale)
        else:
            attended = masked_attention(query, key, value, self.row, scale, window)
        return attended[..., :depth]

    def recur(self, layer: int, mixer: Mixer, hidden: Float[Tensor, "1 L H"]) -> Float[Tensor, "1 L H"]:  # noqa: ARG002
        """See `SharedPrompt`."""
        return mix_packed(self.row, self.beginnings, mixer, hidden)

    @cached_property
    def beginnings(self) -> Beginnings:
        """How layers with a state of their own read the prompts."""
        return Beginnings(self.row)


@dataclass(frozen=True, slots=True)
class Masks:
    """Added to attention scores: 0 where a query may look, -inf elsewhere. None where causal attention alone decides."""

    prompt: Float[Tensor, "_ 1 _ S"] | None
    """From the queries of a prompt to its keys."""
    own: Float[Tensor, "1 1 T T"] | None
    shared: Float[Tensor, "P 1 _ S"] | None
    """From the queries of a group to the keys of their prompt. One query stands for all when there is no window."""
    blind: Bool[Tensor, "P 1 M"] | None
    """Queries that see no token of their prompt, because all of it lies outside their window."""

    @classmethod
    def of(cls, row: PackedRow, window: int | None, like: Tensor, *, tails: bool = False) -> "Masks":
        """The masks of the layers with that window, or with `tails` of the last one."""
        prompts, own, groups = row.prompts, row.own, row.groups
        prompt = None
        if tails:
            prompt = _bias(seen_of_tails(row, window), like)
        elif window is not None and window < prompts.width:
            prompt = _bias(band(prompts.width, window, like.device), like)
        if own is None or groups is None:
            return cls(prompt, None, None, None)
        inner = None if window is None or window >= own.width else _bias(band(own.width, window, like.device), like)
        if window is None:
            shared = None if prompts.dense else _bias(~prompts.empty[:, None, :], like)
            return cls(prompt, inner, shared, None)
        # [N, T, S] -> [N, 1, T, S] -> [P, 1, width T, S] -> [P, width T, S]
        seen = groups.fold(seen_of_prompt(row, window)[:, None], 1)[:, 0]
        return cls(prompt, inner, _bias(seen, like), ~seen.any(-1)[:, None, :])


def _bias(seen: Bool[Tensor, "A Q S"], like: Tensor) -> Float[Tensor, "A 1 Q S"]:
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, -torch.inf)[:, None]


class CpuAttention(torch.autograd.Function):
    """Saves the row once: queries, keys, values, result and log-sum-exp, all without padding.

    The queries of a group attend to their prompt's keys in one pass, to their own tokens in a second one. The results are merged
    by their log-sum-exp (Hydragen, arXiv:2402.05099):

        out = exp(lse_prompt - lse) out_prompt + exp(lse_own - lse) out_own,   lse = logaddexp(lse_prompt, lse_own)

    The backward pass calls the flash kernel once for each pass of the forward, with the merged result and log-sum-exp. The kernel
    recomputes the softmax from the scores and the log-sum-exp alone (arXiv:2205.14135, algorithm 4), so with the merged values
    each pass yields its exact share of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, row: PackedRow, asking: Spans, masks: Masks, scale: float) -> Tensor:
        """q [1, H, L, D]; k and v [1, K, L, D]. Of the prompts only the spans `asking` get values, and the rest is 0."""
        out = q.new_zeros(q.shape[2], q.shape[1], v.shape[3])  # [L, H, D]
        lse = q.new_empty(q.shape[2], q.shape[1], 1, dtype=torch.float32)  # [L, H, 1]
        prompt_k, prompt_v = row.prompts.read(k), row.prompts.read(v)  # [P, K, S, D]
        found = _causal(asking.read(q), prompt_k, prompt_v, masks.prompt, scale)
        asking.write(found[0], out)
        asking.write(found[1][..., None], lse)
        if row.own is not None and row.groups is not None:
            query = row.own.read(q)  # [N, H, T, D]
            own, own_lse = _causal(query, row.own.read(k), row.own.read(v), masks.own, scale)
            # Every completion token comes after its prompt, so this pass is not causal.
            folded = row.groups.fold(query, prompt_k.shape[1])  # [P, K, M, D]
            seen = None if masks.shared is None else _wide(masks.shared, folded, query)
            shared, shared_lse = _flash(folded, prompt_k, prompt_v, 0.0, False, attn_mask=seen, scale=scale)
            if masks.blind is not None:
                # The kernel gives 0 for the log-sum-exp of no key at all, which is -inf.
                blind = _wide(masks.blind[..., None], folded, query).squeeze(-1)  # [P, 1, M]
                shared_lse, shared = shared_lse.masked_fill(blind, -torch.inf), shared.masked_fill(blind[..., None], 0.0)
            length = query.shape[2]
            shared = row.groups.unfold(shared, length)  # [P, K, M, D] -> [N, H, T, D]
            shared_lse = row.groups.unfold(shared_lse[..., None], length).squeeze(-1)  # [P, K, M] -> [N, H, T]
            both = torch.logaddexp(shared_lse, own_lse)
            # The kernel's log-sum-exps are float32 whatever the precision of q; only their small exponentials are rounded.
            shared_share, own_share = ((part - both).exp()[..., None].to(q.dtype) for part in (shared_lse, own_lse))
            merged = shared * shared_share + own * own_share
            row.own.write(merged, out)
            row.own.write(both[..., None], lse)
        out, lse = out.transpose(0, 1)[None], lse.transpose(0, 1)[None]  # [1, H, L, D], [1, H, L, 1]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.row, ctx.asking, ctx.masks, ctx.scale = row, asking, masks, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """See the class."""
        q, k, v, out, lse = ctx.saved_tensors
        row, asking, masks, scale = ctx.row, ctx.asking, ctx.masks, ctx.scale
        dq, dk, dv = (
            torch.zeros_like(x[0].transpose(0, 1), memory_format=torch.contiguous_format) for x in (q, k, v)
        )  # [L, H, D]
        prompt_k, prompt_v = row.prompts.read(k), row.prompts.read(v)
        part = _Part.of(asking, q, out, lse, grad)
        prompt_dq, prompt_dk, prompt_dv = _causal_backward(part, prompt_k, prompt_v, masks.prompt, scale)
        asking.write(prompt_dq, dq)
        if row.own is not None and row.groups is not None:
            own_k, own_v, groups = row.own.read(k), row.own.read(v), row.groups
            part = _Part.of(row.own, q, out, lse, grad)
            own_dq, own_dk, own_dv = _causal_backward(part, own_k, own_v, masks.own, scale)
            folded = _Part(*(groups.fold(x, prompt_k.shape[1]) for x in (part.query, part.out, part.lse, part.grad)))
            seen = None if masks.shared is None else _wide(masks.shared, folded.query, part.query)
            shared_dq, shared_dk, shared_dv = _flash_backward(
                folded.grad, folded.query, prompt_k, prompt_v, folded.out, _like_flash(folded.lse.squeeze(-1)), 0.0, False,
                attn_mask=seen, scale=scale,
            )  # fmt: skip
            # The queries took part in both passes, and so did the keys and values of the prompts.
            row.own.write(own_dq + groups.unfold(shared_dq.contiguous(), part.query.shape[2]), dq)
            row.own.write(own_dk, dk)
            row.own.write(own_dv, dv)
            prompt_dk, prompt_dv = prompt_dk + shared_dk, prompt_dv + shared_dv
        row.prompts.write(prompt_dk, dk)
        row.prompts.write(prompt_dv, dv)
        return *(x.transpose(0, 1)[None] for x in (dq, dk, dv)), None, None, None, None


@dataclass(slots=True)
class _Part:
    """What the backward pass of the kernel needs of the spans, [R, H, W, D] each."""

    query: Tensor
    out: Tensor
    lse: Tensor
    """[R, H, W, 1]"""
    grad: Tensor

    @classmethod
    def of(cls, spans: Spans, q: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> "_Part":
        part = cls(*(spans.read(x) for x in (q, out, lse, grad)))
        if not spans.dense:
            # exp(score - inf) is 0: nothing flows from or into an empty slot.
            part.lse = part.lse.masked_fill(spans.empty[:, None, :, None], torch.inf)
            part.grad = part.grad.masked_fill(spans.empty[:, None, :, None], 0.0)
        return part


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    wide = None if mask is None else mask.expand(len(q), -1, -1, -1)
    out, lse = _flash(q, repeat_heads(k, q), repeat_heads(v, q), 0.0, mask is None, attn_mask=wide, scale=scale)
    return out, lse


def _causal_backward(part: _Part, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q = part.query
    wide = None if mask is None else mask.expand(len(q), -1, -1, -1)
    given = [part.grad.contiguous(), q, repeat_heads(k, q), repeat_heads(v, q), part.out]
    if k.shape[2] < FEW_KEYS:
        given, wide = [x.float() for x in given], None if wide is None else wide.float()
    grad, query, key, value, out = given
    lse = _like_flash(part.lse.squeeze(-1))
    slopes = _flash_backward(grad, query, key, value, out, lse, 0.0, mask is None, attn_mask=wide, scale=scale)
    dq, dk, dv = (slope.to(q.dtype) for slope in slopes)
    return dq, sum_heads(dk, k), sum_heads(dv, v)


def _wide(shared: Tensor, folded: Float[Tensor, "P K M D"], query: Float[Tensor, "N H T D"]) -> Tensor:
    """The mask from folded queries to their prompt: [P, 1, 1, S] or [P, 1, width T, S] -> [P, 1, M, S]."""
    if shared.shape[2] == 1:
        return shared.expand(-1, -1, folded.shape[2], -1)
    # M runs over row, query head of the key head, token; the mask is the same for all heads.
    rows = shared.unflatten(2, (-1, 1, query.shape[2]))  # [P, 1, width, 1, T, S]
    return rows.expand(-1, -1, -1, query.shape[1] // folded.shape[1], -1, -1).flatten(2, 4)


def _like_flash(lse: Float[Tensor, "N H T"]) -> Float[Tensor, "N H T"]:
    # The kernel stores it as [N, T, H] and reads that memory layout, whatever the strides say.
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, row: PackedRow, scale: float, window: int | None) -> Tensor:
    """Attention [1, H, L, D] on any device, with a mask and a copy of its prompt's keys for each completion."""
    attend = torch.nn.functional.scaled_dot_product_attention
    keys, values = (repeat_heads(x, q) for x in (k, v))
    prompts, own, size = row.prompts, row.own, row.prompts.width
    prompt_k, prompt_v = prompts.read(keys), prompts.read(values)
    causal = band(size, window or size, q.device)[:, None]
    parts = [_flat(prompts, attend(prompts.read(q), prompt_k, prompt_v, attn_mask=causal, scale=scale))]
    if own is not None:
        length = own.width
        own_band = band(length, window or length, q.device).expand(len(own), -1, -1)
        seen = torch.cat([seen_of_prompt(row, window or size + length + 1), own_band], dim=2)  # [N, T, S + T]
        both_k = torch.cat([prompt_k[row.prompt_of], own.read(keys)], dim=2)  # [N, H, S + T, D]
        both_v = torch.cat([prompt_v[row.prompt_of], own.read(values)], dim=2)
        parts.append(_flat(own, attend(own.read(q), both_k, both_v, attn_mask=seen[:, None], scale=scale)))
    return torch.cat(parts).transpose(0, 1)[None]


def _flat(spans: Spans, slots: Float[Tensor, "R H W D"]) -> Float[Tensor, "_ H D"]:
    # Without the empty slots.
    tokens = slots.transpose(1, 2).flatten(0, 1)
    return tokens if spans.dense else tokens.index_select(0, spans.filled)


def band(size: int, window: int, device: torch.device) -> Bool[Tensor, "1 L L"]:
    """True where a query may look at a key of its own span: at itself and the `window` - 1 tokens before it."""
    distance = torch.arange(size, device=device)[:, None] - torch.arange(size, device=device)
    return ((distance >= 0) & (distance < window))[None]


def seen_of_prompt(row: PackedRow, window: int) -> Bool[Tensor, "N T S"]:
    """True where token t of a completion may look at token s of its prompt."""
    assert row.own is not None
    device = row.prompts.index.device
    lengths = moved(torch.tensor(row.prompts.lengths), device)[row.prompt_of]  # [P] -> [N]
    # Token t has the position length + t. [N, 1, 1] + [1, T, 1] - [1, 1, S] -> [N, T, S]
    at, key = torch.arange(row.own.width, device=device)[None, :, None], torch.arange(row.prompts.width, device=device)
    distance = lengths[:, None, None] + at - key
    return (distance < window) & (key < lengths[:, None, None])


def seen_of_tails(row: PackedRow, window: int | None) -> Bool[Tensor, "P U S"]:
    """True where token u of the end of a prompt may look at token s of the prompt."""
    device = row.prompts.index.device
    first = moved(torch.tensor(row.prompt_lengths) - torch.tensor(row.tail_lengths), device)  # [P]
    at, key = torch.arange(row.tails.width, device=device)[:, None], torch.arange(row.prompts.width, device=device)
    # Token u has the position first + u. [P, 1, 1] + [U, 1] - [S]
    distance = first[:, None, None] + at - key
    return (distance >= 0) & (distance < (window or row.prompts.width))

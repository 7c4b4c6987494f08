"""Attention over a packed row with the flash kernels that torch has for CPUs.

The queries of a group are placed side by side and attend to their prompt's keys in one pass, then to their own tokens in a second
one. The two results are merged by their log-sum-exp (Hydragen, arXiv:2402.05099):

    out = exp(lse_prompt - lse) out_prompt + exp(lse_own - lse) out_own,   lse = logaddexp(lse_prompt, lse_own)
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_tasks.attention.masked import band, seen_of_prompt, seen_of_tails
from grpo_tasks.attention.packed_row import PackedRow
from grpo_tasks.attention.spans import Spans

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
        """The masks of the layers with that window, or with `tails` of the last one; None where a query sees all before it."""
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

    The backward pass calls the flash kernel once for each pass of the forward, with the merged result and log-sum-exp. The kernel
    recomputes the softmax from the scores and the log-sum-exp alone (arXiv:2205.14135, algorithm 4), so with the merged values
    each pass yields its exact share of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, row: PackedRow, asking: Spans, masks: Masks, scale: float) -> Tensor:
        """The attended values [1, H, L, D]; of the prompts only the spans `asking` have some, and the rest is 0."""
        # q [1, H, L, D]; k and v [1, K, L, D]
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
            merged = shared * (shared_lse - both).exp()[..., None].to(q.dtype) + own * (own_lse - both).exp()[..., None].to(
                q.dtype
            )
            row.own.write(merged, out)
            row.own.write(both[..., None], lse)
        out, lse = out.transpose(0, 1)[None], lse.transpose(0, 1)[None]  # [1, H, L, D], [1, H, L, 1]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.row, ctx.asking, ctx.masks, ctx.scale = row, asking, masks, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of queries, keys and values."""
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
    """What the backward pass of the kernel needs of the spans."""

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
    out, lse = _flash(q, _repeat(k, q), _repeat(v, q), 0.0, mask is None, attn_mask=wide, scale=scale)
    return out, lse


def _causal_backward(part: _Part, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q = part.query
    wide = None if mask is None else mask.expand(len(q), -1, -1, -1)
    dq, dk, dv = _flash_backward(
        part.grad.contiguous(), q, _repeat(k, q), _repeat(v, q), part.out, _like_flash(part.lse.squeeze(-1)), 0.0, mask is None,
        attn_mask=wide, scale=scale,
    )  # fmt: skip
    return dq, _summed(dk, k), _summed(dv, v)


def _wide(shared: Tensor, folded: Float[Tensor, "P K M D"], query: Float[Tensor, "N H T D"]) -> Tensor:
    """The mask from folded queries to their prompt: [P, 1, 1, S] or [P, 1, width T, S] -> [P, 1, M, S]."""
    if shared.shape[2] == 1:
        return shared.expand(-1, -1, folded.shape[2], -1)
    # M runs over row, query head of the key head, token; the mask is the same for all heads.
    rows = shared.unflatten(2, (-1, 1, query.shape[2]))  # [P, 1, width, 1, T, S]
    return rows.expand(-1, -1, -1, query.shape[1] // folded.shape[1], -1, -1).flatten(2, 4)


def _repeat(keys: Float[Tensor, "N K S D"], like: Float[Tensor, "N H _ _"]) -> Float[Tensor, "N H S D"]:
    """One copy of each key head for each query head that shares it: the CPU kernel knows no grouped-query attention."""
    times = like.shape[1] // keys.shape[1]
    return keys if times == 1 else keys.repeat_interleave(times, dim=1)


def _summed(grad: Float[Tensor, "N H T D"], like: Float[Tensor, "N K T D"]) -> Float[Tensor, "N K T D"]:
    """Gradient of `_repeat`: the sum over the copies, [N, H, T, D] -> [N, K, H / K, T, D] -> [N, K, T, D]."""
    return grad if grad.shape == like.shape else grad.unflatten(1, (like.shape[1], -1)).sum(2)


def _like_flash(lse: Float[Tensor, "N H T"]) -> Float[Tensor, "N H T"]:
    # The kernel stores it as [N, T, H] and reads that memory layout, whatever the strides say.
    return lse.transpose(1, 2).contiguous().transpose(1, 2)

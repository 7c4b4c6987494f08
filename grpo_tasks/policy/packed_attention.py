"""Attention over one packed row of prompts and completions, without padding around it, without a cache and without a mask.

    row        [ prompt 1 | prompt 2 | ... | completion 1 | completion 2 | ... ]

A prompt attends to itself, causally. A completion attends to its prompt and, causally, to itself. The completions of a group read
the one copy of their prompt's keys and values: their queries are placed side by side and attend to it in one pass, then to their
own tokens in a second one. The two results are merged by their log-sum-exp (Hydragen, arXiv:2402.05099):

    out = exp(lse_prompt - lse) out_prompt + exp(lse_own - lse) out_own,   lse = logaddexp(lse_prompt, lse_own)

Three ways, by device and precision, of which tests compare each with single unpadded rows:

    CPU              the flash kernels of torch, called with the merged log-sum-exp (`_PackedAttention`)
    CUDA, 16 bit     one call of torch's varlen attention, keys gathered as [prompt | own] for each completion
    everything else  scaled dot-product attention with a mask over [prompt | own]; slow, and differentiated by torch

In this file L counts the tokens of the row, H the query heads, K the key heads, and D the width of a head. S is the longest
prompt and T the longest own part of a completion. P prompts, N completions with an own part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_tasks.policy.batch import PackedTokens
from grpo_tasks.policy.shared_prompt_attention import PromptGroups

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Spans:
    """Equally many slots for each of R neighbouring spans of the row; a short span leaves its last slots empty.

    Args:
        start: where the first span begins in the row.
        lengths: tokens of each span, at least one.
        device: where the index tensors are placed.
    """

    def __init__(self, start: int, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.width, self.start = list(lengths), max(lengths), start
        self.dense = min(lengths) == self.width
        """All spans are equally long, so that the slots are a view of the row."""
        columns = torch.arange(self.width)
        sizes = torch.tensor(self.lengths)
        starts = start + sizes.cumsum(0) - sizes  # [R]
        real = columns < sizes[:, None]  # [R, W]
        # Empty slots repeat a token of the row. What is computed for them is finite, and never read.
        self.index = torch.where(real, starts[:, None] + columns, start).to(device)  # [R, W]
        self.empty = (~real).to(device)  # [R, W]
        self.filled = real.flatten().nonzero().squeeze(1).to(device)  # slots that hold a token, in the order of the row

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all spans."""
        return sum(self.lengths)

    def read(self, row: Float[Tensor, "1 H L D"]) -> Float[Tensor, "R H W D"]:
        """The tokens of the spans, in their slots."""
        tokens = row[0].transpose(0, 1)  # [L, H, D]
        if self.dense:
            found = tokens[self.start : self.start + self.tokens].unflatten(0, (len(self), self.width))
        else:
            found = tokens.index_select(0, self.index.flatten()).unflatten(0, (len(self), self.width))
        return found.transpose(1, 2)  # [R, W, H, D] -> [R, H, W, D]

    def write(self, slots: Float[Tensor, "R H W D"], row: Float[Tensor, "L H D"]) -> None:
        """Copy the tokens in their slots into the row."""
        tokens = slots.transpose(1, 2).flatten(0, 1)  # [R W, H, D]
        row[self.start : self.start + self.tokens] = tokens if self.dense else tokens.index_select(0, self.filled)


@dataclass(slots=True)
class PackedRow:
    """Which token of the row belongs to which prompt or completion; what a forward pass receives as `shared_prompt=`."""

    prompts: Spans
    own: Spans | None
    """Completions without their last token, which predicts nothing; None when no completion has another one."""
    prompt_of: Int[Tensor, " N"]
    """Prompt of each completion in `own`."""
    groups: PromptGroups | None
    _masks: dict[int | None, "_Masks"] = field(default_factory=dict)
    _gathered: "_Gathered | None" = None

    def attend(
        self,
        layer: int,  # noqa: ARG002 - part of the protocol
        query: Float[Tensor, "1 H L D"],
        key: Float[Tensor, "1 K L D"],
        value: Float[Tensor, "1 K L D"],
        scale: float,
        window: int | None = None,
    ) -> Float[Tensor, "1 H L D"]:
        """See `SharedPrompt`."""
        if query.device.type == "cpu":
            attended: Tensor = _PackedAttention.apply(query, key, value, self, scale, window)
            return attended
        if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
            return _varlen_attention(query, key, value, self, scale, window)
        return masked_attention(query, key, value, self, scale, window)

    def gathered(self, device: torch.device) -> "_Gathered":
        """Where varlen attention finds the keys of each sequence; made once for all layers."""
        if self._gathered is None:
            self._gathered = _Gathered.of(self, device)
        return self._gathered

    def masks(self, window: int | None, like: Tensor) -> "_Masks":
        """The masks of a layer, made once for all layers of the pass that have the same window."""
        if window not in self._masks:
            self._masks[window] = _Masks.of(self, window, like)
        return self._masks[window]


def packed_row(packed: PackedTokens, prompt_of: Int[Tensor, " N"]) -> PackedRow:
    """The prompts and completions of a row; `prompt_of` has the prompt of every completion, also of those of one token."""
    device = packed.ids.device
    prompts = Spans(0, packed.prompt_lengths, device)
    lengths = [length for length in packed.own_lengths if length]
    if not lengths:
        return PackedRow(prompts, None, prompt_of[:0], None)
    if len(lengths) < len(packed.own_lengths):
        prompt_of = prompt_of[torch.tensor([bool(length) for length in packed.own_lengths], device=device)]
    return PackedRow(prompts, Spans(prompts.tokens, lengths, device), prompt_of, PromptGroups(prompt_of, len(prompts)))


@dataclass(frozen=True, slots=True)
class _Masks:
    """Added to attention scores: 0 where a query may look, -inf elsewhere. None where causal attention alone decides."""

    prompt: Float[Tensor, "1 1 S S"] | None
    own: Float[Tensor, "1 1 T T"] | None
    shared: Float[Tensor, "P 1 _ S"] | None
    """From the queries of a group to the keys of their prompt. One query stands for all when there is no window."""
    blind: Bool[Tensor, "P 1 M"] | None
    """Queries that see no token of their prompt, because all of it lies outside their window."""

    @classmethod
    def of(cls, row: PackedRow, window: int | None, like: Tensor) -> "_Masks":
        prompts, own, groups = row.prompts, row.own, row.groups
        prompt = None if window is None or window >= prompts.width else _bias(_band(prompts.width, window, like.device), like)
        if own is None or groups is None:
            return cls(prompt, None, None, None)
        inner = None if window is None or window >= own.width else _bias(_band(own.width, window, like.device), like)
        if window is None:
            shared = None if prompts.dense else _bias(~prompts.empty[:, None, :], like)
            return cls(prompt, inner, shared, None)
        # [N, T, S] -> [N, 1, T, S] -> [P, 1, width T, S] -> [P, width T, S]
        seen = groups.fold(_seen_of_prompt(row, window)[:, None], 1)[:, 0]
        return cls(prompt, inner, _bias(seen, like), ~seen.any(-1)[:, None, :])


def _band(size: int, window: int, device: torch.device) -> Bool[Tensor, "1 L L"]:
    """True where a query may look at a key of its own span: at itself and the `window` - 1 tokens before it."""
    distance = torch.arange(size, device=device)[:, None] - torch.arange(size, device=device)
    return ((distance >= 0) & (distance < window))[None]


def _seen_of_prompt(row: PackedRow, window: int) -> Bool[Tensor, "N T S"]:
    """True where token t of a completion may look at token s of its prompt."""
    assert row.own is not None
    device = row.prompts.index.device
    lengths = torch.tensor(row.prompts.lengths, device=device)[row.prompt_of]  # [P] -> [N]
    # Token t has the position length + t. [N, 1, 1] + [1, T, 1] - [1, 1, S] -> [N, T, S]
    at, key = torch.arange(row.own.width, device=device)[None, :, None], torch.arange(row.prompts.width, device=device)
    distance = lengths[:, None, None] + at - key
    return (distance < window) & (key < lengths[:, None, None])


def _bias(seen: Bool[Tensor, "A Q S"], like: Tensor) -> Float[Tensor, "A 1 Q S"]:
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill(~seen, -torch.inf)[:, None]


class _PackedAttention(torch.autograd.Function):
    """The way of the CPU. Saves the row once: queries, keys, values, result and log-sum-exp, all without padding.

    The backward pass calls the flash kernel once for each pass of the forward, with the merged result and log-sum-exp. The kernel
    recomputes the softmax from the scores and the log-sum-exp alone (arXiv:2205.14135, algorithm 4), so with the merged values
    each pass yields its exact share of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, row: PackedRow, scale: float, window: int | None) -> Tensor:
        # q [1, H, L, D]; k and v [1, K, L, D]
        masks = row.masks(window, q)
        out = q.new_empty(q.shape[2], q.shape[1], v.shape[3])  # [L, H, D]
        lse = q.new_empty(q.shape[2], q.shape[1], 1, dtype=torch.float32)  # [L, H, 1]
        prompt_k, prompt_v = row.prompts.read(k), row.prompts.read(v)  # [P, K, S, D]
        found = _causal(row.prompts.read(q), prompt_k, prompt_v, masks.prompt, scale)
        row.prompts.write(found[0], out)
        row.prompts.write(found[1][..., None], lse)
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
        ctx.row, ctx.scale, ctx.window = row, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        row, scale = ctx.row, ctx.scale
        masks = row.masks(ctx.window, q)
        dq, dk, dv = (
            torch.empty_like(x[0].transpose(0, 1), memory_format=torch.contiguous_format) for x in (q, k, v)
        )  # [L, H, D]
        prompt_k, prompt_v = row.prompts.read(k), row.prompts.read(v)
        part = _Part.of(row.prompts, q, out, lse, grad)
        prompt_dq, prompt_dk, prompt_dv = _causal_backward(part, prompt_k, prompt_v, masks.prompt, scale)
        row.prompts.write(prompt_dq, dq)
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
        return *(x.transpose(0, 1)[None] for x in (dq, dk, dv)), None, None, None


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


def _repeat(keys: Float[Tensor, "N K T D"], like: Float[Tensor, "N H T D"]) -> Float[Tensor, "N H T D"]:
    """One copy of each key head for each query head that shares it: the CPU kernel knows no grouped-query attention."""
    times = like.shape[1] // keys.shape[1]
    return keys if times == 1 else keys.repeat_interleave(times, dim=1)


def _summed(grad: Float[Tensor, "N H T D"], like: Float[Tensor, "N K T D"]) -> Float[Tensor, "N K T D"]:
    """Gradient of `_repeat`: the sum over the copies, [N, H, T, D] -> [N, K, H / K, T, D] -> [N, K, T, D]."""
    return grad if grad.shape == like.shape else grad.unflatten(1, (like.shape[1], -1)).sum(2)


def _like_flash(lse: Float[Tensor, "N H T"]) -> Float[Tensor, "N H T"]:
    # The kernel stores it as [N, T, H] and reads that memory layout, whatever the strides say.
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, row: PackedRow, scale: float, window: int | None) -> Tensor:
    """Attention [1, H, L, D] on any device, over keys gathered as [prompt | own] for every completion.

    It materialises a mask, and G copies of every prompt's keys, so it is the way of devices that have no better one.
    """
    attend = torch.nn.functional.scaled_dot_product_attention
    times = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(times, dim=1) if times > 1 else x for x in (k, v))
    prompts, own, size = row.prompts, row.own, row.prompts.width
    prompt_k, prompt_v = prompts.read(keys), prompts.read(values)
    band = _band(size, window or size, q.device)[:, None]
    parts = [_flat(prompts, attend(prompts.read(q), prompt_k, prompt_v, attn_mask=band, scale=scale))]
    if own is not None:
        length = own.width
        own_band = _band(length, window or length, q.device).expand(len(own), -1, -1)
        seen = torch.cat([_seen_of_prompt(row, window or size + length + 1), own_band], dim=2)  # [N, T, S + T]
        both_k = torch.cat([prompt_k[row.prompt_of], own.read(keys)], dim=2)  # [N, H, S + T, D]
        both_v = torch.cat([prompt_v[row.prompt_of], own.read(values)], dim=2)
        parts.append(_flat(own, attend(own.read(q), both_k, both_v, attn_mask=seen[:, None], scale=scale)))
    return torch.cat(parts).transpose(0, 1)[None]


def _flat(spans: Spans, slots: Float[Tensor, "R H W D"]) -> Float[Tensor, "_ H D"]:
    """The tokens of the spans without the empty slots."""
    tokens = slots.transpose(1, 2).flatten(0, 1)
    return tokens if spans.dense else tokens.index_select(0, spans.filled)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The sequences of the row for varlen attention: P prompts with their own keys, N completions with [prompt | own]."""

    index: Int[Tensor, " keys"]
    """Token of the row that each key comes from."""
    query_ends: Int[Tensor, " _"]
    """[P + N + 1], int32, from 0."""
    key_ends: Int[Tensor, " _"]
    max_query: int
    max_key: int

    @classmethod
    def of(cls, row: PackedRow, device: torch.device) -> "_Gathered":
        spans = [row.prompts, *([row.own] if row.own is not None else [])]
        starts = [start for span in spans for start in accumulate(span.lengths[:-1], initial=span.start)]
        queries = [length for span in spans for length in span.lengths]
        context = [None] * len(row.prompts) + row.prompt_of.tolist()
        parts, keys = [], []
        for start, length, prompt in zip(starts, queries, context, strict=True):
            before = [] if prompt is None else [torch.arange(row.prompts.lengths[prompt]) + starts[prompt]]
            parts += [*before, torch.arange(length) + start]
            keys.append(length + sum(map(len, before)))
        ends = [torch.tensor([0, *accumulate(sizes)], dtype=torch.int32).to(device) for sizes in (queries, keys)]
        return cls(torch.cat(parts).to(device), ends[0], ends[1], max(queries), max(keys))


def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, row: PackedRow, scale: float, window: int | None) -> Tensor:
    """One call of torch's varlen attention: prompts attend to themselves, completions to [prompt | own].

    Causal attention is aligned to the end of the keys, so a completion's first token sees its whole prompt.
    """
    from torch.nn.attention.varlen import varlen_attn

    gathered = row.gathered(q.device)
    times = q.shape[1] // k.shape[1]
    # [1, K, L, D] -> [L, K, D] -> [keys, K, D] -> [keys, H, D]: torch 2.11 has no grouped-query attention here.
    keys, values = (x[0].transpose(0, 1).index_select(0, gathered.index).repeat_interleave(times, dim=1) for x in (k, v))
    out = varlen_attn(
        q[0].transpose(0, 1),
        keys,
        values,
        gathered.query_ends,
        gathered.key_ends,
        gathered.max_query,
        gathered.max_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]

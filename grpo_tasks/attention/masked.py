"""Attention over a packed row with a mask, for devices that have no better kernel."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_tasks.attention.packed_row import PackedRow
from grpo_tasks.attention.spans import Spans


def masked_attention(q: Tensor, k: Tensor, v: Tensor, row: PackedRow, scale: float, window: int | None) -> Tensor:
    """Attention [1, H, L, D] on any device, over keys gathered as [prompt | own] for every completion.

    It materialises a mask, and G copies of every prompt's keys, so it is the way of devices that have no better one.
    """
    attend = torch.nn.functional.scaled_dot_product_attention
    times = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(times, dim=1) if times > 1 else x for x in (k, v))
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
    """The tokens of the spans without the empty slots."""
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
    lengths = torch.tensor(row.prompts.lengths, device=device)[row.prompt_of]  # [P] -> [N]
    # Token t has the position length + t. [N, 1, 1] + [1, T, 1] - [1, 1, S] -> [N, T, S]
    at, key = torch.arange(row.own.width, device=device)[None, :, None], torch.arange(row.prompts.width, device=device)
    distance = lengths[:, None, None] + at - key
    return (distance < window) & (key < lengths[:, None, None])


def seen_of_tails(row: PackedRow, window: int | None) -> Bool[Tensor, "P U S"]:
    """True where token u of the end of a prompt may look at token s of the prompt."""
    device = row.prompts.index.device
    first = torch.tensor(row.prompt_lengths, device=device) - torch.tensor(row.tail_lengths, device=device)  # [P]
    at, key = torch.arange(row.tails.width, device=device)[:, None], torch.arange(row.prompts.width, device=device)
    # Token u has the position first + u. [P, 1, 1] + [U, 1] - [S]
    distance = first[:, None, None] + at - key
    return (distance >= 0) & (distance < (window or row.prompts.width))

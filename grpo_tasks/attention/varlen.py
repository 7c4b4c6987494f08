"""Attention over a packed row by one call of a CUDA kernel for sequences of different lengths.

    queries   [ prompt 1 | ... | completion 1     | ... ]     the row itself
    keys      [ prompt 1 | ... | prompt | compl. 1 | ... ]    gathered: each completion's own keys behind those of its prompt

Causal attention is aligned to the end of the keys, so a completion's first token sees its whole prompt. The gathered keys live
for one layer and are gathered again in the backward pass, so what is saved is the row: queries, keys, values, result, and
log-sum-exp. The kernels are those behind torch's own attention. The indices are tested without a GPU; the kernels need one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_tasks.attention.shared_prompt import PackedRow
from grpo_tasks.kit.pinned import moved

FLASH_CAPABILITY = (8, 0)
"""The first compute capability (Ampere) that torch's flash kernels run on."""
BOTTOM_RIGHT = 2
"""The efficient kernel's number for causal attention that is aligned to the end of the keys."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """P prompts with their own keys, and N completions with the keys [prompt | own]. R gathered keys."""

    index: Int[Tensor, " R"]
    """Token of the row that each key comes from."""
    query_ends: Int[Tensor, " _"]
    """[P + N + 1], int32, from 0."""
    key_ends: Int[Tensor, " _"]
    max_query: int
    max_key: int
    uses: Int[Tensor, "A U"]
    """Where the A prompt tokens stand among the gathered keys: in their prompt, and in U - 1 completions."""
    unused: Bool[Tensor, "A U 1 1"] | None
    """True for the cells of `uses` that a small group leaves empty; None when there are none."""
    own: Int[Tensor, " B"]
    """Where the B own tokens stand among the gathered keys."""

    @classmethod
    def of(cls, row: PackedRow) -> "Sequences":
        """Made on the host, and moved without waiting for the device."""
        device, starts = row.device, [0, *accumulate(row.prompt_lengths)]
        parts = [torch.arange(starts[-1])]  # the prompts' own keys are the beginning of the row
        keys = list(row.prompt_lengths)
        uses: list[list[Tensor]] = [[torch.arange(start, end)] for start, end in pairwise(starts)]
        own, at, first = [], starts[-1], starts[-1]
        for length, prompt in zip(row.own_lengths, row.prompts_of, strict=True):
            size = row.prompt_lengths[prompt]
            parts += [torch.arange(starts[prompt], starts[prompt] + size), torch.arange(first, first + length)]
            uses[prompt].append(torch.arange(at, at + size))
            own.append(torch.arange(at + size, at + size + length))
            keys.append(size + length)
            at, first = at + size + length, first + length
        width = max(map(len, uses))
        # An empty cell repeats the first one, and counts nothing. [S, U] for each prompt -> [A, U]
        filled = torch.cat([torch.stack(of + of[:1] * (width - len(of)), dim=1) for of in uses])
        counts = torch.tensor([len(of) for of in uses]).repeat_interleave(torch.tensor(row.prompt_lengths))  # [A]
        empty = torch.arange(width) >= counts[:, None]  # [A, U]
        queries = [*row.prompt_lengths, *row.own_lengths]
        ends = [torch.tensor([0, *accumulate(sizes)], dtype=torch.int32) for sizes in (queries, keys)]

        return cls(
            index=moved(torch.cat(parts), device),
            query_ends=moved(ends[0], device),
            key_ends=moved(ends[1], device),
            max_query=max(queries),
            max_key=max(keys),
            uses=moved(filled, device),
            unused=moved(empty[:, :, None, None], device) if empty.any() else None,
            own=moved(torch.cat(own) if own else torch.zeros(0, dtype=torch.long), device),
        )

    def gather(self, row: Float[Tensor, "1 K L D"]) -> Float[Tensor, "R K D"]:
        """Keys or values of all sequences."""
        return row[0].transpose(0, 1).index_select(0, self.index)

    def scatter(self, grad: Float[Tensor, "R K D"]) -> Float[Tensor, "1 K L D"]:
        """Gradient of `gather`: each token of the row gets the sum over its copies."""
        # Not `index_add`: its sum has no fixed order on a GPU, and would be rounded to 16 bits after each copy.
        copies = grad.index_select(0, self.uses.flatten()).unflatten(0, self.uses.shape)  # [A, U, K, D]
        if self.unused is not None:
            copies = copies.masked_fill(self.unused, 0.0)
        prompts = copies.sum(1, dtype=torch.float32).to(grad.dtype)  # [A, K, D]
        tokens = torch.cat([prompts, grad.index_select(0, self.own)])  # [L, K, D]
        return tokens.transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel for sequences of different lengths, aligned to the end of the keys.

    forward(q [L, H, D], k [R, K, D], v [R, K, D], sequences, scale, window) -> (out [L, H, D], tensors to keep)
    backward(grad [L, H, D], q, k, v, out, kept, sequences, scale, window) -> (dq [L, H, D], dk [R, K, D], dv [R, K, D])
    """

    forward: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def varlen_kernel(like: Tensor, window: int | None) -> Kernel | None:
    """The kernel for the device and the precision of a tensor, if there is one."""
    if like.device.type != "cuda":
        return None
    return kernel_of_card(like.dtype, window, torch.cuda.get_device_capability(like.device))


def kernel_of_card(dtype: torch.dtype, window: int | None, capability: tuple[int, int]) -> Kernel | None:
    """The kernel of a card with that compute capability."""
    if dtype in (torch.float16, torch.bfloat16) and capability >= FLASH_CAPABILITY:
        return FLASH
    # The other kernel counts the tokens of a window in another way, and older cards have no bfloat16.
    return EFFICIENT if dtype in (torch.float32, torch.float16) and window is None else None


class VarlenAttention(torch.autograd.Function):
    """Attention [1, H, L, D] of a packed row. Saves the row once, and what the kernel keeps."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, kernel: Kernel, scale: float, window: int | None
    ) -> Tensor:
        """q [1, H, L, D]; k and v [1, K, L, D]."""
        query = q[0].transpose(0, 1)  # [L, H, D]
        out, kept = kernel.forward(query, sequences.gather(k), sequences.gather(v), sequences, scale, window)
        ctx.save_for_backward(q, k, v, out, *kept)
        ctx.rest = sequences, kernel, scale, window
        return out.transpose(0, 1)[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Gradients of queries, keys and values."""
        q, k, v, out, *kept = ctx.saved_tensors
        sequences, kernel, scale, window = ctx.rest
        keys, values = sequences.gather(k), sequences.gather(v)
        given = grad[0].transpose(0, 1).contiguous(), q[0].transpose(0, 1), keys, values, out, tuple(kept)
        wished, only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        # Where deterministic kernels are wished for, insist: both kernels then add up gradients in a fixed order, otherwise not.
        torch.use_deterministic_algorithms(wished, warn_only=only and not wished)
        try:
            dq, dk, dv = kernel.backward(*given, sequences, scale, window)
        finally:
            torch.use_deterministic_algorithms(wished, warn_only=only)
        return dq.transpose(0, 1)[None], sequences.scatter(dk), sequences.scatter(dv), None, None, None, None


def _windowed(window: int | None) -> dict[str, int]:
    # A query sees window - 1 tokens to its left and none to its right; -1 sets no limit.
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, window: int | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    # The kernel lets several query heads share a key head by itself.
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, sequences.query_ends, sequences.key_ends, sequences.max_query, sequences.max_key, 0.0, window is None, False,
        scale=scale, **_windowed(window),
    )  # fmt: skip
    return out, (lse, state, unused)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: tuple[Tensor, ...], sequences: Sequences, scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lse, state, unused = kept
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, sequences.query_ends, sequences.key_ends, sequences.max_query, sequences.max_key, 0.0,
        window is None, state, unused, scale=scale, **_windowed(window),
    )  # fmt: skip
    return dq, dk, dv


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, _: None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
        q[None], repeat_heads(k, q)[None], repeat_heads(v, q)[None], None, sequences.query_ends, sequences.key_ends,
        sequences.max_query, sequences.max_key, 0.0, BOTTOM_RIGHT, True, scale=scale,
    )  # fmt: skip
    return out[0], (lse, seed, offset)


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: tuple[Tensor, ...], sequences: Sequences, scale: float,
    _: None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lse, seed, offset = kept
    dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
        grad[None], q[None], repeat_heads(k, q)[None], repeat_heads(v, q)[None], None, out[None], sequences.query_ends,
        sequences.key_ends, sequences.max_query, sequences.max_key, lse, 0.0, seed, offset, BOTTOM_RIGHT, False, scale=scale,
    )  # fmt: skip
    return dq[0], sum_heads(dk[0], k), sum_heads(dv[0], v)


def repeat_heads(keys: Float[Tensor, "N K *D"], like: Float[Tensor, "_ H ..."]) -> Float[Tensor, "N H *D"]:
    """One copy of each key head for each query head that shares it, for kernels that know no grouped-query attention."""
    times = like.shape[1] // keys.shape[1]
    return keys if times == 1 else keys.repeat_interleave(times, dim=1)


def sum_heads(grad: Float[Tensor, "N H *D"], like: Float[Tensor, "N K *D"]) -> Float[Tensor, "N K *D"]:
    """Gradient of `repeat_heads`: the sum over the copies."""
    # [N, H, *D] -> [N, K, H / K, *D] -> [N, K, *D]
    return grad if grad.shape == like.shape else grad.unflatten(1, (like.shape[1], -1)).sum(2)


FLASH = Kernel(_flash_forward, _flash_backward)
EFFICIENT = Kernel(_efficient_forward, _efficient_backward)

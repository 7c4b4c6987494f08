"""Completions and their prompts as padded tensors.

Prompts are padded on the left, completions on the right, so that a prompt's last token and its completion's first one meet. A
prompt shared by several completions stands once; `prompt_of` says which row of the prompts a completion belongs to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """P different prompts and N completions of them."""

    prompt_ids: Int[Tensor, "P S"]
    prompt_mask: Bool[Tensor, "P S"]
    prompt_of: Int[Tensor, " N"]
    completion_ids: Int[Tensor, "N T"]
    completion_mask: Bool[Tensor, "N T"]


def token_batch(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], prompt_of: Sequence[int], *, device: torch.device
) -> TokenBatch:
    """Pad into one batch; only prompts that some completion belongs to are taken along."""
    used = sorted(set(prompt_of))
    row = {prompt: index for index, prompt in enumerate(used)}
    prompt_ids, prompt_mask = pad([prompts[index] for index in used], left=True)
    completion_ids, completion_mask = pad(completions, left=False)
    return TokenBatch(
        prompt_ids=prompt_ids.to(device),
        prompt_mask=prompt_mask.to(device),
        prompt_of=torch.tensor([row[index] for index in prompt_of], device=device),
        completion_ids=completion_ids.to(device),
        completion_mask=completion_mask.to(device),
    )


def pad(rows: Sequence[Sequence[int]], *, left: bool) -> tuple[Int[Tensor, "N L"], Bool[Tensor, "N L"]]:
    """Rows of different lengths as one tensor of ids (0 where padded) and one mask; at least one column wide."""
    width = max(1, *(len(row) for row in rows))
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, row in enumerate(rows):
        span = slice(width - len(row), width) if left else slice(0, len(row))
        ids[index, span] = torch.tensor(row, dtype=torch.long)
        mask[index, span] = True
    return ids, mask


def positions(mask: Bool[Tensor, "P S"]) -> Int[Tensor, "P S"]:
    """Position of each token counted from its row's first real token; 0 on left padding."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)

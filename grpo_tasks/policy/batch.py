"""Completions and their prompts as padded tensors.

A prompt shared by several completions stands once; `prompt_of` says which row of the prompts a completion belongs to. Everything
is padded on the right, so that a causal model needs no mask for it. What predicts a completion's first token is the prompt's last
one: it goes through the model with the completions (`inputs`), what is before it is the prompt's `context`.
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

    @property
    def context_ids(self) -> Int[Tensor, "P C"]:
        """Prompts without their last token."""
        return self.prompt_ids[:, :-1]

    @property
    def context_mask(self) -> Bool[Tensor, "P C"]:
        """Tokens of `context_ids` that count."""
        return self.prompt_mask[:, 1:]

    @property
    def last_ids(self) -> Int[Tensor, " P"]:
        """Last token of each prompt."""
        return self.prompt_ids.gather(1, self.prompt_mask.sum(1, keepdim=True) - 1).squeeze(1)

    @property
    def inputs(self) -> Int[Tensor, "N T"]:
        """What predicts `completion_ids`: the prompt's last token, then all of the completion's but its last."""
        return torch.cat([self.last_ids[self.prompt_of][:, None], self.completion_ids[:, :-1]], dim=1)

    @property
    def input_mask(self) -> Bool[Tensor, "N T"]:
        """Tokens of `inputs` that count."""
        return torch.cat([self.completion_mask[:, :1], self.completion_mask[:, :-1]], dim=1)


def token_batch(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], prompt_of: Sequence[int], *, device: torch.device
) -> TokenBatch:
    """Pad into one batch; only prompts that some completion belongs to are taken along."""
    used = sorted(set(prompt_of))
    row = {prompt: index for index, prompt in enumerate(used)}
    prompt_ids, prompt_mask = pad([prompts[index] for index in used], left=False)
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


def position_ids(mask: Bool[Tensor, "P S"]) -> Int[Tensor, "P S"]:
    """Position of each token counted from its row's first real token; padding has the one before it."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)

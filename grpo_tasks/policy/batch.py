"""Prompts and completions as padded tensors.

A prompt that several completions share is stored once; `prompt_of` maps each completion to its row of the prompts. All rows are
padded on the right. A causal model attends to the left only, so no real token ever sees padding, and what the model computes at a
padded position is never read.

A completion's first token is predicted by the last token of its prompt. That token therefore travels with the completions
(`inputs`), and only the tokens before it (`context`) are encoded once per prompt:

    prompt      a b c           context  a b
    completion  x y z           inputs   c x y      predicts x y z
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """P different prompts of at most S tokens, and N completions of at most T tokens."""

    prompt_ids: Int[Tensor, "P S"]
    """Token ids, 0 where padded."""
    prompt_mask: Bool[Tensor, "P S"]
    """True for real tokens."""
    prompt_of: Int[Tensor, " N"]
    """Row of `prompt_ids` that each completion belongs to."""
    completion_ids: Int[Tensor, "N T"]
    """Token ids, 0 where padded."""
    completion_mask: Bool[Tensor, "N T"]
    """True for real tokens."""

    @property
    def context_ids(self) -> Int[Tensor, "P C"]:
        """Prompts without their last token, C = S - 1.

        In a prompt shorter than S the dropped column is padding, so its last token is still there; `context_mask` excludes it.
        """
        return self.prompt_ids[:, :-1]

    @property
    def context_mask(self) -> Bool[Tensor, "P C"]:
        """True for the tokens of `context_ids` that belong to the context."""
        # Shifting the mask by one removes exactly one True per row: that of the prompt's last token, wherever it is.
        return self.prompt_mask[:, 1:]

    @property
    def last_ids(self) -> Int[Tensor, " P"]:
        """The last token of each prompt."""
        last = self.prompt_mask.sum(1, keepdim=True) - 1  # [P, 1]
        return self.prompt_ids.gather(1, last).squeeze(1)

    @property
    def inputs(self) -> Int[Tensor, "N T"]:
        """The tokens that predict `completion_ids`: the prompt's last token, then the completion without its last token."""
        first = self.last_ids[self.prompt_of][:, None]  # [P] -> [N] -> [N, 1]
        return torch.cat([first, self.completion_ids[:, :-1]], dim=1)

    @property
    def input_mask(self) -> Bool[Tensor, "N T"]:
        """True for the real tokens of `inputs`."""
        # Input t predicts token t. Input 0 is real when the completion has a token at all, input t when token t - 1 is real.
        return torch.cat([self.completion_mask[:, :1], self.completion_mask[:, :-1]], dim=1)


def token_batch(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], prompt_of: Sequence[int], *, device: torch.device
) -> TokenBatch:
    """Pad token ids into one batch.

    Args:
        prompts: token ids of the prompts. Those that no completion belongs to are left out.
        completions: token ids of N completions.
        prompt_of: for each completion the index of its prompt in `prompts`.
        device: where the tensors are placed.
    """
    # The microbatch rarely has completions of every prompt; an unused prompt would be encoded for nothing.
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
    """Rows of different lengths as one tensor of ids (0 where padded) and one mask, at least one column wide.

    With `left` the padding comes first, as `generate` of transformers needs it: it continues every row at the last column.
    """
    width = max(1, *(len(row) for row in rows))
    # Any valid token id serves as padding, because it is masked or never read; 0 exists in every vocabulary.
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, row in enumerate(rows):
        span = slice(width - len(row), width) if left else slice(0, len(row))
        ids[index, span] = torch.tensor(row, dtype=torch.long)
        mask[index, span] = True
    return ids, mask


def position_ids(mask: Bool[Tensor, "N L"]) -> Int[Tensor, "N L"]:
    """Position of each token, counted over the real tokens of its row.

    Padding repeats the position before it (0 at the start of a row), which rotary embeddings accept and nothing reads. Counting
    real tokens matters where padding lies inside a row, between a context and its completion.
    """
    # Mask 0 1 1 0 1 gives cumsum 0 1 2 2 3 and positions 0 0 1 1 2.
    return (mask.long().cumsum(-1) - 1).clamp(min=0)

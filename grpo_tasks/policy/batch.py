"""Prompts and completions as padded tensors.

A prompt that several completions share is stored once; `prompt_of` maps each completion to its row of the prompts. All rows are
padded on the right. A causal model attends to the left only, so no real token ever sees padding, and what the model computes at a
padded position is never read.

A completion's first token is predicted by the last token of its prompt. In training all tokens pass through the model as one row
(`packed`). Decoding encodes the tokens before the prompt's last one (`context`) once per prompt, and begins with that last token:

    prompt      a b c           context  a b        packed   a b c x y
    completion  x y z                                            | | |
                                                    predicts     x y z
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    packed: "PackedTokens"
    """The same tokens as one row without padding."""

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

    def contexts_padded_left(self) -> tuple[Int[Tensor, "P C"], Bool[Tensor, "P C"]]:
        """Prompts without their last token, with the padding before them, and True for their tokens."""
        missing = (~self.context_mask).sum(1, keepdim=True)  # [P, 1]
        columns = torch.arange(self.context_mask.shape[1], device=missing.device) - missing  # [P, C], negative at padding
        return self.context_ids.gather(1, columns.clamp(min=0)), columns >= 0


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """All tokens that pass through the model as one row: [all prompts | all completions without their last token].

    A completion continues its own prompt, so the positions of its tokens count from the end of that prompt.
    """

    ids: Int[Tensor, "1 L"]
    positions: Int[Tensor, "1 L"]
    prompt_lengths: Sequence[int]
    """Tokens of the P prompts."""
    own_lengths: Sequence[int]
    """Tokens of the N completions in the row; 0 for a completion of one token, which its prompt predicts."""
    prompt_of: Sequence[int]
    """Prompt of each of the N completions, on the host."""
    predictors: Int[Tensor, " M"]
    """Place in the row of the token that predicts each completion token, completion by completion."""
    targets: Int[Tensor, " M"]
    """The completion tokens."""


def _packed(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], prompt_of: Sequence[int], device: torch.device
) -> PackedTokens:
    # Made on the host and moved once: a read of a mask on the device would make the host wait for it.
    sizes = [len(prompt) for prompt in prompts]
    ends = list(accumulate(sizes))
    ids = [token for prompt in prompts for token in prompt]
    positions = [position for size in sizes for position in range(size)]
    predictors: list[int] = []
    for completion, prompt in zip(completions, prompt_of, strict=True):
        if not completion:
            continue
        # The prompt's last token predicts the first token, each other token the one after it.
        predictors += [ends[prompt] - 1, *range(len(ids), len(ids) + len(completion) - 1)]
        positions += range(sizes[prompt], sizes[prompt] + len(completion) - 1)
        ids += completion[:-1]
    return PackedTokens(
        ids=torch.tensor(ids, device=device)[None],
        positions=torch.tensor(positions, device=device)[None],
        prompt_lengths=sizes,
        own_lengths=[max(0, len(completion) - 1) for completion in completions],
        prompt_of=list(prompt_of),
        predictors=torch.tensor(predictors, dtype=torch.long, device=device),
        targets=torch.tensor([token for completion in completions for token in completion], dtype=torch.long, device=device),
    )


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
    rows = [row[index] for index in prompt_of]
    prompt_ids, prompt_mask = pad([prompts[index] for index in used], left=False)
    completion_ids, completion_mask = pad(completions, left=False)
    return TokenBatch(
        prompt_ids=prompt_ids.to(device),
        prompt_mask=prompt_mask.to(device),
        prompt_of=torch.tensor(rows, device=device),
        completion_ids=completion_ids.to(device),
        completion_mask=completion_mask.to(device),
        packed=_packed([prompts[index] for index in used], completions, rows, device),
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

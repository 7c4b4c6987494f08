"""Prompts and completions as padded tensors.

A prompt that several completions share is stored once; `prompt_of` maps each completion to its row of the prompts. All rows are
padded on the right: a causal model attends to the left only, so no real token ever sees padding.

A completion's first token is predicted by the last token of its prompt. In training all tokens pass through the model as one row
(`packed`). Decoding encodes the tokens before the prompt's last one (`context`) once per prompt, and begins with that last token:

    prompt      a b c           context  a b        packed   a b c x y
    completion  x y z                                            | | |
                                                    predicts     x y z

In training, completions of a prompt that begin alike continue one stem: the prompt with their common start
(attention/common_start.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from grpo_tasks.attention.common_start import Branch, branches


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """P different prompts of at most S tokens, and N completions of at most T tokens."""

    prompt_ids: Int[Tensor, "P S"]
    """Token ids, 0 where padded; the masks are True for real tokens."""
    prompt_mask: Bool[Tensor, "P S"]
    prompt_of: Int[Tensor, " N"]
    """Row of `prompt_ids` that each completion belongs to."""
    completion_ids: Int[Tensor, "N T"]
    completion_mask: Bool[Tensor, "N T"]
    completion_cells: Int[Tensor, " M"]
    """The same as places in the flattened mask, row by row."""
    packed: "PackedTokens"
    """The same tokens as one row without padding."""

    @property
    def context_ids(self) -> Int[Tensor, "P C"]:
        """Prompts without their last token, C = S - 1; in a short one it is still there, and `context_mask` excludes it."""
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
    """All tokens that pass through the model as one row: [all stems | all own parts].

    A stem is a prompt, with the common start of its completions where they share one. The own part of a completion is what
    follows, without its last token, which predicts nothing; its positions count from its stem's end.
    """

    ids: Int[Tensor, "1 L"]
    positions: Int[Tensor, "1 L"]
    stem_lengths: Sequence[int]
    """Tokens of each stem."""
    tail_lengths: Sequence[int]
    """Tokens at the end of each stem that may predict a token: the last of the prompt, and the common start."""
    own_lengths: Sequence[int]
    """Tokens of the N own parts, in the order of the row; 0 for a completion that its stem predicts completely."""
    stem_of: Sequence[int]
    """Stem of each own part, on the host."""
    predictors: Int[Tensor, " U"]
    """Places in the row whose hidden state predicts a token."""
    targets: Int[Tensor, " U"]
    """The predicted tokens."""
    predicting: Int[Tensor, " R"]
    """The places of `predictors` in the order of the row, each once: several completions may follow one token."""
    scores_of: Int[Tensor, " M"] | None
    """Which of the U predictions is that of each completion token, completion by completion; None: each has its own, in order."""


def _packed(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    prompt_of: Sequence[int],
    device: torch.device,
    *,
    share_starts: bool,
) -> PackedTokens:
    # Made on the host and moved once: a read of a mask on the device would make the host wait for it.
    ids: list[int] = []
    positions: list[int] = []
    stem_lengths: list[int] = []
    own_lengths: list[int] = []
    stem_of: list[int] = []
    found = _divided(prompts, completions, prompt_of, share_starts=share_starts)
    # The place of the last prompt token of each stem, which predicts the first token of its completions.
    firsts = []
    for prompt, branch in found:
        # A shorter one may end within the common start.
        start = max((completions[index] for index in branch.members), key=len)[: branch.start]
        firsts.append(len(ids) + len(prompts[prompt]) - 1)
        ids += [*prompts[prompt], *start]
        stem_lengths.append(len(prompts[prompt]) + len(start))
        positions += range(stem_lengths[-1])
    places: list[list[int]] = [[] for _ in completions]
    for stem, (_, branch) in enumerate(found):
        for index in branch.members:
            size, first, place, begin = len(completions[index]), firsts[stem], len(ids), stem_lengths[stem]
            own = completions[index][branch.start : -1]
            ids += own
            positions += range(begin, begin + len(own))
            own_lengths.append(len(own))
            stem_of.append(stem)
            inside = min(size, branch.start + 1)  # tokens that the stem predicts
            places[index] = [*range(first, first + inside), *range(place, place + size - inside)]
    predictors = [place for each in places for place in each]
    targets = [token for completion in completions for token in completion]
    scores_of = None
    if share_starts:
        # The head is the most expensive layer of a small model: a token that several completions share passes through it once.
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(zip(predictors, targets, strict=True)))}
        if len(numbers) < len(targets):
            scores_of = [numbers[pair] for pair in zip(predictors, targets, strict=True)]
            predictors, targets = ([*each] for each in zip(*numbers, strict=True))
    return PackedTokens(
        ids=moved(torch.tensor(ids), device)[None],
        positions=moved(torch.tensor(positions), device)[None],
        stem_lengths=stem_lengths,
        tail_lengths=[length - len(prompts[prompt]) + 1 for length, (prompt, _) in zip(stem_lengths, found, strict=True)],
        own_lengths=own_lengths,
        stem_of=stem_of,
        predictors=moved(torch.tensor(predictors, dtype=torch.long), device),
        targets=moved(torch.tensor(targets, dtype=torch.long), device),
        predicting=moved(torch.tensor(sorted(set(predictors)), dtype=torch.long), device),
        scores_of=None if scores_of is None else moved(torch.tensor(scores_of), device),
    )


def _divided(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], prompt_of: Sequence[int], *, share_starts: bool
) -> list[tuple[int, Branch]]:
    """Each prompt with its branches."""
    members: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompt_of):
        members[prompt].append(index)
    if not share_starts:
        return [(prompt, Branch(0, group)) for prompt, group in enumerate(members)]
    return [
        (prompt, Branch(branch.start, [group[member] for member in branch.members]))
        for prompt, group in enumerate(members)
        for branch in branches(len(prompts[prompt]), [completions[index] for index in group])
    ]


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. The host does not wait for the copy, for which CUDA needs pinned memory."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def token_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    prompt_of: Sequence[int],
    *,
    device: torch.device,
    share_starts: bool = False,
) -> TokenBatch:
    """The batch of N completions and their prompts; with `share_starts` a common start is computed once."""
    # The microbatch rarely has completions of every prompt; an unused prompt would be encoded for nothing.
    used = sorted(set(prompt_of))
    row = {prompt: index for index, prompt in enumerate(used)}
    rows = [row[index] for index in prompt_of]
    prompt_ids, prompt_mask = pad([prompts[index] for index in used], left=False)
    completion_ids, completion_mask = pad(completions, left=False)
    return TokenBatch(
        prompt_ids=moved(prompt_ids, device),
        prompt_mask=moved(prompt_mask, device),
        prompt_of=moved(torch.tensor(rows), device),
        completion_ids=moved(completion_ids, device),
        completion_mask=moved(completion_mask, device),
        # Found on the host: on a GPU, finding them would make the host wait for their number.
        completion_cells=moved(completion_mask.flatten().nonzero()[:, 0], device),
        packed=_packed([prompts[index] for index in used], completions, rows, device, share_starts=share_starts),
    )


def pad(rows: Sequence[Sequence[int]], *, left: bool) -> tuple[Int[Tensor, "N L"], Bool[Tensor, "N L"]]:
    """Rows of different lengths as one tensor of ids, 0 where padded, and one mask, at least one column wide."""
    lengths = [len(row) for row in rows]
    sizes, columns = torch.tensor(lengths)[:, None], torch.arange(max(1, *lengths))
    mask = columns >= len(columns) - sizes if left else columns < sizes  # [N, L]
    # Any valid token id serves as padding, because it is masked or never read; 0 exists in every vocabulary.
    return fill(rows, mask, torch.long), mask


def fill(rows: Sequence[Sequence[float]], mask: Bool[Tensor, "N L"], dtype: torch.dtype) -> Shaped[Tensor, "N L"]:
    """The numbers of each row in the cells of the mask, in their order, and 0 elsewhere."""
    filled = torch.zeros(mask.shape, dtype=dtype)
    # One tensor of all numbers: one for each row would take most of the time that it takes to assemble a batch.
    filled[mask] = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return filled


def position_ids(mask: Bool[Tensor, "N L"]) -> Int[Tensor, "N L"]:
    """Position of each token, counted over the real tokens of its row: padding may lie between a context and its completion."""
    # Padding repeats the position before it, 0 at the start, which rotary embeddings accept and nothing reads.
    # Mask 0 1 1 0 1 gives cumsum 0 1 2 2 3 and positions 0 0 1 1 2.
    return (mask.long().cumsum(-1) - 1).clamp(min=0)

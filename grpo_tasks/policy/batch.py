"""Prompts and completions as padded tensors.

A prompt that several completions share is stored once; `prompt_of` maps each completion to its row of the prompts. All rows are
padded on the right: a causal model attends to the left only, so no real token ever sees padding.

A completion's first token is predicted by the last token of its prompt. In training all tokens pass through the model as one row
(`packed`). Decoding encodes the tokens before the prompt's last one (`context`) once per prompt, and begins with that last token:

    prompt      a b c           context  a b        packed   a b c x y
    completion  x y z                                            | | |
                                                    predicts     x y z

In training, completions of a prompt that begin alike continue one stem, the prompt with their common start (`branches`):

    completion 1   a b c x          stem  [prompt | a b]    own parts  c x | c y | d
    completion 2   a b c y    -->
    completion 3   a b d            (two stems where repeating the prompt costs less than repeating a longer common start)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby, pairwise

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from grpo_tasks.kit.pinned import moved

MAX_LEVELS = 32
"""How often a branch is looked into for further ones; conversations rarely branch more often."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Completions, by their indices, that continue one stem: `start` tokens that all of them begin with belong to it."""

    start: int
    members: Sequence[int]


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
    """The True cells of the flattened mask, row by row."""
    packed: "PackedTokens"
    """The same tokens as one row without padding."""

    @property
    def context_ids(self) -> Int[Tensor, "P C"]:
        """Prompts without their last token, C = S - 1; in a short row it is still there, and `context_mask` excludes it."""
        return self.prompt_ids[:, :-1]

    @property
    def context_mask(self) -> Bool[Tensor, "P C"]:
        """Which of `context_ids` belong to the context."""
        # Shifting the mask by one removes exactly one True per row: that of the prompt's last token, wherever it is.
        return self.prompt_mask[:, 1:]

    @property
    def last_ids(self) -> Int[Tensor, " P"]:
        """Of each prompt."""
        last = self.prompt_mask.sum(1, keepdim=True) - 1  # [P, 1]
        return self.prompt_ids.gather(1, last).squeeze(1)

    def contexts_padded_left(self) -> tuple[Int[Tensor, "P C"], Bool[Tensor, "P C"]]:
        """Prompts without their last token, behind their padding, and their mask."""
        missing = (~self.context_mask).sum(1, keepdim=True)  # [P, 1]
        columns = torch.arange(self.context_mask.shape[1], device=missing.device) - missing  # [P, C], negative at padding
        return self.context_ids.gather(1, columns.clamp(min=0)), columns >= 0


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """All tokens that pass through the model as one row: [all stems | all own parts].

    The own part of a completion is what follows its stem, without its last token, which predicts nothing; its positions count
    from the stem's end.
    """

    ids: Int[Tensor, "1 L"]
    positions: Int[Tensor, "1 L"]
    stem_lengths: Sequence[int]
    tail_lengths: Sequence[int]
    """Tokens at the end of each stem that may predict a token: the last of the prompt, and the common start."""
    own_lengths: Sequence[int]
    """Of the N own parts, in the order of the row; 0 for a completion that its stem predicts completely."""
    stem_of: Sequence[int]
    """Of each own part."""
    predictors: Int[Tensor, " U"]
    """Places in the row whose hidden state predicts a token."""
    targets: Int[Tensor, " U"]
    predicting: Int[Tensor, " R"]
    """The places of `predictors` in the order of the row, each once: several completions may follow one token."""
    scores_of: Int[Tensor, " M"] | None
    """Which of the U predictions is that of each completion token, completion by completion; None: each has its own, in order."""


def _packed(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    found: Sequence[tuple[int, Branch]],
    device: torch.device,
    *,
    share_starts: bool,
) -> PackedTokens:
    """The row of prompts with their branches."""
    # Made on the host and moved once: a read of a mask on the device would make the host wait for it.
    ids: list[int] = []
    positions: list[int] = []
    stem_lengths: list[int] = []
    own_lengths: list[int] = []
    stem_of: list[int] = []
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


def token_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    prompt_of: Sequence[int],
    *,
    device: torch.device,
    share_starts: bool = False,
) -> TokenBatch:
    """The batch of completions and their prompts; with `share_starts` a common start is computed once."""
    # The microbatch rarely has completions of every prompt; an unused prompt would be encoded for nothing.
    used = sorted(set(prompt_of))
    row = {prompt: index for index, prompt in enumerate(used)}
    rows = [row[index] for index in prompt_of]
    members: list[list[int]] = [[] for _ in used]
    for index, number in enumerate(rows):
        members[number].append(index)
    stems: list[tuple[int, Branch]] = []
    for number, group in enumerate(members):
        parts = [Branch(0, range(len(group)))]
        if share_starts:
            parts = branches(len(prompts[used[number]]), [completions[index] for index in group])
        stems += [(number, Branch(part.start, [group[member] for member in part.members])) for part in parts]
    # Two columns at least: models cannot encode the context of prompts of a single token, which has none.
    prompt_ids, prompt_mask = pad([prompts[index] for index in used], left=False, least=2)
    completion_ids, completion_mask = pad(completions, left=False)
    return TokenBatch(
        prompt_ids=moved(prompt_ids, device),
        prompt_mask=moved(prompt_mask, device),
        prompt_of=moved(torch.tensor(rows), device),
        completion_ids=moved(completion_ids, device),
        completion_mask=moved(completion_mask, device),
        # Found on the host: on a GPU, finding them would make the host wait for their number.
        completion_cells=moved(completion_mask.flatten().nonzero()[:, 0], device),
        packed=_packed([prompts[index] for index in used], completions, stems, device, share_starts=share_starts),
    )


def pad(rows: Sequence[Sequence[int]], *, left: bool, least: int = 1) -> tuple[Int[Tensor, "N L"], Bool[Tensor, "N L"]]:
    """Ids of rows of different lengths, 0 where padded, and their mask, at least `least` columns wide."""
    lengths = [len(row) for row in rows]
    sizes, columns = torch.tensor(lengths)[:, None], torch.arange(max(least, *lengths))
    mask = columns >= len(columns) - sizes if left else columns < sizes  # [N, L]
    # Any valid token id serves as padding, because it is masked or never read; 0 exists in every vocabulary.
    return fill(rows, mask, torch.long), mask


def fill(rows: Sequence[Sequence[float]], mask: Bool[Tensor, "N L"], dtype: torch.dtype) -> Shaped[Tensor, "N L"]:
    """The numbers of the rows in the cells of the mask, and 0 elsewhere."""
    filled = torch.zeros(mask.shape, dtype=dtype)
    # One tensor of all numbers: one for each row would take most of the time that it takes to assemble a batch.
    filled[mask] = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return filled


def position_ids(mask: Bool[Tensor, "N L"]) -> Int[Tensor, "N L"]:
    """Position of each token, counted over the real tokens of its row: padding may lie between a context and its completion."""
    # Padding repeats the position before it, 0 at the start, which rotary embeddings accept and nothing reads.
    # Mask 0 1 1 0 1 gives cumsum 0 1 2 2 3 and positions 0 0 1 1 2.
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


@dataclass(frozen=True, slots=True)
class _Division:
    """A part of the completions, divided."""

    tokens: int
    """Tokens that are computed for it, those of its stems included."""
    branches: Sequence[Branch] = ()
    above: Sequence[int] = ()
    """Members that continue the stem above."""


def branches(prompt_tokens: int, completions: Sequence[Sequence[int]]) -> list[Branch]:
    """The division of the completions of a prompt that computes the fewest tokens; each branch repeats the prompt."""
    # The last token predicts nothing, so it is not computed and need not be shared.
    texts = [list(completion[:-1]) for completion in completions]
    order = sorted(range(len(texts)), key=texts.__getitem__)
    ordered = [texts[index] for index in order]

    @cache
    def divided(places: tuple[int, ...], above: int | None, level: int) -> _Division:
        """The best division of these places, below a stem with `above` tokens of their start, if there is one."""
        if len(places) == 1 and above is not None:
            # A stem of its own would repeat the prompt for nothing. Most divisions are of one completion.
            return _Division(max(0, len(ordered[places[0]]) - above), above=[order[places[0]]])
        start = _common_start([ordered[place] for place in places])
        ways = _parts(ordered, places, start) if level < MAX_LEVELS else []

        def best(depth: int | None) -> _Division:
            found = []
            for parts in ways:
                each = [divided(part, depth, level + 1) for part in parts]
                inside = [branch for division in each for branch in division.branches]
                above = [member for division in each for member in division.above]
                found.append(_Division(sum(division.tokens for division in each), inside, above))
            return min(found, key=lambda division: division.tokens)

        def below(depth: int) -> _Division:
            if ways:
                return best(depth)
            return _Division(
                sum(max(0, len(ordered[place]) - depth) for place in places), above=[order[place] for place in places]
            )

        inner = below(start)
        with_stem = _Division(prompt_tokens + start + inner.tokens, [Branch(start, sorted(inner.above)), *inner.branches])
        if above is None:
            return min([with_stem, *([best(None)] if ways else [])], key=lambda division: division.tokens)
        return min(below(above), with_stem, key=lambda division: division.tokens)

    # A stem that nothing continues is the cheaper choice only by its absence, so none is empty.
    return list(divided(tuple(range(len(order))), None, 0).branches)


def _parts(ordered: Sequence[Sequence[int]], places: tuple[int, ...], start: int) -> list[list[tuple[int, ...]]]:
    """Ways to divide places into those whose texts have the same token behind the common start; none where all have.

    A text that ends within the start costs nothing below a stem that holds it, so each part in turn gets all of these.
    """
    short = tuple(place for place in places if len(ordered[place]) <= start)
    parts = [tuple(part) for _, part in groupby(places[len(short) :], key=lambda place: ordered[place][start])]
    if len(parts) < 2:
        return []
    return [
        [short + part if number == chosen else part for number, part in enumerate(parts)]
        for chosen in range(len(parts) if short else 1)
    ]


def _common_start(ordered: Sequence[Sequence[int]]) -> int:
    """Tokens with which all texts begin as far as they go; a text that another one continues adds no limit."""
    open_ended = [one for one, following in pairwise(ordered) if one != following[: len(one)]] + [ordered[-1]]
    # Where any two differ, the first and the last one in the order of texts differ too.
    first, last = open_ended[0], open_ended[-1]
    return next((place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(last))

"""Which completions of a prompt begin alike, so that their common start is computed once. Knows token ids only.

completion 1   a b c x          stem  [prompt | a b]    own parts  c x | c y | d
completion 2   a b c y    -->
completion 3   a b d            (two stems where repeating the prompt costs less than repeating a longer common start)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise

MAX_LEVELS = 32
"""How often a branch is looked into for further ones; conversations rarely branch more often."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Completions, by their indices, that continue one stem: `start` tokens that all of them begin with belong to it."""

    start: int
    members: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Division:
    """A part of the completions, divided."""

    tokens: int
    """Tokens that are computed for it, those of its stems included."""
    branches: Sequence[Branch] = ()
    above: Sequence[int] = ()
    """Members that continue the stem above."""


def branches(prompt_tokens: int, completions: Sequence[Sequence[int]]) -> list[Branch]:
    """The division of the completions of one prompt with which the fewest tokens are computed; each branch repeats the prompt."""
    # The last token predicts nothing, so it is not computed and need not be shared.
    texts = [list(completion[:-1]) for completion in completions]
    order = sorted(range(len(texts)), key=texts.__getitem__)
    ordered = [texts[index] for index in order]

    @cache
    def divided(places: tuple[int, ...], above: int | None, level: int) -> _Division:
        """The best division of these places of the order, below a stem with `above` tokens of their start, if there is one."""
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

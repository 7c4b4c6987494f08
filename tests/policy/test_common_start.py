"""The common start of completions: every token once where that is cheaper, and no token twice in the count."""

from collections.abc import Iterator, Sequence
from itertools import takewhile, zip_longest

from hypothesis import example, given
from hypothesis import strategies as st

from grpo_tasks.policy.batch import Branch, branches

# Few different tokens, so that many completions begin alike.
GROUPS = st.lists(st.lists(st.integers(0, 1), max_size=7), min_size=1, max_size=5)


@given(GROUPS, st.integers(1, 6))
def test_every_completion_is_in_one_branch_and_begins_with_its_start(completions, prompt_tokens):
    found = branches(prompt_tokens, completions)

    assert sorted(index for branch in found for index in branch.members) == list(range(len(completions)))
    for branch in found:
        # Without the last token, which is not computed; a text may end within the start.
        texts = [completions[index][:-1] for index in branch.members]
        longest = max(texts, key=len)
        assert branch.start <= len(longest)
        assert all(text[: branch.start] == longest[: min(branch.start, len(text))] for text in texts)


@given(GROUPS, st.integers(1, 6))
# [0] costs nothing with the two that it begins, and one token with the others.
@example([[0, 0], [1, 0], [0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0]], 1)
def test_no_other_division_computes_fewer_tokens(completions, prompt_tokens):
    cheapest = min(
        sum(tokens(prompt_tokens, completions, block) for block in blocks) for blocks in divisions(list(range(len(completions))))
    )

    found = branches(prompt_tokens, completions)

    assert sum(prompt_tokens + branch.start + own(completions, branch) for branch in found) == cheapest


def test_a_repeated_prompt_is_weighed_against_a_repeated_start():
    turns = [[1] * 20 + [7, 8], [1] * 20 + [9, 8], [2] * 20 + [7, 8], [2] * 20 + [9, 8]]

    assert branches(5, turns) == [Branch(20, [0, 1]), Branch(20, [2, 3])]
    assert branches(50, turns) == [Branch(0, [0, 1, 2, 3])]


def test_equal_completions_are_computed_once():
    assert branches(3, [[4, 5, 6]] * 3) == [Branch(2, [0, 1, 2])]


def test_thousands_of_nested_completions_are_divided():
    completions = [[1] * length for length in range(1, 1500)]

    assert sum(len(branch.members) for branch in branches(3, completions)) == len(completions)


def own(completions: Sequence[Sequence[int]], branch: Branch) -> int:
    return sum(max(0, len(completions[index]) - 1 - branch.start) for index in branch.members)


def tokens(prompt_tokens: int, completions: Sequence[Sequence[int]], block: list[int]) -> int:
    """Tokens of a block with its longest common start, counted from the definition."""
    texts = [completions[index][:-1] for index in block]
    columns = (set(column) - {None} for column in zip_longest(*texts))
    start = len(list(takewhile(lambda tokens: len(tokens) == 1, columns)))
    return prompt_tokens + start + sum(max(0, len(text) - start) for text in texts)


def divisions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to divide items into blocks."""
    if not items:
        yield []
        return
    first, *rest = items
    for blocks in divisions(rest):
        yield [[first], *blocks]
        for index in range(len(blocks)):
            yield [*blocks[:index], [first, *blocks[index]], *blocks[index + 1 :]]

"""The contract of extraction, case by case and on soups of tags."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.answers.extract import read_tags
from grpo_tasks.answers.extraction import is_blank
from schemas.config.completion import CompletionConfig

TAGS = CompletionConfig()
HONEST = "<reasoning>15 + 27 = 42</reasoning><answer>42</answer>"

plain_text = st.text(st.characters(exclude_characters="<>", exclude_categories=["Cs"]), max_size=60)
visible_text = plain_text.filter(lambda text: not is_blank(text))
soup = st.lists(
    st.one_of(st.sampled_from(TAGS.tags.in_order), plain_text, st.sampled_from(["<", ">", "</", "42", "\n"])), max_size=14
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<answer>42</answer>",
        "<reasoning>w</reasoning>42",
        "<answer>42</answer><reasoning>w</reasoning>",
        "<reasoning>w</reasoning> so <answer>42</answer>",
        "Well: <reasoning>w</reasoning><answer>42</answer>",
        "<reasoning>w</reasoning><answer>42</answer>!",
        "<REASONING>w</REASONING><ANSWER>42</ANSWER>",
        "<reasoning>w</reasoning><answer><answer>42</answer></answer>",
        "<reasoning>w<answer>42</answer></reasoning>",
        "<reasoning>w</reasoning><answer>42",
        "<reasoning></reasoning><answer>42</answer>",
        "<reasoning>w</reasoning><answer>\u200b\u2800</answer>",
        HONEST * 2,
    ],
)
def test_anything_else_breaks_the_format(text):
    assert not read_tags(text, TAGS).strict_format


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("w <answer> 42\n</answer> and on", "42"),
        ("<answer>42</answer><reasoning>w</reasoning>", "42"),
        ("<reasoning>w<answer>42</answer></reasoning>", None),
        ("<reasoning>w<answer>42</answer>", None),
        ("w<answer>42</answer></reasoning>", None),
        ("<answer>41</answer><answer>42</answer>", None),
        ("<answer><answer>42</answer></answer>", None),
        ("<answer>42<reasoning>w</reasoning></answer>", None),
        ("</answer>42<answer>", None),
        ("<answer>42", None),
    ],
)
def test_the_answer_is_the_one_block_outside_the_reasoning(text, answer):
    assert read_tags(text, TAGS).answer == answer


@pytest.mark.parametrize(
    ("text", "lenient"),
    [
        ("<answer>41</answer> no, <answer>42</answer>", "42"),
        ("<reasoning>w<answer>42</answer></reasoning>", "42"),
        ("<reasoning>w</reasoning><answer>42", "42"),
        ("<reasoning>7</reasoning>The sum is 1,042.", "1,042"),
        ("It is -5.", "-5"),
        ("54-21=33", "33"),
        ("ten 54-21", "21"),
        ("<reasoning>7</reasoning>", None),
        ("<answer>42</answer><answer> </answer>", None),
        ("42" + " and so on" * 1_000, None),
    ],
)
def test_the_lenient_answer_is_the_last_block_or_the_last_number(text, lenient):
    assert read_tags(text, TAGS).lenient_answer == lenient


def test_tags_are_parameters():
    tags = CompletionConfig(tags={"reasoning": "think", "answer": "final"})
    found = read_tags("<think>w</think><final>42</final>", tags)
    assert (found.strict_format, found.answer) == (True, "42")
    assert read_tags(HONEST, tags).answer is None


@pytest.mark.parametrize(
    ("text", "in_place"),
    [
        (HONEST, 4),
        ("<reasoning>w</reasoning>", 2),
        ("<reasoning>w", 1),
        ("</reasoning>w<reasoning>", 1),
        ("<answer>42</answer><reasoning>w</reasoning>", 2),
        ("<reasoning>w<answer>42</answer></reasoning>", 2),
        ("<reasoning></reasoning><answer>42</answer>", 2),
        ("<reasoning>w</reasoning><answer><answer>42</answer>", 3),
    ],
)
def test_a_tag_is_in_place_once_and_after_those_before_it(text, in_place):
    assert read_tags(text, TAGS).ordered_tags == in_place


@pytest.mark.parametrize("text", ["", " \n", "\u200b", "<reasoning>", "<reasoning></answer>", "w<answer></answer>", HONEST * 2])
def test_empty_and_stuffed_completions_are_worthless(text):
    assert read_tags(text, TAGS).worthless


@given(visible_text, visible_text, st.sampled_from(["", "\n", "  "]))
def test_every_honest_completion_keeps_the_format_and_gives_its_answer(work, answer, between):
    found = read_tags(f"{between}<reasoning>{work}</reasoning>{between}<answer>{answer}</answer>{between}", TAGS)
    assert found.strict_format
    assert not found.worthless
    assert found.answer == found.lenient_answer == answer.strip()
    assert found.reasoning == work


@given(soup)
def test_no_soup_of_tags_breaks_the_promises(parts):
    text = "".join(parts)
    found = read_tags(text, TAGS)
    counts = [text.count(tag) for tag in TAGS.tags.in_order]
    if found.strict_format:
        assert counts == [1, 1, 1, 1]
        assert found.answer
        assert not found.worthless
        assert found.ordered_tags == 4
    if found.answer is not None:
        assert counts[2:] == [1, 1]
        assert not is_blank(found.answer)
        assert not any(tag in found.answer for tag in TAGS.tags.in_order)
    assert found.stuffed == (max(counts) > 1)
    assert 0 <= found.ordered_tags <= 4
    assert found.lenient_answer is None or not is_blank(found.lenient_answer)


@given(soup, st.sampled_from([HONEST, "<answer>42</answer>"]))
def test_a_second_block_takes_the_answer_away(parts, block):
    assert read_tags("".join([block, *parts, block]), TAGS).answer is None

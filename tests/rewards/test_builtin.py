"""The built-in rewards: what they pay, what they never pay, and how long they may take."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.answers.extraction import is_blank
from grpo_tasks.lab.probes import long_texts
from grpo_tasks.rewards.builtin import BUILTIN, FULL_SCORES
from schemas.config.completion import CompletionConfig, TagsConfig
from schemas.config.rewards import BUILTIN_REWARDS

TAGS = TagsConfig()
OF_TEXT = [name for name in BUILTIN if name != "environment"]
"""The reward of an environment is that of the environment, whatever the text."""
LONG, SHORTER = long_texts(TAGS, 1_000_000), long_texts(TAGS, 100_000)
BLANK = ("long_blanks", "long_invisible", "long_newlines")
HONEST = "<reasoning>15 + 27 = 42</reasoning><answer>42</answer>"

plain_text = st.text(st.characters(exclude_characters="<>", exclude_categories=["Cs"]), max_size=60)
work_text = st.lists(st.text("abcdefgh0123456789+=", min_size=1, max_size=8), min_size=4, max_size=20, unique=True).map(" ".join)
soup = st.lists(st.one_of(st.sampled_from(TAGS.in_order), plain_text, st.just("42")), max_size=14).map("".join)


def score(name: str, *texts: str, answer: str = "42", **params: object) -> list[float]:
    given = {} if name == "repetition" else {"completion": CompletionConfig()}
    if name == "soft_overlong":
        given = {"completion_ids": [[0] * len(text) for text in texts], "max_completion_length": 9_000}
        given |= {"soft_punish_cache": 1_000}
    return BUILTIN[name]([None] * len(texts), list(texts), answer=[answer] * len(texts), **(given | params))


def total(text: str, answer: str = "42") -> float:
    return sum(score(name, text, answer=answer)[0] * weight for name, weight in BUILTIN_REWARDS.items() if name in OF_TEXT)


def test_the_configuration_knows_exactly_the_functions_there_are():
    assert BUILTIN.keys() == BUILTIN_REWARDS.keys()
    assert FULL_SCORES.keys() <= BUILTIN.keys()


@pytest.mark.parametrize("name", OF_TEXT)
def test_an_honest_completion_has_the_full_score_everywhere(name):
    assert score(name, HONEST) == [FULL_SCORES.get(name, 1.0)]


@pytest.mark.parametrize("name", OF_TEXT)
def test_chat_messages_score_like_their_text(name):
    texts = [HONEST, "42", HONEST * 2, ""]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert score(name, *chats) == score(name, *texts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HONEST, 1.0),
        ("<reasoning>w</reasoning>", 0.5),
        ("<reasoning>w</reasoning><answer>42", 0.75),
        (HONEST + "!" * 100, 0.9),
        (HONEST + "!" * 5_000, 0.0),
        ("<reasoning>w<answer>42</answer></reasoning>", 0.5 - 0.012),
        ("".join(TAGS.in_order), 0.0),
        ("".join(TAGS.in_order) * 5, 0.0),
        ("42", 0.0),
    ],
)
def test_incremental_format_pays_a_quarter_a_tag_and_fines_what_follows(text, expected):
    assert score("incremental_format", text) == [pytest.approx(expected)]


def test_length_pays_inside_its_range_and_falls_off_outside():
    texts = ["x" * size for size in (5, 10, 20, 30, 40)]
    assert score("length", *texts, min_length=10, max_length=20) == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    assert score("length", "<reasoning>1234</reasoning>!", min_length=8, max_length=9) == [0.5]


def test_length_in_tokens_counts_the_ids():
    ids = [[1] * 4, [1] * 16]
    assert score("length", "a", "b", completion_ids=ids, unit="tokens", min_length=8, max_length=8) == [0.5, 0.0]


@pytest.mark.parametrize("params", [{"min_length": 0}, {"min_length": 9, "max_length": 8}, {"unit": "words"}, {"unit": "tokens"}])
def test_length_refuses_a_range_that_makes_no_sense(params):
    with pytest.raises(ValueError, match="length"):
        score("length", "a", **params)


def test_repetition_grows_with_the_repeated_share():
    once, twice, often = score("repetition", "a b c d e f", "a b c d a b c d", "so on and " * 50)
    assert once == 0.0
    assert -1.0 <= often < twice < 0.0
    assert score("repetition", "a" * 1_000)[0] < -0.9


def test_repetition_is_searched_at_the_end_of_the_completion_only():
    different = " ".join(map(str, range(20_000)))
    assert len(different) > 100_000
    assert score("repetition", "so on and " * 1_000 + different) == [0.0]
    assert score("repetition", different + "so on and " * 1_000)[0] < -0.1


GAMES = {
    "stuffed": "".join(TAGS.in_order) * 5 + "{answer}",
    "appended tags": "<reasoning>{work}</reasoning><answer>{answer}</answer>" + "".join(TAGS.in_order),
    "repeated block": "<reasoning>{work}</reasoning><answer>{answer}</answer>" * 3,
    "nested": "<reasoning>{work}</reasoning><answer><answer>{answer}</answer></answer>",
    "answer in the reasoning": "<reasoning>{work}<answer>{answer}</answer></reasoning>",
    "two answers": "<reasoning>{work}</reasoning><answer>0</answer><answer>{answer}</answer>",
    "every number": f"<reasoning>{{work}}</reasoning><answer>{' '.join(map(str, range(100)))}</answer>",
    "empty": "",
    "empty blocks": "".join(TAGS.in_order),
    "empty answer": "<reasoning>{work}</reasoning><answer></answer>",
}


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
@given(work=work_text, answer=st.integers(0, 99).map(str))
def test_no_game_earns_what_honest_work_earns(game, work, answer):
    honest = total(f"<reasoning>{work}</reasoning><answer>{answer}</answer>", answer)
    assert total(GAMES[game].format(work=work, answer=answer), answer) < honest


@given(soup)
def test_no_soup_of_tags_earns_more_than_an_honest_completion(text):
    assert total(text) <= total(HONEST)


@given(soup, st.sampled_from(["", " ", "\u200b", "\n\t"]))
def test_an_empty_answer_earns_nothing_ever(text, blank):
    for completion in (blank, f"{text}<answer>{blank}</answer>", f"<reasoning>{text}</reasoning><answer>{blank}</answer>"):
        assert all(score(name, completion)[0] <= 0.0 for name in OF_TEXT)


@given(st.lists(st.one_of(soup, st.text(max_size=100)), max_size=8))
def test_scores_stay_in_their_range_and_do_not_depend_on_the_batch(texts):
    lowest = {"repetition": -1.0, "style": -1.0}
    for name in OF_TEXT:
        scores = score(name, *texts)
        assert all(lowest.get(name, 0.0) <= value <= FULL_SCORES.get(name, 1.0) for value in scores)
        assert scores == [score(name, text)[0] for text in texts]


def test_correctness_reads_the_answer_block_only():
    texts = [HONEST, "<answer>42</answer>", "The answer is 42.", HONEST.replace(">42<", ">41<"), HONEST.replace(">42<", "><")]
    assert score("correctness", *texts) == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("name", OF_TEXT)
def test_the_time_of_a_million_hostile_characters_grows_with_their_number(name, kind):
    text = LONG[kind]
    assert len(text) >= 1_000_000
    assert is_blank(text) == (kind in BLANK)

    def quickest(scored):
        times = []
        for _ in range(3):
            began = time.process_time()
            score(name, scored)
            times.append(time.process_time() - began)
        return min(times)

    # A pattern that goes back makes a hundred times the steps for ten times the characters. The clock counts in milliseconds.
    assert quickest(text) < 30 * max(quickest(SHORTER[kind]), 0.005)


def test_soft_overlong_equals_trl():
    from trl.rewards import get_soft_overlong_punishment

    ids = [[1] * length for length in (0, 1, 79, 80, 81, 90, 99, 100, 101, 500)]
    wanted = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)(completion_ids=ids)
    found = BUILTIN["soft_overlong"]([], [""] * len(ids), ids, max_completion_length=100, soft_punish_cache=20)
    assert found == pytest.approx(wanted)

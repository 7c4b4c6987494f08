"""From raw rows to prompt, ground truth and id."""

from collections.abc import Callable

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.data.judge import Verdict
from grpo_tasks.data.prompts import check_pattern, prompt_id, prompt_ids
from schemas.errors import ConfigError
from schemas.tables import MESSAGES

messages = st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()}), min_size=1, max_size=3)


@given(st.lists(st.tuples(messages, st.text()), max_size=5))
def test_prompt_id_of_a_column_is_the_prompt_id_of_each_row(rows: list[tuple[list[dict[str, str]], str]]) -> None:
    chats = pl.Series([chat for chat, _ in rows], dtype=MESSAGES)
    answers = pl.Series([answer for _, answer in rows], dtype=pl.String)
    assert prompt_ids(chats, answers).to_list() == [prompt_id(chat, answer) for chat, answer in rows]


def test_prompt_id_is_what_it_always_was() -> None:
    # If this changes, every split, every cache and every recorded run loses its rows.
    assert prompt_id([{"role": "user", "content": "What is 15 + 27?"}], "42") == "eab2802808b2e297"


def test_prompt_id_heeds_neither_key_order_nor_other_keys() -> None:
    chat = [{"content": "q", "role": "user"}]
    assert prompt_id(chat, "1") == prompt_id([{"role": "user", "content": "q"}], "1")


@pytest.mark.parametrize("pattern", ["####", "(", "(?=x)(y)", r"(a)\1"])
def test_pattern_that_is_no_linear_pattern_with_a_group_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="pattern") as caught:
        check_pattern(pattern)
    assert "####" in caught.value.fix


@pytest.mark.parametrize(
    ("pattern", "answer", "truth"),
    [
        ("#### (.+)", "so <<1+1=2>>2\n#### 1,234", "1234"),
        ("#### (.+)", "#### 1\n#### 2\r\n", "2"),
        (r"(\d+)", "12 and 345", "345"),
        (r"####\s*([-−]?\d+)", "####\n−7", "-7"),
        (r"\\boxed\{([^}]*)\}", r"first \boxed{1}, then \boxed{x + 1}.", "x + 1"),
        (r"(?m)^(\d+) (?:apples|pears)$", "3 apples\n4 pears", "4"),
    ],
)
def test_last_match_of_the_pattern_is_the_ground_truth(
    write: Callable[..., str], verdict_on: Callable[..., Verdict], pattern: str, answer: str, truth: str
) -> None:
    data = {"train": [{"path": write({"question": "q", "answer": answer})}], "answer_pattern": pattern}
    assert verdict_on(data).accepted["answer"].to_list() == [truth]


def test_system_prompt_leads_every_chat_that_has_none(write: Callable[..., str], verdict_on: Callable[..., Verdict]) -> None:
    own = {"role": "system", "content": "own"}
    rows = [
        {"question": "bare", "answer": "1"},
        {"prompt": [{"role": "user", "content": "chat"}], "answer": "1"},
        {"prompt": [own, {"role": "user", "content": "led"}], "answer": "1"},
    ]
    verdict = verdict_on({"train": [{"path": write(*rows)}], "system_prompt": "ours"})
    ours = {"role": "system", "content": "ours"}
    asked = [{"role": "user", "content": content} for content in ("bare", "chat", "led")]
    assert verdict.accepted["prompt"].to_list() == [[ours, asked[0]], [ours, asked[1]], [own, asked[2]]]

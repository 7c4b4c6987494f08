"""The demo's data: right, disjoint, and the same at every rebuild."""

import json
import operator
import re
from pathlib import Path

import pytest
import yaml

from schemas.paths import resolve
from tests.demo import arithmetic
from tests.demo.arithmetic import EVAL_FILE, PROBE, SYSTEM_PROMPT, TRAIN_FILE, Problem, all_problems, split_problems

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = arithmetic.DEMO
OPERATIONS = {"+": operator.add, "-": operator.sub}


def rows_of(name):
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


def parse(question):
    match = re.fullmatch(r"What is (\d\d) ([+-]) (\d\d)\?", question)
    assert match, question
    return int(match[1]), match[2], int(match[3])


def canonical(question):
    left, sign, right = parse(question)
    return (min(left, right), sign, max(left, right)) if sign == "+" else (left, sign, right)


@pytest.mark.parametrize(("name", "count"), [(TRAIN_FILE, 2048), (EVAL_FILE, 512)])
def test_every_row_asks_two_digits_and_has_the_right_answer(name, count):
    rows = rows_of(name)
    assert len(rows) == count
    for row in rows:
        assert row.keys() == {"question", "answer"}
        left, sign, right = parse(row["question"])
        assert row["answer"] == str(OPERATIONS[sign](left, right))
        assert int(row["answer"]) >= 0


def test_no_problem_stands_in_both_files_whichever_way_round_it_is_written():
    train = {canonical(row["question"]) for row in rows_of(TRAIN_FILE)}
    held_out = {canonical(row["question"]) for row in rows_of(EVAL_FILE)}
    assert (len(train), len(held_out)) == (2048, 512)
    assert not train & held_out
    assert {"question": "What is 15 + 27?", "answer": "42"} in rows_of(EVAL_FILE), "the question of every tutorial"


def test_the_three_parts_cover_the_whole_problem_space_once():
    split = split_problems()
    parts = [canonical(problem.question) for problem in split.eval + split.train + split.rest]
    assert sorted(parts) == sorted(canonical(problem.question) for problem in all_problems())
    assert len(parts) == len(set(parts)) == 2 * (90 * 91 // 2)


def test_rebuilding_gives_the_data_files_byte_for_byte(tmp_path):
    arithmetic.write_task(tmp_path)
    for name in (TRAIN_FILE, EVAL_FILE):
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes() == Path(resolve(f"embedded:{name}")).read_bytes()


def test_the_system_prompt_is_one_plain_line_that_the_preset_repeats():
    assert SYSTEM_PROMPT.isascii()
    assert SYSTEM_PROMPT.isprintable()
    assert re.findall(r"</?\w+>", SYSTEM_PROMPT) == ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
    preset = yaml.safe_load((REPOSITORY / "deploy" / "presets" / "demo.yaml").read_text(encoding="utf-8"))
    assert preset["data"]["system_prompt"] == SYSTEM_PROMPT


@pytest.mark.parametrize(
    ("completion", "strict", "right"),
    [
        ("<reasoning>ones 5+7=12</reasoning><answer>42</answer>", True, True),
        (" <reasoning>a\nb</reasoning>\n<answer> 42 </answer>\n", True, True),
        ("<reasoning>a</reasoning><answer>41</answer>", True, False),
        ("a<answer>42</answer>", False, True),
        ("<answer>42</answer><reasoning>a</reasoning>", False, True),
        ("<answer>42</answer><answer>41</answer>", False, False),
        ("<reasoning>a</reasoning><answer>42</answer> yes", False, True),
        ("<reasoning>a<answer>b</reasoning><answer>42</answer>", False, True),
        ("<reasoning></reasoning><answer>42</answer>", False, True),
        ("<reasoning>a</reasoning>42", False, False),
        ("", False, False),
    ],
)
def test_format_and_answer_are_judged_apart(completion, strict, right):
    assert arithmetic.has_strict_format(completion) is strict
    assert arithmetic.is_right(completion, PROBE) is right


def test_a_turned_sum_keeps_its_answer_and_a_difference_is_never_turned():
    assert Problem(15, "+", 27).turned == Problem(27, "+", 15)
    assert Problem(15, "+", 27).turned.answer == 42
    assert Problem(42, "-", 27).turned == Problem(42, "-", 27)

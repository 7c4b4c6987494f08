"""Real data sets with their peculiarities."""

import json
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2].parent / "shared" / "data"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs the real data sets in ../shared/data")


def broken(verdict):
    return {count.rule: count.rows for count in verdict.rules if count.rows}


def sources(*names):
    return [{"path": str(DATA / name)} for name in names]


@pytest.mark.slow
def test_gsm8k_is_accepted_completely_with_the_number_after_the_marker(verdict_on):
    verdict = verdict_on(
        {"train": sources("gsm8k/train.jsonl"), "eval": sources("gsm8k/test.jsonl"), "answer_pattern": "#### (.+)"},
        validation={"max_prompt_length": 2000},  # the embedded tokenizer has few tokens longer than a character
    )
    assert broken(verdict) == {}
    for split, name, rows in (("train", "train", 7473), ("eval", "test", 1319)):
        solutions = [json.loads(line)["answer"] for line in (DATA / f"gsm8k/{name}.jsonl").read_bytes().splitlines()]
        numbers = [solution.rpartition("####")[2].strip().replace(",", "").replace("\u2212", "-") for solution in solutions]
        assert verdict.split(split)["answer"].to_list() == numbers
        assert len(numbers) == rows


def test_mawps_has_twenty_duplicates_which_are_left_out(verdict_on):
    data = {"train": sources("mawps/multiarith.jsonl"), "question_column": "input", "answer_column": "target"}
    verdict = verdict_on(data)
    assert broken(verdict) == {}
    assert (verdict.dropped.height, verdict.num_quarantined) == (20, 0)
    assert broken(verdict_on({**data, "duplicates": "quarantine"})) == {"duplicate": 20}


def test_svamp_question_is_joined_from_two_columns(verdict_on):
    data = {"train": sources("svamp/svamp_700.json"), "question": "{Body} {Question}", "answer_column": "Answer"}
    verdict = verdict_on(data)
    assert not verdict.accepted["answer"].str.contains(r"\.0$").any(), "the file has floats"
    first = json.loads((DATA / "svamp/svamp_700.json").read_text())[0]
    assert float(verdict.accepted["answer"][0]) == first["Answer"]
    assert verdict.accepted["prompt"][0][0]["content"] == f"{first['Body']} {first['Question']}"
    assert verdict.num_quarantined < 7


REAL = [
    ("reasoning_gym/chain_sum.jsonl", {}, {}),
    ("reasoning_gym/countdown.jsonl", {}, {}),
    ("reasoning_gym/knights_knaves.jsonl", {}, {}),
    ("reasoning_gym/propositional_logic.jsonl", {}, {"answer_missing": 100}),
    ("logic_kk/3ppl_train.parquet", {"answer_column": "solution_text_format"}, {"template_markers": 900}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "data", "rules"), REAL, ids=[name for name, *_ in REAL])
def test_a_real_file_breaks_these_rules_and_no_other(verdict_on, name, data, rules):
    verdict = verdict_on({"train": sources(name), **data}, validation={"max_prompt_length": 2000})
    assert broken(verdict) == rules
    assert verdict.rows == verdict.accepted.height + verdict.num_quarantined

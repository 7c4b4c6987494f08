"""A file with at least one planted fault for every rule: exactly those rows are quarantined, with line and reason."""

import json
import re

import polars as pl
import pytest

from grpo_tasks.data.judge import assign_splits
from grpo_tasks.data.rules import BY_NAME, RULES
from grpo_tasks.data.table import read_prompts
from grpo_tasks.data.validation import split_warnings
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from tests.data.conftest import STAGE


def ask(question, answer="1"):
    return {"question": question, "answer": answer}


def chat(*turns, answer="1"):
    return {"prompt": [{"role": role, "content": content} for role, content in turns], "answer": answer}


U, A, S = "user", "assistant", "system"
HELD_OUT = [ask("What is 7 + 8?", "15"), ask("Where does “Anna” live?", "Rome")]

PLANTED = [
    (set(), ask("What is 1 + 1?", "2")),
    ({"line_too_long"}, b'{"question": "' + b"x" * 5_000_000 + b'"}'),
    ({"encoding"}, b'{"question": "caf\xe9", "answer": "1"}'),
    ({"unreadable_line"}, b'{"question": "What is 1'),
    ({"not_an_object"}, b'["What is 1 + 2?", "3"]'),
    ({"duplicate_key"}, b'{"question": "What is 2 + 2?", "answer": "4", "answer": "5"}'),
    ({"prompt_missing"}, {"answer": "1"}),
    ({"question_not_text"}, ask(["What?"])),  # type: ignore[arg-type]
    ({"prompt_not_list"}, {"prompt": 3, "answer": "1"}),
    ({"messages_empty"}, {"prompt": [], "answer": "1"}),
    ({"message_shape"}, {"prompt": [{"role": U}], "answer": "1"}),
    ({"message_extra_keys"}, {"prompt": [{"role": U, "content": "a name", "name": "Bo"}], "answer": "1"}),
    (set(), chat((S, "be short"), (U, "one"), (A, "two"), (U, "three"))),
    ({"unknown_role"}, chat(("tool", "x"), (U, "a tool?"))),
    ({"system_position"}, chat((U, "late system"), (S, "be short"), (A, "yes"), (U, "then?"))),
    ({"system_position"}, chat((S, "be short"), (S, "be long"), (U, "two systems"))),
    ({"turn_order"}, chat((U, "two"), (U, "users"))),
    ({"turn_order"}, chat((A, "assistant first"), (U, "then user"))),
    ({"last_not_user"}, chat((U, "answered"), (A, "already"))),
    ({"last_not_user"}, chat((S, "system alone"))),
    ({"content_empty"}, chat((S, " \n\u200b"), (U, "blank system"))),
    ({"content_empty"}, ask("   ")),
    ({"control_characters"}, ask("a bell \x07 rings")),
    ({"control_characters"}, ask("zero in the answer", "4\x002")),
    ({"template_markers"}, ask("<|im_start|>system\nobey")),
    ({"template_markers"}, ask("[INST] be nice [/INST]")),
    ({"template_markers"}, ask("marker in the answer", "1<|im_end|>")),
    ({"answer_in_prompt"}, ask("the solution is <answer> 1,000.0 </answer>, isn't it", "1000")),
    (set(), ask("write <answer>5</answer> if you mean five; what is six?", "6")),
    ({"template_refused"}, chat((U, "1"), (A, "2"), (U, "3"), (A, "4"), (U, "5"))),
    ({"prompt_too_long"}, ask("word " * 300)),
    ({"answer_type"}, ask("a list of lists?", [["1"]])),
    (set(), ask("an object?", {"value": "1"})),
    ({"mixed_forms"}, {"prompt": "A string among chats?", "answer": "1"}),
    ({"message_not_text"}, {"prompt": [{"role": U, "content": [{"type": "image"}]}], "answer": "1"}),
    ({"answer_missing"}, ask("no answer?", None)),
    ({"answer_missing"}, ask("blank answer?", " \u00a0")),
    ({"answer_has_tags"}, ask("tags in the answer?", "<answer>4</answer>")),
    (set(), ask("twice?", "2")),
    ({"duplicate"}, ask("twice?", 2.0)),
    ({"contradiction"}, ask("two answers?", "2")),
    ({"contradiction"}, ask("two answers?", "3")),
    ({"leak_exact"}, ask("What is 7 + 8?", "15")),
    ({"leak_normalised"}, ask("where does 'anna'  live", "Rome")),
    ({"content_empty"}, ask("\u0301\ufe0f\u00ad")),
    ({"answer_missing"}, ask("an answer of marks?", "\ufe0f\u0301 \u20dd")),
    ({"prompt_missing", "answer_missing"}, {"unrelated": 1}),
    ({"media_with_text"}, {**ask("What is on the picture?"), "image": "a.png"}),
    ({"control_characters", "template_markers", "last_not_user"}, chat((U, "a\x1b[INST]"), (A, "b"))),
]


@pytest.fixture
def planted(write, verdict_on, strict):
    def judge_planted(**validation):
        train = write(*(row for _, row in PLANTED))
        held = write(*HELD_OUT, name="held.jsonl")
        data = {"train": [{"path": train}], "eval": [{"path": held}], "duplicates": "quarantine"}
        return verdict_on(data, strict, validation={"max_prompt_length": 200, **validation})

    return judge_planted


def found(verdict):
    reasons = {}
    for row in verdict.quarantine.iter_rows(named=True):
        reasons.setdefault(row["line"], set()).add(row["rule"])
    return reasons


def test_planted_faults_are_found_with_their_lines_and_nothing_else_is(planted):
    verdict = planted()
    assert found(verdict) == {line: rules for line, (rules, _) in enumerate(PLANTED, 1) if rules}
    assert [count.rule for count in verdict.rules] == [rule.name for rule in RULES]
    assert sum(count.rows for count in verdict.rules) == verdict.quarantine.height
    assert verdict.split("eval").height == len(HELD_OUT)
    assert verdict.split("train")["line"].to_list() == [line for line, (rules, _) in enumerate(PLANTED, 1) if not rules]
    assert verdict.rows == verdict.num_quarantined + verdict.accepted.height


def test_every_rule_of_the_table_is_planted_somewhere():
    # These need a CSV file, an answer pattern or a task column; other tests cover them.
    elsewhere = {"cell_count", "answer_pattern", "task_name"}
    assert set().union(*(rules for rules, _ in PLANTED)) | elsewhere == set(BY_NAME)
    assert len({rule.meaning for rule in RULES}) == len(BY_NAME) == len(RULES)
    assert all(rule.fix for rule in RULES)


def test_quarantine_shows_what_was_found_and_what_it_means(planted):
    refused = planted().quarantine
    values = {row["rule"]: row["value"] for row in refused.iter_rows(named=True)}
    assert re.fullmatch(r"two answers\?: 2 \(.*rows.jsonl:41\) \| 3 \(.*rows.jsonl:42\)", values["contradiction"])
    assert re.fullmatch("same as .*:39", values["duplicate"])
    assert values["leak_exact"].endswith("held.jsonl:1")
    assert values["leak_normalised"].endswith("held.jsonl:2")
    assert "is 200" in values["prompt_too_long"]
    assert values["template_markers"] == "[INST]"
    assert "\\u001b" in values["control_characters"]
    assert refused["value"].str.len_chars().max() <= 400
    last = refused.filter(line=len(PLANTED))["rule"].to_list()
    assert last == ["last_not_user", "control_characters", "template_markers"], "in the order of the table"


IGNORABLE = {rule.name for rule in RULES if rule.ignorable}


@pytest.mark.parametrize(
    "ignored", [*([name] for name in sorted(IGNORABLE)), ["prompt_too_long", "unknown_role"], sorted(IGNORABLE)]
)
def test_an_ignored_rule_refuses_nothing(planted, ignored):
    verdict = planted(ignore_rules=ignored)
    kept = [line for line, (broken, _) in enumerate(PLANTED, 1) if broken <= set(ignored)]
    assert verdict.split("train")["line"].to_list() == kept


def test_short_line_of_a_csv_and_answer_without_the_pattern_are_refused(tmp_path, verdict_on):
    path = tmp_path / "rows.csv"
    path.write_text('question,answer\n"What\nis it?",so #### 5\nshort\nnone?,no mark\nempty?,\n')
    verdict = verdict_on({"train": [{"path": str(path)}], "answer_pattern": "#### (.+)"})
    assert found(verdict) == {4: {"cell_count"}, 5: {"answer_pattern"}, 6: {"answer_missing"}}
    assert verdict.accepted["answer"].to_list() == ["5"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("duplicates", "did you mean duplicate?"), ("xyzzy", "one of "), ("answer_missing", "answer_missing cannot be ignored")],
)
def test_an_unknown_or_required_rule_cannot_be_ignored(planted, name, says):
    with pytest.raises(ConfigError) as caught:
        planted(ignore_rules=[name])
    assert says in str(caught.value)


def test_copies_are_found_before_our_own_split_separates_them(judged):
    rows = [ask(f"question {n}", str(answer)) for n in range(40) for answer in (n, n, n + 1)]
    counts = {
        "quarantine": {"duplicate": 40, "contradiction": 120},
        "keep": {"contradiction": 120},
        "drop": {"contradiction": 80},
    }
    for mode, expected in counts.items():
        verdict = judged(*rows, eval_fraction=0.5, duplicates=mode)
        assert {count.rule: count.rows for count in verdict.rules if count.rows} == expected
        assert verdict.dropped.height == (40 if mode == "drop" else 0)


def test_system_message_hides_no_leak(judged):
    rows = chat((S, "be strict"), (U, "same?")), chat((U, "other?"))
    assert found(judged(*rows, held=[chat((S, "be kind"), (U, "same?"))])) == {1: {"leak_exact"}}


def test_refused_held_out_row_leaks_nothing(judged):
    verdict = judged(ask("same?"), held=[ask("same?", None), ask("other?")])
    assert verdict.quarantine.select("split", "line", "rule").rows() == [("eval", 1, "answer_missing")]


def test_verdict_does_not_depend_on_the_size_of_the_slices(monkeypatch, planted):
    one_slice = planted()
    monkeypatch.setattr("grpo_tasks.data.judge._SLICE_ROWS", 3)
    sliced = planted()
    assert sliced.accepted.equals(one_slice.accepted)
    assert sliced.quarantine.equals(one_slice.quarantine)


SUMS = [ask(f"What is {n} + {n}?", str(2 * n)) for n in range(300)]


def splits(verdict):
    return dict(verdict.accepted.select("prompt_id", "split").iter_rows())


def test_row_keeps_its_split_when_others_come_go_or_move(judged):
    half = splits(judged(*reversed(SUMS[::2])))
    assert half.items() <= splits(judged(*SUMS)).items()
    assert len(half) == 150


def test_other_seed_holds_out_other_rows_and_a_larger_fraction_more():
    ids = pl.Series([f"{number:016x}" for number in range(20_000)])
    held = {(share, seed): set(ids.filter(assign_splits(ids, fraction=share, seed=seed) == "eval")) for share, seed in SPLITS}
    assert [len(held[share, 0]) for share in (0.02, 0.1, 0.5)] == pytest.approx([400, 2_000, 10_000], abs=200)
    assert held[0.02, 0] < held[0.1, 0] < held[0.5, 0]
    assert held[0.1, 1] != held[0.1, 0]


SPLITS = [(0.02, 0), (0.1, 0), (0.5, 0), (0.1, 1)]


@pytest.mark.parametrize("column", ["answer", "solution"])
def test_objects_are_ground_truths_and_reach_functions_as_they_stand(tmp_path, judged, column):
    gold = {"number": "A-1", "total": 10.5, "lines": [{"sku": "x"}]}
    rows = [{"question": f"Invoice {number}", column: one} for number, one in enumerate([gold, [gold, {"number": "B"}]])]
    verdict = judged(*rows, held=[{"question": "held", column: gold}], answer_column=column)
    assert verdict.num_quarantined == 0
    verdict.split("train").write_parquet(tmp_path / "train.parquet")
    one, several = read_prompts(tmp_path / "train.parquet")
    assert json.loads(one.answer) == gold
    assert [json.loads(text) for text in several.truths] == [gold, {"number": "B"}]
    assert (one.given_answer, several.given_answer) == (gold, [gold, {"number": "B"}])
    assert one.extra[column] == gold


@pytest.mark.parametrize("value", [{"total": 1}, "free text", 42, None])
def test_without_ground_truths_a_column_called_answer_stays_as_it_is(tmp_path, judged, value):
    row = {"question": "Extract.", "answer": value}
    verdict = judged(row, held=[{"question": "held", "answer": "x"}], answer_column=None)
    verdict.split("train").write_parquet(tmp_path / "train.parquet")
    [read] = read_prompts(tmp_path / "train.parquet")
    assert (read.answer, read.given_answer) == (None, value)


@pytest.mark.parametrize(("count", "seed"), [(2, 0), (3, 1), (5, 2)])
def test_few_rows_fill_both_splits_and_no_position_decides(write, verdict_on, count, seed):
    rows = [{"question": f"What is {number} + {seed}?", "answer": str(number)} for number in range(count)]

    def held_out(given):
        verdict = verdict_on({"train": [{"path": write(*given)}], "eval_fraction": 0.01}, seed=seed)
        assert verdict.split("train").height == count - 1
        return verdict.split("eval")["prompt_id"].to_list()

    [only] = held_out(rows)
    assert held_out(rows[::-1]) == [only]
    most = verdict_on({"train": [{"path": write(*rows)}], "eval_fraction": 0.99}, seed=seed)
    assert most.split("train").height >= 1
    assert most.split("eval").height >= 1
    if count > 3:
        asked = {"min_eval_rows": 3, "min_train_rows": 1}
        wanted = verdict_on({"train": [{"path": write(*rows)}], "eval_fraction": 0.01}, seed=seed, validation=asked)
        assert wanted.split("eval").height == 3
        # The row that was held out alone is still held out among more.
        assert only in wanted.split("eval")["prompt_id"].to_list()


def test_rows_that_a_minimum_moves_are_said(write, verdict_on):
    rows = [{"question": f"What is {number} + 1?", "answer": str(number)} for number in range(8)]

    def said(fraction, **validation):
        sections = {"data": {"train": [{"path": write(*rows)}], "eval_fraction": fraction}, "validation": validation}
        config = RunConfig.model_validate({**sections, "stages": [STAGE]})
        return split_warnings(verdict_on(**sections), config)

    assert said(0.001, min_eval_rows=3) == [
        "3 of 8 rows are held out, because of validation.min_eval_rows: 3; data.eval_fraction: 0.001 alone holds out 0"
    ]
    assert said(0.999, min_train_rows=2) == [
        "6 of 8 rows are held out, because of validation.min_train_rows: 2; data.eval_fraction: 0.999 alone holds out 8"
    ]
    # As the share alone has it, whether or not a minimum is just met.
    assert said(0.5) == []


def test_one_row_is_in_one_split_and_copies_stay_together(judged):
    row = {"question": "What is 1 + 1?", "answer": "2"}
    assert judged(row).accepted.height == 1
    both = judged(row, row, {"question": "What is 3 + 3?", "answer": "6"}, duplicates="keep")
    assert both.accepted.group_by("prompt_id").agg(pl.col("split").n_unique())["split"].to_list() == [1, 1]
    assert both.accepted.height == 3

"""Every fix that the validation prints is carried out, and its finding is gone. JSON, commands and settings in it are used as
they stand."""

import re
import subprocess

import polars as pl
import pytest
import yaml

from grpo_tasks.data.rules import BY_NAME, RULES
from grpo_tasks.data.sources import ROWS, load_sources
from grpo_tasks.data.validation import Origin, validate_rows
from schemas.config.run import RunConfig
from schemas.errors import DataError
from tests.data.conftest import STAGE
from tests.data.test_judge import A, S, U, ask, chat

pytestmark = pytest.mark.slow

GOOD = [ask("What is 1 + 1?", "2"), ask("What is 2 + 3?", "5")]
HELD = [ask("What is 7 + 8?", "15") | {"q": "What is 7 + 8?", "task": "sums"}]


def merge(below, top):
    """A tree of settings over another."""
    both = {key: merge(below[key], top[key]) for key in below.keys() & top.keys() if isinstance(top[key], dict)}
    return below | top | both


def setting(text, key):
    """A setting that a fix names, as a tree: `key: VALUE`."""
    found = re.search(re.escape(key) + r": ('[^']*'|\[\{.*?\}\]|\[[^]]*\]|[^\s,;]+)", text)
    assert found, text
    value = yaml.safe_load(found[1])
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def shown(text):
    """The JSON object that a fix shows."""
    return yaml.safe_load(re.search(r"\{.*\}", text)[0])


def converted(text, row):
    """A row after the command that a fix shows."""
    command = re.search(r"iconv -f \S+ -t \S+", text)[0]
    return subprocess.run(command.split(), input=row, capture_output=True, check=True).stdout


RULE_FIXES = {
    "line_too_long": (b'{"question": "' + b"x" * 5_000_000 + b'"}', lambda _: [ask("half a row"), ask("another half")]),
    "encoding": (
        b'{"question": "caf\xe9", "answer": "1"}',
        lambda fix: [converted(fix, b'{"question": "caf\xe9", "answer": "1"}')],
    ),
    "unreadable_line": (b'{"question":\n"What is 1?", "answer": "1"}', lambda _: [ask("What is 1?")]),
    "not_an_object": (b'["What is 1 + 2?", "3"]', lambda _: [ask("What is 1 + 2?", "3")]),
    "duplicate_key": (b'{"question": "4?", "answer": "4", "answer": "5"}', lambda _: [ask("4?", "4")]),
    "prompt_missing": ({"q": "Which column?", "answer": "1"}, lambda _: {"data": {"question_column": "q"}}),
    "question_not_text": (ask(["What?"]), lambda _: [ask("What?")]),
    "prompt_not_list": ({"prompt": 3, "answer": "1"}, lambda _: [chat((U, "3"))]),
    "messages_empty": ({"prompt": [], "answer": "1"}, lambda _: [chat((U, "added"))]),
    "message_shape": ({"prompt": [{"role": U}], "answer": "1"}, lambda fix: [{"prompt": [shown(fix)], "answer": "1"}]),
    "message_not_text": ({"prompt": [{"role": U, "content": [{"type": "image"}]}], "answer": "1"}, lambda _: [chat((U, "text"))]),
    "media_with_text": (
        ask("What is on the picture?") | {"image": "a.png"},
        lambda _: {"validation": {"ignore_rules": ["media_with_text"]}},
    ),
    "mixed_forms": ({"prompt": "A string?", "answer": "1"}, lambda fix: setting(fix, "data.format")),
    "message_extra_keys": (
        {"prompt": [{"role": U, "content": "a name", "name": "Bo"}], "answer": "1"},
        lambda _: [chat((U, "a name")) | {"name": "Bo"}],
    ),
    "unknown_role": (chat(("human", "x")), lambda _: [chat((U, "x"))]),
    "system_position": (chat((S, "short"), (S, "long"), (U, "x")), lambda _: [chat((S, "short and long"), (U, "x"))]),
    "turn_order": (chat((U, "two"), (U, "users")), lambda _: [chat((U, "two users"))]),
    "last_not_user": (chat((U, "answered"), (A, "already")), lambda _: [chat((U, "answered"))]),
    "content_empty": (chat((S, " "), (U, "x")), lambda _: [chat((U, "x"))]),
    "control_characters": (ask("a bell \x07 rings"), lambda _: [ask("a bell rings")]),
    "template_markers": (ask("[INST] be nice [/INST]"), lambda _: [ask("be nice")]),
    "answer_in_prompt": (ask("it is <answer>4</answer>", "4"), lambda _: [ask("it is", "4")]),
    "template_refused": (
        chat((U, "1"), (A, "2"), (U, "3"), (A, "4"), (U, "5")),
        lambda _: [chat((U, "1, 2, 3, 4, 5"))],
    ),
    "prompt_too_long": (ask("word " * 600), lambda _: {"validation": {"max_prompt_length": 4_000}}),
    "answer_type": (ask("nested?", [["1"]]), lambda _: [ask("nested?", "1"), ask("or?", 1), ask("an object?", {"one": 1})]),
    "answer_missing": (
        {"question": "a poem", "task": "poems"},
        lambda fix: setting(fix.replace("NAME", "poems"), "data.tasks.poems.answers"),
    ),
    "answer_pattern": (ask("a pattern?", "no mark"), lambda _: [ask("a pattern?", "so #### 4")]),
    "answer_has_tags": (
        ask("tags?", "<answer>4</answer>"),
        lambda fix: setting(fix, "data.answer_pattern"),
    ),
    "task_name": (ask("a task?") | {"task": "no name!"}, lambda _: [ask("a task?") | {"task": "a_name"}]),
    "duplicate": (ask("What is 1 + 1?", 2.0), lambda _: []),
    "contradiction": (ask("What is 1 + 1?", "3"), lambda _: []),
    "leak_exact": (ask("What is 7 + 8?", "15"), lambda _: []),
    "leak_normalised": (ask("what is  7 + 8", "15"), lambda _: []),
}
"""Rule -> a row that breaks it, and by its fix: the rows instead, or settings. `cell_count` is about CSV."""
SETTINGS = {
    "answer_missing": {"data": {"task_column": "task"}},
    "answer_pattern": {"data": {"answer_pattern": "#### (.+)"}},
    "task_name": {"data": {"task_column": "task"}},
    "duplicate": {"data": {"duplicates": "quarantine"}},
}
"""What a rule needs to be applied."""


@pytest.fixture
def broken(write, verdict_on, strict):
    """Which rules these training rows break, those of GOOD before them aside."""

    def judge_rows(rows, *settings):
        tree = {"data": {"train": [{"path": write(*GOOD, *rows)}], "eval": [{"path": write(*HELD, name="held.jsonl")}]}}
        for one in settings:
            tree = merge(tree, one)
        found = verdict_on(tree.pop("data"), strict, **tree).quarantine
        return set(found.filter(pl.col("source").str.ends_with("rows.jsonl"), pl.col("line") > len(GOOD))["rule"])

    return judge_rows


@pytest.mark.parametrize("rule", RULE_FIXES)
def test_the_fix_of_a_rule_makes_its_row_acceptable(broken, rule):
    row, repair = RULE_FIXES[rule]
    needed, repaired = SETTINGS.get(rule, {}), repair(BY_NAME[rule].fix)
    assert rule in broken([row], needed)
    rows, change = ([row], repaired) if isinstance(repaired, dict) else (repaired, {})
    assert broken(rows, needed, change) == set()


def test_every_rule_has_its_fix_carried_out():
    assert RULE_FIXES.keys() | {"cell_count"} == {rule.name for rule in RULES}


def test_a_quoted_cell_is_one_cell_again(tmp_path, verdict_on):
    def rules(cell):
        (tmp_path / "rows.csv").write_text(f"question,answer\n{cell},5\nWhat is 2?,2\n")
        return {count.rule for count in verdict_on({"train": [{"path": str(tmp_path / "rows.csv")}]}).rules if count.rows}

    assert "quote cells" in BY_NAME["cell_count"].fix
    assert rules("What is 2, plus 3?") == {"cell_count"}
    assert rules('"What is 2, plus 3?"') == set()


TEXTS = [ask(f"How many of {n}?", f"So the answer is, as we saw, ${n}$ apples.") for n in range(40)]
OBJECTS = [ask(f"Extract {n}", {"total": n}) for n in range(40)]
JSON_KEY = {"completion": {"format": "json", "answer_key": "total"}}
STOPS = {
    # what stops the run -> rows, the settings before, and the settings that the fix names
    "one prompt, a thousand times": ([ask("Play.", "0")] * 1_000, {}, ["data.eval", "validation.ignore_rules"]),
    "sentences around a formula": (TEXTS, {}, ["data.answer_pattern"]),
    "sentences, compared as text": (TEXTS, {}, ["completion.equality"]),
    "objects": (OBJECTS, JSON_KEY, ["completion.equality"]),
    "no answers": ([{"question": f"Write about {n}."} for n in range(40)], {}, ["data.answer_column"]),
    "another name": ([{"question": f"{n}?", "Answer": n} for n in range(40)], {}, ["data.answer_column"]),
    "strings and a system prompt": (
        [{"prompt": f"{n} + 1 =", "answer": n} for n in range(40)],
        {"data": {"system_prompt": "Be short."}},
        ["data.format"],
    ),
}


@pytest.mark.parametrize("case", STOPS)
def test_the_settings_in_the_fix_of_a_refusal_let_the_run_begin(tmp_path, write, case):
    rows, before, named = STOPS[case]
    path = write(*rows)

    def report(*settings):
        tree = {"data": {"train": [{"path": path}], "eval_fraction": 0.3}, "stages": [STAGE], "seed": 1}
        for one in settings:
            tree = merge(tree, one)
        config = RunConfig.model_validate(tree)
        sources = load_sources(config.data, directory=tmp_path)
        return validate_rows(tmp_path / ROWS, config, Origin("key", tmp_path, 0.0, sources))

    with pytest.raises(DataError) as refused:
        report(before)
    fixes = [setting(refused.value.fix, key) for key in named]
    if "remove completion.answer_key" in refused.value.fix:
        fixes.append({"completion": {"answer_key": None}})
    made = report(before, *fixes)
    assert made.train_rows > 0
    assert made.eval_rows > 0


def test_repeated_prompts_are_named_as_the_cause(tmp_path, write):
    config = RunConfig(data={"train": [{"path": write(*[ask("Play.", "0")] * 1_000)}]}, stages=[STAGE])
    sources = load_sources(config.data, directory=tmp_path)
    with pytest.raises(DataError, match="999 of 1,000 rows repeat an earlier one and are left out"):
        validate_rows(tmp_path / ROWS, config, Origin("key", tmp_path, 0.0, sources))

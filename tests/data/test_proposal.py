"""A config is proposed that the validation step accepts, and it can be loaded as it is written."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.init import run_name
from flows.cli.main import app
from grpo_tasks.data.proposal import ColumnChoice, candidates, data_settings, find_equality, find_pattern
from grpo_tasks.library import base_model, load_data, make, train_stage
from grpo_tasks.steps.probe_rewards import probe_rewards
from schemas.config.load import load_config

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
FILES = [
    ("gsm8k/train.jsonl", "numeric"),
    ("mawps/multiarith.jsonl", "numeric"),
    ("reasoning_gym/chain_sum.jsonl", "numeric"),
    ("reasoning_gym/countdown.jsonl", "math"),
    ("reasoning_gym/knights_knaves.jsonl", "exact"),
    ("logic_kk/3ppl_train.parquet", "exact"),
    ("svamp/svamp_700.json", "numeric"),
    ("reasoning_gym/propositional_logic.jsonl", None),
]
CHAT = [{"role": "user", "content": "What is 1 + 1?"}]
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"


def init(*arguments, expect=0, answers=None):
    """Call `grpo init`; its output."""
    result = CliRunner().invoke(app, ["init", *map(str, arguments)], input=answers)
    assert result.exit_code == expect, f"{result.output}\n{result.exception!r}"
    return result.output


def write_rows(path, **columns):
    """Thirty rows; a callable makes the value of a row from its number."""
    rows = [{name: make(n) if callable(make) else make for name, make in columns.items()} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a file of sums."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "sums.jsonl", problem=lambda n: f"What is {n} + {n}?", result=lambda n: 2 * n)
    return tmp_path


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"question": lambda n: f"What is {n} + 1?", "answer": str}, ColumnChoice("question", None, "answer")),
        ({"id": str, "input": lambda n: f"What is {n} + 1?", "target": lambda n: n}, ColumnChoice("input", None, "target")),
        ({"prompt": CHAT, "answer": str}, ColumnChoice(None, "prompt", "answer")),
        ({"prompt": lambda n: f"Tell me about {n}"}, ColumnChoice("prompt", None, None)),
        ({"question": lambda n: f"Why {n}?", "answer": None}, ColumnChoice("question", None, None)),
        (
            {"Body": lambda n: f"There are {n} cats.", "Question": lambda n: f"How many {n}?", "Answer": float},
            ColumnChoice("Question", None, "Answer", "Body"),
        ),
        ({"art": lambda n: f"kurz {n}", "Satz": lambda n: f"Ein langer Satz mit {n}."}, ColumnChoice("Satz", None, None)),
        ({"question": "always the same", "problem": lambda n: f"What is {n}?"}, ColumnChoice("problem", None, None)),
        ({"a": lambda n: n, "b": True}, None),
    ],
)
def test_the_likeliest_reading_comes_first(columns, expected, tmp_path):
    found = candidates(write_rows(tmp_path / "rows.jsonl", **columns))
    assert next(iter(found), None) == expected


def test_a_prompt_column_that_is_not_used_is_switched_off():
    columns = ["prompt", "quiz", "answer"]
    assert data_settings(ColumnChoice("quiz", None, "answer"), columns, None)["prompt_column"] not in columns
    assert data_settings(ColumnChoice("prompt", None, "answer"), columns, None)["question_column"] == "prompt"


@pytest.mark.parametrize(
    ("answers", "pattern"),
    [
        (["2 + 2 = 4\n#### 4", "so it is\n#### 1,000"], "#### (.+)"),
        ([r"so \boxed{4}", r"\boxed{\pi}"], r"\\boxed\{([^{}]*)\}"),
        (["<answer>4</answer>", "hm <answer>\n5\n</answer>"], r"(?s)<answer>\s*(.*?)\s*</answer>"),
        (["The answer is 4.", "Thus the final answer is: 17"], r"(?i)\banswer is:?\s*(.+?)\.?\s*$"),
        (["4", "5"], None),
        ([], None),
    ],
)
def test_the_mark_of_a_final_answer_is_found(answers, pattern):
    found = find_pattern(answers)
    assert (found and found[0]) == pattern


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truths", "equality"),
    [
        (["4", "-3.5", "1,000", "51.0"], "numeric"),
        (["A", "b", "C"], "choice"),
        (["92 + 31 - 5", "7 * (3 - 1)"], "math"),
        (["Zoey is a knight, and Ethan is a knave.", "Nobody is."], "exact"),
        ([], "exact"),
    ],
)
def test_answers_are_compared_as_what_they_are(truths, equality):
    assert find_equality(truths) == equality


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("file", "equality"), FILES)
def test_every_shared_file_gets_a_config_that_trains_unedited(tmp_path, file, equality):
    if not SHARED.exists():
        pytest.skip(f"no shared data at {SHARED}")
    init(SHARED / file, "--yes", "--out", tmp_path / "made.yaml")
    config = load_config(tmp_path / "made.yaml")
    if equality:
        assert config.completion.equality == equality
    data = load_data(config, tmp_path / "data")
    assert data.train_rows > 0
    checks = make(probe_rewards, tmp_path / "lab", config, base_model(config), data).checks
    assert checks
    assert [check for check in checks if check.outcome == "failed"] == []
    last = config.stages[-1].model_copy(update={"max_steps": 3})
    result = train_stage(config, last, data, tmp_path / "stage")
    assert result.steps == 3
    assert [json.loads(line)["step"] for line in (tmp_path / "stage" / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_the_only_file_is_taken_and_a_config_never_overwritten_without_force(here):
    assert "grpo validate sums.yaml" in init("--yes")
    config = load_config("sums.yaml")
    assert (config.data.question_column, config.data.answer_column, config.name) == ("problem", "result", "sums")
    assert config.stages[1].rewards == ["format", "correctness"]
    (here / "sums.yaml").write_text("mine")
    assert "--force" in init("sums.jsonl", "--yes", expect=1)
    assert (here / "sums.yaml").read_text() == "mine"
    # Nothing is asked where nobody can answer.
    assert "[" not in init("sums.jsonl", "--force", answers="")
    assert load_config("sums.yaml").name == "sums"


def test_at_most_five_questions_are_asked_and_their_answers_count(here, monkeypatch):
    asked = []

    def answer(question, proposed):
        asked.append(question)
        return {"Base model (folder, hub id or registered model)": QWEN}.get(question, proposed)

    monkeypatch.setattr("flows.cli.init._ask", answer)
    monkeypatch.setattr("flows.cli.init._can_answer", lambda: True)
    write_rows(here / "solved.jsonl", question=lambda n: f"{n} + 1?", answer=lambda n: f"easy\n#### {n + 1}")
    init("solved.jsonl")
    assert len(asked) == 5
    config = load_config("solved.yaml")
    assert (config.model.path, config.data.answer_pattern) == (QWEN, "#### (.+)")


def test_columns_can_be_named_and_missing_questions_are_refused(here):
    write_rows(here / "two.jsonl", question=lambda n: f"Ask {n}", other=lambda n: f"Other {n}?", gold=lambda n: n)
    init("two.jsonl", "--yes", "--question", "other", "--answer", "gold")
    config = load_config("two.yaml")
    assert (config.data.question_column, config.data.answer_column) == ("other", "gold")
    write_rows(here / "none.jsonl", a=lambda n: n, b=lambda n: n)
    output = init("none.jsonl", "--yes", expect=1)
    assert "columns: a, b" in output
    assert "fix:" in output
    assert "did you mean" in init("sumz.jsonl", "--yes", expect=1)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("sums.jsonl", "sums"),
        ("/x/gsm8k/train.jsonl", "gsm8k"),
        ("3ppl_train.parquet", "grpo-3ppl"),
        ("My file (1).csv", "My-file-1"),
    ],
)
def test_the_run_is_named_after_the_file_or_its_folder(path, name):
    assert run_name(path) == name

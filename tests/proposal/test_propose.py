"""A config is proposed that the validation step accepts, and it can be loaded as it is written."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.init import run_name
from flows.cli.main import app
from grpo_tasks.answers.ground_truths import find_unusable_truths
from grpo_tasks.data.records import Columns
from grpo_tasks.data.report import Origin
from grpo_tasks.data.sources import ROWS, load_sources
from grpo_tasks.data.validation import validate_rows
from schemas.config.load import load_config
from schemas.config.run import JudgeInputs

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
NEEDS_TEMPLATES = pytest.mark.skipif(
    len(Columns._fields) <= 3, reason="the reader knows neither templates nor rows without answers"
)
FILES = [
    ("gsm8k/train.jsonl", "numeric"),
    ("mawps/multiarith.jsonl", "numeric"),
    ("reasoning_gym/chain_sum.jsonl", "numeric"),
    ("reasoning_gym/countdown.jsonl", "math"),
    ("reasoning_gym/knights_knaves.jsonl", "exact"),
    ("logic_kk/3ppl_train.parquet", "exact"),
    pytest.param("svamp/svamp_700.json", "numeric", marks=NEEDS_TEMPLATES),
    pytest.param("reasoning_gym/propositional_logic.jsonl", None, marks=NEEDS_TEMPLATES),
]


def init(*arguments, expect=0, answers=None):
    """Call `grpo init`; its output."""
    result = CliRunner().invoke(app, ["init", *map(str, arguments)], input=answers)
    assert result.exit_code == expect, f"{result.output}\n{result.exception!r}"
    return result.output


def write_rows(folder, name="sums.jsonl", number=30):
    path = folder / name
    path.write_text("".join(json.dumps({"problem": f"What is {n} + {n}?", "result": 2 * n}) + "\n" for n in range(number)))
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize(("file", "equality"), FILES)
def test_every_shared_file_gets_a_config_that_the_pipeline_accepts(here, file, equality):
    if not SHARED.exists():
        pytest.skip(f"no shared data at {SHARED}")
    init(SHARED / file, "--yes", "--out", "made.yaml")
    config = load_config("made.yaml")
    if equality:
        assert config.completion.equality == equality
    loaded = load_sources(config.data, directory=here)
    inputs = JudgeInputs(data=config.data, validation=config.validation, completion=config.completion, seed=config.seed)
    origin = Origin("", here, 0.0, loaded.sources)
    # Raises when more rows are refused than the config allows, or when no answer can be right.
    report = validate_rows(
        here / ROWS, inputs, origin, check_truths=find_unusable_truths, model=config.model, rollout=config.rollout
    )
    assert report.train_rows > 50
    assert report.prompt_tokens.limit + config.rollout.max_completion_length <= 2048


def test_the_only_file_of_the_folder_is_taken_and_columns_with_other_names_are_found(here):
    write_rows(here)
    output = init("--yes")
    config = load_config("sums.yaml")
    assert (config.data.question_column, config.data.answer_column) == ("problem", "result")
    assert config.name == "sums"
    assert config.stages[1].rewards == ["format", "correctness"]
    assert "grpo validate sums.yaml" in output


def test_a_config_that_exists_is_never_overwritten_without_force(here):
    write_rows(here)
    (here / "sums.yaml").write_text("mine")
    assert "--force" in init("sums.jsonl", "--yes", expect=1)
    assert (here / "sums.yaml").read_text() == "mine"
    init("sums.jsonl", "--yes", "--force")
    assert load_config("sums.yaml").name == "sums"


def test_nothing_is_asked_where_nobody_can_answer(here):
    write_rows(here)
    assert "[" not in init("sums.jsonl", answers="")


def test_at_most_five_questions_are_asked_and_their_answers_count(here, monkeypatch):
    asked = []

    def answer(question, proposed):
        asked.append(question)
        return {"Base model (folder, hub id or registered model)": "Qwen/Qwen2.5-0.5B-Instruct"}.get(question, proposed)

    monkeypatch.setattr("flows.cli.init._ask", answer)
    monkeypatch.setattr("flows.cli.init._can_answer", lambda: True)
    path = here / "solved.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": f"easy\n#### {n + 1}"}) + "\n" for n in range(30)))
    init("solved.jsonl")
    assert len(asked) == 5
    config = load_config("solved.yaml")
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert config.data.answer_pattern == "#### (.+)"


def test_columns_can_be_named_and_a_file_without_questions_is_refused_with_its_columns(here):
    (here / "two.jsonl").write_text(
        "".join(json.dumps({"question": f"Ask {n}", "other": f"Other {n}?", "gold": n}) + "\n" for n in range(30))
    )
    init("two.jsonl", "--yes", "--question", "other", "--answer", "gold")
    config = load_config("two.yaml")
    assert (config.data.question_column, config.data.answer_column) == ("other", "gold")
    (here / "none.jsonl").write_text("".join(json.dumps({"a": n, "b": n}) + "\n" for n in range(30)))
    output = init("none.jsonl", "--yes", expect=1)
    assert "columns: a, b" in output
    assert "fix:" in output


def test_a_missing_file_is_named_with_the_nearest(here):
    write_rows(here)
    output = init("sumz.jsonl", "--yes", expect=1)
    assert "did you mean" in output


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

"""A config is proposed that the validation step accepts, and it can be loaded as it is written."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.init import run_name
from flows.cli.main import app
from schemas.config.load import load_config
from tests.flows.place import Place

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
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("file", "equality"), FILES)
def test_every_shared_file_gets_a_config_that_trains_unedited(tmp_path, file, equality):
    if not SHARED.exists():
        pytest.skip(f"no shared data at {SHARED}")
    place = Place(tmp_path)
    place.grpo("init", SHARED / file, "--yes", "--out", "made.yaml")
    config = load_config(place.root / "made.yaml")
    if equality:
        assert config.completion.equality == equality
    assert " 0 to train on" not in place.grpo("validate", "made.yaml")
    assert " 0 checks failed" in place.grpo("rewards", "made.yaml")
    last = len(config.stages) - 1
    trained = place.grpo("train", "made.yaml", "--stage", config.stages[last].name, "--set", f"stages.{last}.max_steps=3")
    assert f"stage {config.stages[last].name}: 3 updates" in trained
    [journal] = place.root.glob("runs/*/train_stage/*/metrics.jsonl")
    assert [json.loads(line)["step"] for line in journal.read_text().splitlines()] == [1, 2, 3]


def test_the_only_file_is_taken_and_its_columns_found(here):
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


def test_columns_can_be_named_and_missing_questions_are_refused(here):
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

"""Everything that a person may want to read later is an artifact, in a form that MLflow shows."""

import json
from pathlib import Path

import polars as pl
import pytest
from mlflow import MlflowClient

from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking.runs import open_run


@pytest.fixture
def client(database):
    return MlflowClient(database)


def text(client, run_id, path):
    return Path(client.download_artifacts(run_id, path)).read_text()


def test_an_evaluations_table_begins_with_question_truth_answer_verdict(
    client, database, make_config, make_evaluation, data_report
):
    evaluation = make_evaluation("merged")
    ids = pl.read_parquet(data_report.eval)["prompt_id"].to_list()
    rows = {
        "prompt_id": [ids[1], ids[0]],
        "sample": [0, 0],
        "completion": ["2", "7"],
        "token_ids": [[1], [2]],
        "correct": [True, False],
    }
    pl.DataFrame(rows).write_parquet(evaluation.samples)
    with open_run(make_config(database), key="k") as run:
        run.record(data_report)
        run.record(evaluation)
    table = json.loads(text(client, run.run_id, "evaluation/merged/samples.json"))
    assert table["columns"][:4] == ["question", "ground_truth", "model_answer", "verdict"]
    assert [row[:4] for row in table["data"]] == [["What is 1 + 1?", "2", "2", "right"], ["What is 0 + 1?", "1", "7", "wrong"]]
    assert "token_ids" not in table["columns"]


TURNS = [
    {"text": "6 * 7?", "reward": None, "answers": [{"role": "tool", "content": "42"}]},
    {"text": "It is 42.", "reward": 1.0, "answers": []},
]
PLAYED = json.dumps({"turns": TURNS, "ending": "done", "error": None})
SHOWN = "[turn 1] 6 * 7?\n[tool] 42\n[turn 2 (reward 1)] It is 42."


@pytest.mark.slow
def test_evaluation_and_stage_tables_show_conversations_by_turn(client, database, make_config, make_evaluation, make_stage):
    evaluation, config = make_evaluation("merged"), make_config(database)
    rows = {"prompt_id": ["a", "b"], "sample": [0, 0], "completion": ["It is 42.", "No."], "conversation": [PLAYED, None]}
    pl.DataFrame(rows).write_parquet(evaluation.samples)
    stage = make_stage(config)
    # The first files of the stage were written by a version without conversations.
    pl.DataFrame(rows | {"reward": [1.0, 0.0]}).write_parquet(StageDir(stage.directory).completions(40))
    with open_run(config, key="k") as run:
        run.record(evaluation)
        run.record(stage)
    samples = json.loads(text(client, run.run_id, "evaluation/merged/samples.json"))
    assert [row[samples["columns"].index("model_answer")] for row in samples["data"]] == [SHOWN, "No."]
    [child] = client.search_runs([run.experiment_id], f"tags.`mlflow.parentRunId` = '{run.run_id}'")
    completions = json.loads(text(client, child.info.run_id, "completions.json"))
    assert [row[completions["columns"].index("completion")] for row in completions["data"]][-2:] == [SHOWN, "No."]
    assert "conversation" not in samples["columns"] + completions["columns"]


@pytest.mark.slow
def test_train_rows_lab_samples_step_logs_and_own_modules_are_artifacts(
    client, database, make_config, make_stage, lab_report, data_report, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_tools.py").write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    (tmp_path / "own_shown.py").write_text("def solve(row):\n    return row['answer']\n")
    (tmp_path / "own_rewards.py").write_text(
        "from own_words import WORDS\n\ndef own(completions, **_):\n    return [1.0] * len(completions)\n"
    )
    (tmp_path / "own_words.py").write_text("WORDS = ['a']\n")
    functions = {"own": {"function": "own_rewards:own"}}
    shown = {"name": "shown", "kind": "sft", "demonstrations": {"function": "own_shown:solve"}}
    config = make_config(
        database,
        rewards={"functions": functions, "module_dir": str(tmp_path)},
        interaction={"tools": ["own_tools:add"]},
        stages=[shown, {"name": "format", "rewards": ["format"], "max_steps": 40}],
    )
    pl.DataFrame({"completion": ["x"]}).write_parquet(lab_report.directory / "samples.parquet")
    (lab_report.directory / "log.txt").write_text("sampled 16 prompts from http://me:secret-word@host/x\n")
    stage = make_stage(config)
    (stage.directory / "log.txt").write_text("update 1\n")
    with open_run(config, key="k") as run:
        run.record(data_report)
        run.record(lab_report)
        run.record(stage)
    assert pl.read_parquet(client.download_artifacts(run.run_id, "data/train.parquet")).height == 12
    assert pl.read_parquet(client.download_artifacts(run.run_id, "lab/samples.parquet")).height == 1
    log = text(client, run.run_id, "logs/probe_rewards.txt")
    assert "sampled 16 prompts" in log
    assert "secret-word" not in log
    assert text(client, run.child("format", stage.key).run_id, "logs/train_stage.txt") == "update 1\n"
    assert "def own" in text(client, run.run_id, "rewards/own_rewards.py")
    assert "WORDS" in text(client, run.run_id, "rewards/own_words.py")
    assert "def add" in text(client, run.run_id, "interaction/own_tools.py")
    assert "def solve" in text(client, run.run_id, "demonstrations/own_shown.py")

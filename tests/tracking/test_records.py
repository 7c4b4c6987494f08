"""What of a run a person may want to read later, in a form that MLflow shows: inputs, tables, logs, models, prompts, traces."""

import json
from pathlib import Path

import mlflow
import polars as pl
import pytest
from mlflow import MlflowClient

from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking import records
from grpo_tasks.tracking.description import stage_params
from grpo_tasks.tracking.handle import MARKER
from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.runs import open_run
from schemas.results.data import PreparedData, SourceFile
from schemas.results.evaluation import DifficultyReport, Interval, StageDifficulty
from schemas.results.model import KeptPrompts
from schemas.results.publication import Publication

from .conftest import artifacts_of, history, verdict, write_journal


@pytest.fixture
def client(database):
    mlflow.set_tracking_uri(database)
    return MlflowClient(database)


def text(client, run_id, path):
    return Path(client.download_artifacts(run_id, path)).read_text()


def child_of(client, run):
    [child] = client.search_runs([run.experiment_id], f"tags.`mlflow.parentRunId` = '{run.run_id}'")
    return child


def record(config, *results, key="k"):
    with open_run(config, key=key) as run:
        for result in results:
            run.record(result)
    return run


def test_data_becomes_dataset_inputs_with_the_content_digest(config, client, data_report):
    sources = [SourceFile(path="a.jsonl", split="train", rows=17, sha256="0" * 64)]
    prepared = PreparedData(key="1" * 16, directory=data_report.directory, seconds=0.1, rows=17, sources=sources)
    run = record(config, prepared, data_report)
    found = client.get_run(run.run_id)
    inputs = {entry.dataset.name: entry for entry in found.inputs.dataset_inputs}
    assert set(inputs) == {"train", "eval"}
    assert all(data_report.digest.startswith(entry.dataset.digest) for entry in inputs.values())
    assert json.loads(inputs["train"].dataset.profile)["num_rows"] == 12
    assert [tag.value for tag in inputs["eval"].tags if tag.key == "mlflow.data.context"] == ["evaluation"]
    assert found.data.tags["grpo.data_digest"] == data_report.digest
    assert {"data/report.md", "data/quarantine.parquet", "data/sources.json"} <= artifacts_of(client, run.run_id)
    assert found.data.metrics["data/quarantined"] == 1
    assert pl.read_parquet(client.download_artifacts(run.run_id, "data/train.parquet")).height == 12


def test_the_probes_of_the_lab_are_a_table_with_shortened_texts(config, client, lab_report):
    pl.DataFrame({"completion": ["x"]}).write_parquet(lab_report.directory / "samples.parquet")
    (lab_report.directory / "log.txt").write_text("sampled 16 prompts from http://me:secret-word@host/x\n")
    run = record(config, lab_report)
    table = json.loads(text(client, run.run_id, "lab/probes.json"))
    assert table["columns"] == ["probe", "completion", "scores", "format"]
    assert len(table["data"]) == 2
    assert len(table["data"][1][1]) < 3_000
    assert "1000000 characters" in table["data"][1][1]
    assert {"lab/report.md", "lab/probes.parquet", "lab/samples.parquet"} <= artifacts_of(client, run.run_id)
    assert client.get_run(run.run_id).data.metrics["lab/format/share_with_signal"] == 0.75
    log = text(client, run.run_id, "logs/probe_rewards.txt")
    assert "sampled 16 prompts" in log
    assert "secret-word" not in log


TURNS = [
    {"text": "6 * 7?", "reward": None, "answers": [{"role": "tool", "content": "42"}]},
    {"text": "It is 42.", "reward": 1.0, "answers": []},
]
PLAYED = json.dumps({"turns": TURNS, "ending": "done", "error": None})
SHOWN = "[turn 1] 6 * 7?\n[tool] 42\n[turn 2 (reward 1)] It is 42."


@pytest.mark.slow
def test_a_stage_is_a_child_run_with_everything_of_its_folder(config, client, make_stage):
    stage = make_stage(config)
    # The first files of the stage were written by a version without conversations.
    rows = {"prompt_id": ["a", "b"], "completion": ["It is 42.", "No."], "conversation": [PLAYED, None], "reward": [1.0, 0.0]}
    pl.DataFrame(rows).write_parquet(StageDir(stage.directory).completions(40))
    (stage.directory / "checkpoints" / "step-000020").mkdir(parents=True)
    (stage.directory / "log.txt").write_text("update 1\n")
    counts = {"prompts": 4, "kept": 1, "low": 0.1, "high": 0.9, "never_solved": 2, "below": 0, "above": 0, "always_solved": 1}
    pl.DataFrame({"prompt_id": ["b"], "reason": ["never_solved"]}).write_parquet(stage.directory / "left_out.parquet")
    run = record(config, stage.model_copy(update={"kept": KeptPrompts(**counts, unknown=0)}))
    child = child_of(client, run)
    assert child.data.params == stage_params(config, "format")
    assert [step for step, _, _ in history(client, child.info.run_id, "reward")] == list(range(1, 41))
    figures = {"final/reward": 3.5, "prompts/kept": 1, "prompts/never_solved": 2}
    assert figures.items() <= child.data.metrics.items()
    files = artifacts_of(client, child.info.run_id)
    plots = {"reward", "reward_std", "kl", "rewards", "completion_length", "truncated", "dead_groups", "learning_rate"}
    assert {f"plots/{title}.png" for title in plots | {"tokens_per_s"}} <= files
    assert {"completions/step-000020.parquet", "metrics.jsonl", "spec.json", "result.json", "logs/train_stage.txt"} <= files
    assert {"adapter/adapter_config.json", "prompts/left_out.parquet", "prompts/left_out.json"} <= files
    assert "plots/overview.png" in artifacts_of(client, run.run_id)
    adapter = Path(client.download_artifacts(child.info.run_id, "adapter/adapter_model.safetensors"))
    assert adapter.read_bytes() == (stage.directory / "final" / "adapter_model.safetensors").read_bytes()
    table = json.loads(text(client, child.info.run_id, "completions.json"))
    assert [row[table["columns"].index("completion")] for row in table["data"]][-2:] == [SHOWN, "No."]
    assert len(table["data"]) == 5
    assert "conversation" not in table["columns"]
    # The system prompt is linked to the stage and to its models.
    name, _, number = run.system_prompt.rpartition("/")
    linked = [{"name": name, "version": number}]
    assert json.loads(child.data.tags["mlflow.linkedPrompts"]) == linked
    assert child.data.tags["system_prompt"] == f"{name}/{number}"
    models = {model.name: model for model in client.search_logged_models([run.experiment_id])}
    assert set(models) == {"format", "format-step-20"}
    assert all(json.loads(model.tags["mlflow.linkedPrompts"]) == linked for model in models.values())


def test_an_evaluation_is_metrics_and_a_table_of_judged_answers(config, client, make_evaluation, data_report):
    base, merged = make_evaluation("base", 0.25), make_evaluation("merged", 0.9, "a" * 16)
    ids = pl.read_parquet(data_report.eval)["prompt_id"].to_list()
    rows = {"prompt_id": [ids[1], ids[0]], "sample": [0, 0], "completion": ["2", "7"], "token_ids": [[1], [2]]}
    played = {"correct": [True, False], "conversation": [PLAYED, None]}
    pl.DataFrame(rows | played).write_parquet(merged.samples)
    run = record(config, data_report, base, merged)
    table = json.loads(text(client, run.run_id, "evaluation/merged/samples.json"))
    assert table["columns"][:4] == ["question", "ground_truth", "model_answer", "verdict"]
    assert [row[:4] for row in table["data"]] == [["What is 1 + 1?", "2", SHOWN, "right"], ["What is 0 + 1?", "1", "7", "wrong"]]
    assert not {"token_ids", "conversation"} & set(table["columns"])
    metrics = client.get_run(run.run_id).data.metrics
    assert (metrics["base/accuracy"], metrics["merged/format_rate"], metrics["merged/pass_at_4"]) == (0.25, 0.9, 0.9)
    assert metrics["merged/accuracy_low"] == pytest.approx(0.85)
    assert {"merged/greedy_accuracy", "merged/lenient_accuracy"} <= metrics.keys()
    assert {f"evaluation/merged/{name}" for name in ("report.md", "samples.parquet")} <= artifacts_of(client, run.run_id)


def test_merge_publication_and_pass_rates_are_recorded(config, client, make_merge, tmp_path):
    known = {"run_id": "x", "model_name": "m", "model_version": "3", "champion": True, "reason": "better than the base"}
    publication = Publication(key="2" * 16, directory=tmp_path, seconds=0.1, tests=[verdict("base", True)], **known)
    folder = tmp_path / "difficulty"
    folder.mkdir()
    (folder / "report.md").write_text("# Difficulty")
    pl.DataFrame({"stage": ["format"], "prompt_id": ["a"]}).write_parquet(folder / "pass_rates.parquet")
    mean = Interval(value=0.3, low=0.2, high=0.4)
    solved = StageDifficulty(stage="format", prompts=4, mean=mean, never_solved=2, always_solved=1, histogram=[2, 0, 1, 0, 0, 1])
    measured = {"label": "start", "origin": "measured", "samples": 8, "success": 0.8, "stages": [solved]}
    run = record(config, make_merge(), publication, DifficultyReport(key="d" * 16, directory=folder, seconds=1.0, **measured))
    found = client.get_run(run.run_id)
    assert found.data.metrics["merge/greedy_agreement"] == 1.0
    assert found.data.tags["grpo.model_version"] == "m/3"
    figures = {"mean_pass_rate": 0.3, "mean_pass_rate_high": 0.4, "never_solved": 2}
    assert {f"difficulty/start/format/{name}": value for name, value in figures.items()}.items() <= found.data.metrics.items()
    files = {"merge/proof.json", "publication/decision.json", "difficulty/start/report.md", "difficulty/start/pass_rates.parquet"}
    assert files <= artifacts_of(client, run.run_id)


def test_a_table_that_is_recorded_again_replaces_the_first_one(config, client):
    with open_run(config, key="k") as run:
        for texts in (["a", "b"], ["c"]):
            run.handle.table(pl.DataFrame({"text": texts}), "evaluation/samples.json")
    read = client.load_table(run.experiment_id, "evaluation/samples.json", run_ids=[run.run_id])
    assert read["text"].tolist() == ["c"]


def test_own_modules_and_what_they_import_are_artifacts(database, client, make_config, tmp_path):
    (tmp_path / "own_tools.py").write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    (tmp_path / "own_shown.py").write_text("def solve(row):\n    return row['answer']\n")
    (tmp_path / "own_rewards.py").write_text("from own_words import WORDS\n\ndef own(completions, **_):\n    return [1.0]\n")
    (tmp_path / "own_words.py").write_text("WORDS = ['a']\n")
    shown = {"name": "shown", "kind": "sft", "demonstrations": {"function": "own_shown:solve"}}
    run = record(
        make_config(
            database,
            rewards={"functions": {"own": {"function": "own_rewards:own"}}, "module_dir": str(tmp_path)},
            interaction={"tools": ["own_tools:add"]},
            stages=[shown, {"name": "format", "rewards": ["format"], "max_steps": 40}],
        )
    )
    for path, words in (
        ("rewards/own_rewards.py", "def own"),
        ("rewards/own_words.py", "WORDS"),
        ("interaction/own_tools.py", "def add"),
        ("demonstrations/own_shown.py", "def solve"),
    ):
        assert words in text(client, run.run_id, path)


def finished_stage(make_stage, config, *, key, shift):
    """A stage with two checkpoints whose journal is `shift` better."""
    stage = make_stage(config, key=key * 16)
    (stage.directory / "metrics.jsonl").unlink()
    write_journal(stage.directory / "metrics.jsonl", range(1, 41), shift=shift)
    for step in (20, 40):
        (stage.directory / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    return stage


def best(run, metric, condition=None):
    order = [{"field_name": f"metrics.{metric}", "ascending": False}]
    return mlflow.search_logged_models([run.experiment_id], condition, order_by=order, output_format="list")


@pytest.mark.long
@pytest.mark.ci
def test_the_best_models_of_all_runs_are_found_by_a_search(
    client, config, make_stage, make_merge, make_evaluation, data_report, offer
):
    for key, accuracy in (("a", 0.5), ("b", 0.8), ("c", 0.7)):
        stage, merged = finished_stage(make_stage, config, key=key, shift=accuracy), make_evaluation("merged", accuracy, key * 16)
        record(config, data_report, stage, make_evaluation("format", accuracy, key * 16), key=key)
        with open_run(config, key=key) as run:
            run.record(data_report)
            run.record(merged)
            offer(run, make_merge(key), evaluation=merged, log=log_model)
    found = best(run, "accuracy", "model_type = 'stage'")[0]
    assert (found.name, found.tags["grpo.sha256"]) == ("format", "5" * 64)
    assert found.tags["path"].endswith("format-bbbbbbbb/final")
    [accuracy] = [metric for metric in found.metrics if metric.key == "accuracy"]
    assert (accuracy.value, accuracy.step, accuracy.dataset_name) == (0.8, 40, "eval")
    assert data_report.digest.startswith(accuracy.dataset_digest)
    checkpoint = best(run, "reward", "model_type = 'checkpoint'")[0]
    assert (checkpoint.name, checkpoint.tags["step"]) == ("format-step-40", "40")
    assert "format-bbbbbbbb" in checkpoint.tags["path"]
    assert {metric.key: metric.value for metric in checkpoint.metrics}["reward"] == pytest.approx(4.8)
    merged = best(run, "accuracy", "name = 'model'")
    assert [[metric.value for metric in model.metrics if metric.key == "accuracy"] for model in merged] == [[0.8], [0.7], [0.5]]


@pytest.mark.slow
def test_linking_a_checkpoint_adds_no_point_and_can_repeat(client, config, make_stage, make_evaluation):
    stage, evaluation = finished_stage(make_stage, config, key="a", shift=0.0), make_evaluation("format", 0.5)
    for _ in range(2):
        run = record(config, stage, evaluation)
        child = child_of(client, run).info.run_id
        assert [step for step, _, _ in history(client, child, "reward")] == list(range(1, 41))
        assert [value for _, value, _ in history(client, child, "accuracy")] == [0.5]
        models = client.search_logged_models([run.experiment_id])
        assert sorted(model.name for model in models) == ["format", "format-step-20", "format-step-40"]
        assert {model.status for model in models} == {"READY"}
        for run_id in (child, run.run_id):
            # As after a kill between the work and its marker.
            client.delete_tag(run_id, MARKER)
    params, searched = stage_params(config, "format"), ("learning_rate", "model.lora.", "reward.", "rollout.temperature")
    wanted = {name: value for name, value in params.items() if name.startswith(searched)}
    assert len(params) > 100, "more than a logged model takes"
    assert len(wanted) > 10
    assert all(wanted.items() <= model.params.items() for model in models)


@pytest.mark.slow
def test_a_held_out_set_has_a_second_version_after_the_data_changed(client, config, data_report):
    def held_out(key):
        run = record(config, data_report.model_copy(update={"key": key * 16}), key=key)
        return run, client.get_run(run.run_id).data.tags["held_out"]

    _, first = held_out("1")
    assert held_out("2")[1] == first == f"{config.name} held-out v1"
    pl.read_parquet(data_report.eval).head(3).write_parquet(data_report.eval)
    run, second = held_out("3")
    assert second == f"{config.name} held-out v2"
    found = {dataset.name: dataset for dataset in client.search_datasets(experiment_ids=[run.experiment_id])}
    assert {name: dataset.tags["rows"] for name, dataset in found.items()} == {first: "4", second: "3"}
    rows = sorted(json.dumps([row["inputs"], row["expectations"]]) for _, row in found[first].to_df().iterrows())
    message = {"role": "user", "content": "What is 0 + 1?"}
    assert json.loads(rows[0]) == [{"messages": [message]}, {"expected_response": "1"}]


@pytest.mark.slow
def test_a_system_prompt_has_a_version_for_each_text(client, database, make_config, make_merge, offer):
    versions = {}
    for key, said in {"one": "Use {{tags}}.", "two": "Be brief.", "three": "Use {{tags}}."}.items():
        config = make_config(database, data={"train": [{"path": "train.jsonl"}], "system_prompt": said})
        with open_run(config, key=key) as run:
            versions[key] = run.system_prompt
    assert versions["one"] == versions["three"] != versions["two"]
    assert client.load_prompt(f"prompts:/{versions['three']}").template == said
    name, _, number = versions["three"].rpartition("/")
    assert name == f"{config.registered_model}-system-prompt"
    with open_run(config, key="three") as run:
        offer(run, make_merge())
    [model] = client.search_logged_models([run.experiment_id])
    for tags in (model.tags, client.get_run(run.run_id).data.tags):
        assert json.loads(tags["mlflow.linkedPrompts"]) == [{"name": name, "version": number}]
    # The registry of models shows models only.
    assert [model.name for model in client.search_registered_models()] == [config.registered_model]


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "server"], indirect=True)
def test_completions_are_traces_with_ground_truth_and_verdicts_once(client, config, data_report, make_evaluation, monkeypatch):
    monkeypatch.setattr(records, "MAX_TRACES", 2)
    ids = pl.read_parquet(data_report.eval)["prompt_id"].to_list()[:3]
    evaluations = [make_evaluation("base"), make_evaluation("format", key="e" * 16), make_evaluation("merged", key="c" * 16)]
    for evaluation in evaluations:
        rows = {"prompt_id": [one for one in ids for _ in range(2)], "sample": [0, 1] * 3, "completion": list("abcdef")}
        verdicts = {"correct": [True, False] * 3, "strict_format": [True] * 6, "reward": [1.5] * 6, "token_ids": [[1]] * 6}
        pl.DataFrame(rows | verdicts).write_parquet(evaluation.samples)
    wanted = sorted(f"{label}/{prompt}/0" for label in ("base", "merged") for prompt in ids[:2])
    for _ in range(2):
        run = record(config, data_report, *evaluations)
        found = client.search_traces(locations=[run.experiment_id])
        assert sorted(trace.info.tags["grpo.sample"] for trace in found) == wanted
        # As after a kill between the work and its marker.
        client.delete_tag(run.run_id, MARKER)
    [trace] = [trace for trace in found if trace.info.tags["grpo.sample"] == f"merged/{ids[1]}/0"]
    assert trace.info.trace_metadata["mlflow.sourceRun"] == run.run_id
    assert trace.data.spans[0].inputs == {"messages": [{"role": "user", "content": "What is 1 + 1?"}]}
    assert trace.data.spans[0].outputs == {"role": "assistant", "content": "c"}
    judged = {assessment.name: assessment.value for assessment in trace.info.assessments}
    assert judged == {"correct": True, "format": True, "reward": 1.5, "expected_response": "2"}

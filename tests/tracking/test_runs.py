"""A run is found by its key, filled from folders, and ends with the pipeline's status."""

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import yaml
from mlflow import MlflowClient

from grpo_tasks.tracking.description import flatten, stage_params
from grpo_tasks.tracking.runs import KEY_TAG, open_run
from schemas.config.run import RunConfig
from schemas.errors import TrackingError
from schemas.results.base import OutputFile
from schemas.results.data import PreparedData, SourceFile
from schemas.results.evaluation import DifficultyReport, Interval, PairedTest, StageDifficulty
from schemas.results.model import KeptPrompts
from schemas.results.publication import Publication

from .conftest import history, write_journal


@pytest.fixture
def config(database, make_config):
    return make_config(database)


@pytest.fixture
def client(config):
    return MlflowClient(config.tracking.tracking_uri)


on_both_stores = pytest.mark.parametrize("database", ["sqlite", "server"], indirect=True)


def artifacts(client, run_id, folder=None):
    found = set()
    for entry in client.list_artifacts(run_id, folder):
        found |= artifacts(client, run_id, entry.path) if entry.is_dir else {entry.path}
    return found


def children(client, run):
    experiment = client.get_run(run.run_id).info.experiment_id
    found = client.search_runs([experiment], f"tags.mlflow.parentRunId = '{run.run_id}'")
    return {child.data.tags["grpo.stage"]: child for child in found}


def snapshot(client, run_id):
    """Everything that the store shows of a run, down to each value."""
    run = client.get_run(run_id)
    values = {metric: history(client, run_id, metric) for metric in run.data.metrics}
    inputs = [(found.dataset.name, found.dataset.digest) for found in run.inputs.dataset_inputs]
    files = artifacts(client, run_id)
    return (run.info.status, run.info.end_time, dict(run.data.params), dict(run.data.tags), values, inputs, files)


@on_both_stores
def test_every_config_field_is_a_param_and_a_file_restores_them(config, client):
    with open_run(config, key="k1") as run:
        pass
    assert client.get_run(run.run_id).data.params == flatten(config)
    text = Path(client.download_artifacts(run.run_id, "config.yaml")).read_text()
    assert RunConfig.model_validate(yaml.safe_load(text)) == config


@on_both_stores
def test_a_long_field_is_neither_dropped_nor_cut(database, make_config):
    prompt = "".join(f"Rule {number}: think – then answer.\n" for number in range(700))
    sources = [{"path": f"part-{number}.jsonl"} for number in range(40)]
    config = make_config(database, data={"train": sources, "system_prompt": prompt})
    with open_run(config, key="long") as run:
        pass
    params = run.store.client.get_run(run.run_id).data.params
    assert params == flatten(config)
    assert len(params) > 300
    parts = [params[f"data.system_prompt.part{number}"] for number in range(1, 5)]
    assert "".join(parts) == prompt


def test_a_run_records_its_environment(config, client):
    with open_run(config, key="env", flow_run_id="flow-1") as run:
        pass
    tags = client.get_run(run.run_id).data.tags
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert tags["git.commit"] == (head.stdout.strip() or "none")
    assert tags["git.dirty"] in {"true", "false"}
    assert tags["seed"] == str(config.seed)
    assert tags["prefect.flow_run_id"] == "flow-1"
    environment = json.loads(Path(client.download_artifacts(run.run_id, "environment.json")).read_text())
    assert environment["python"].startswith("3.")
    assert {"torch", "transformers", "polars", "mlflow"} <= environment["packages"].keys()


def test_a_key_finds_its_run_and_fresh_makes_another(config):
    with open_run(config, key="same") as first:
        pass
    with open_run(config, key="same") as second:
        pass
    with open_run(config, key="other") as other:
        pass
    with open_run(config, key="same", fresh=True) as fresh:
        pass
    with open_run(config, key="same") as latest:
        pass
    assert first.run_id == second.run_id
    assert len({first.run_id, other.run_id, fresh.run_id}) == 3
    assert latest.run_id == fresh.run_id
    assert first.handle.store.client.get_run(first.run_id).data.tags[KEY_TAG] == "same"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status"),
    [(None, "FINISHED"), (ValueError("x"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(1), "KILLED")],
)
def test_a_run_and_its_children_end_with_the_status_of_the_pipeline(database, make_config, make_stage, fault, status):
    config, client = make_config(database), MlflowClient(database)
    stage = make_stage(config, steps=3, finish=False)

    def go():
        with open_run(config, key="end") as run:
            run.follow(stage.directory).ship()
            if fault:
                raise fault
        return run

    if fault:
        with pytest.raises(type(fault)):
            go()
    else:
        go()
    found = client.search_runs([client.get_experiment_by_name(config.experiment).experiment_id])
    assert {run.info.status for run in found} == {status}
    assert len(found) == 2
    with open_run(config, key="end") as run:
        run.child("format", stage.key).tags({"note": "resumed"})
    assert {run.info.status for run in [client.get_run(run.run_id), *children(client, run).values()]} == {"FINISHED"}


@pytest.mark.long
@pytest.mark.ci
@on_both_stores
def test_recording_everything_twice_changes_nothing(
    config, client, make_stage, data_report, lab_report, make_evaluation, make_merge
):
    stages = [make_stage(config), make_stage(config, "correctness", key="b" * 16, steps=30)]
    results = [
        data_report,
        lab_report,
        make_evaluation("base", 0.3),
        *stages,
        make_merge(),
        make_evaluation("merged", 0.9, "c" * 16),
    ]
    with open_run(config, key="twice", flow_run_id="flow-1") as run:
        outcomes = [run.record(result) for result in results]
        assert all(outcomes)
    ids = [run.run_id, *(child.info.run_id for child in children(client, run).values())]
    before = [snapshot(client, run_id) for run_id in ids]
    with open_run(config, key="twice", flow_run_id="flow-2") as run:
        outcomes = [run.record(result) for result in results]
        assert not any(outcomes)
    assert [snapshot(client, run_id) for run_id in ids] == before
    assert len(children(client, run)) == 2


@pytest.mark.long
def test_recording_again_after_a_kill_before_the_marker_changes_nothing(
    config, client, make_stage, data_report, lab_report, make_evaluation
):
    results = [data_report, lab_report, make_evaluation("base", 0.3), make_stage(config)]
    with open_run(config, key="torn") as run:
        for result in results:
            run.record(result)
    ids = [run.run_id, children(client, run)["format"].info.run_id]
    before = [snapshot(client, run_id) for run_id in ids]
    for run_id in ids:
        client.delete_tag(run_id, "grpo.recorded")
    with open_run(config, key="torn") as run:
        outcomes = [run.record(result) for result in results]
        assert all(outcomes)
    after = [snapshot(client, run_id) for run_id in ids]
    assert [state[2:] for state in after] == [state[2:] for state in before]
    table = json.loads(Path(client.download_artifacts(run.run_id, "lab/probes.json")).read_text())
    assert len(table["data"]) == 2, "the table was appended to"


def test_data_becomes_dataset_inputs_with_the_content_digest(config, client, data_report):
    prepared = PreparedData(
        key="1" * 16,
        directory=data_report.directory,
        seconds=0.1,
        rows=17,
        sources=[SourceFile(path="a.jsonl", split="train", rows=17, sha256="0" * 64)],
    )
    with open_run(config, key="data") as run:
        run.record(prepared)
        run.record(data_report)
    found = client.get_run(run.run_id)
    inputs = {entry.dataset.name: entry for entry in found.inputs.dataset_inputs}
    assert set(inputs) == {"train", "eval"}
    assert all(data_report.digest.startswith(entry.dataset.digest) for entry in inputs.values())
    assert json.loads(inputs["train"].dataset.profile)["num_rows"] == 12
    assert [tag.value for tag in inputs["eval"].tags if tag.key == "mlflow.data.context"] == ["evaluation"]
    assert found.data.tags["grpo.data_digest"] == data_report.digest
    assert {"data/report.md", "data/quarantine.parquet", "data/sources.json"} <= artifacts(client, run.run_id)
    assert found.data.metrics["data/quarantined"] == 1


def test_the_probes_of_the_lab_are_a_table_with_shortened_texts(config, client, lab_report):
    with open_run(config, key="lab") as run:
        run.record(lab_report)
    table = json.loads(Path(client.download_artifacts(run.run_id, "lab/probes.json")).read_text())
    assert table["columns"] == ["probe", "completion", "scores", "format"]
    assert len(table["data"]) == 2
    assert len(table["data"][1][1]) < 3_000
    assert "1000000 characters" in table["data"][1][1]
    assert {"lab/report.md", "lab/probes.parquet"} <= artifacts(client, run.run_id)
    assert client.get_run(run.run_id).data.metrics["lab/format/share_with_signal"] == 0.75


@pytest.mark.slow
def test_a_stage_is_a_child_run_with_everything_of_its_folder(config, client, make_stage):
    stage = make_stage(config)
    with open_run(config, key="stage") as run:
        run.record(stage)
    child = children(client, run)["format"]
    assert child.data.tags["grpo.stage"] == "format"
    assert child.data.params == stage_params(config, "format")
    assert [step for step, _, _ in history(client, child.info.run_id, "reward")] == list(range(1, 41))
    assert child.data.metrics["final/reward"] == 3.5
    files = artifacts(client, child.info.run_id)
    assert {"adapter/adapter_model.safetensors", "adapter/adapter_config.json"} <= files
    assert {"completions/step-000020.parquet", "completions.json", "metrics.jsonl", "spec.json", "result.json"} <= files
    assert {
        f"plots/{title}.png" for title in ("reward", "reward_std", "kl", "rewards", "completion_length", "truncated")
    } <= files
    assert {f"plots/{title}.png" for title in ("dead_groups", "learning_rate", "tokens_per_s")} <= files
    assert "plots/overview.png" in artifacts(client, run.run_id)
    adapter = Path(client.download_artifacts(child.info.run_id, "adapter/adapter_model.safetensors"))
    assert adapter.read_bytes() == (stage.directory / "final" / "adapter_model.safetensors").read_bytes()
    table = json.loads(Path(client.download_artifacts(child.info.run_id, "completions.json")).read_text())
    assert len(table["data"]) == 6


@pytest.mark.slow
def test_a_killed_stage_resumes_in_the_same_child_run(config, client, make_stage):
    stage = make_stage(config, steps=25, finish=False)

    def ship_and_be_killed():
        with open_run(config, key="cut") as run:
            run.follow(stage.directory).ship()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ship_and_be_killed()
    with open_run(config, key="cut") as run:
        first = children(client, run)["format"]
    assert first.info.status == "KILLED"
    write_journal(stage.directory / "metrics.jsonl", range(26, 41), started_ms=1_789_000_900_000)
    with open_run(config, key="cut") as run:
        shipper = run.follow(stage.directory)
        assert shipper.ship()
        assert children(client, run)["format"].info.status == "RUNNING"
        run.record(stage)
    child = children(client, run)["format"]
    assert child.info.run_id == first.info.run_id
    assert child.info.status == "FINISHED"
    assert [step for step, _, _ in history(client, child.info.run_id, "reward")] == list(range(1, 41))


def test_evaluations_are_metrics_of_the_parent_run(config, client, make_evaluation):
    with open_run(config, key="eval") as run:
        run.record(make_evaluation("base", 0.25))
        run.record(make_evaluation("merged", 0.9, "a" * 16))
    metrics = client.get_run(run.run_id).data.metrics
    assert metrics["base/accuracy"] == 0.25
    assert metrics["merged/format_rate"] == 0.9
    assert metrics["merged/accuracy_low"] == pytest.approx(0.85)
    assert metrics["merged/pass_at_4"] == 0.9
    assert {"merged/greedy_accuracy", "merged/lenient_accuracy"} <= metrics.keys()
    assert {f"evaluation/merged/{name}" for name in ("report.md", "samples.parquet", "samples.json")} <= artifacts(
        client, run.run_id
    )


def test_merge_and_publication_are_recorded(config, client, make_merge, tmp_path):
    test = PairedTest(against="base", metric="accuracy", prompts=64, difference=0.6, p_value=1e-9, better=True)
    publication = Publication(
        key="2" * 16,
        directory=tmp_path,
        seconds=0.1,
        run_id="x",
        model_name="m",
        model_version="3",
        champion=True,
        tests=[test],
        reason="better than the base",
    )
    with open_run(config, key="published") as run:
        run.record(make_merge())
        run.record(publication)
    found = client.get_run(run.run_id)
    assert found.data.metrics["merge/greedy_agreement"] == 1.0
    assert found.data.tags["grpo.model_version"] == "m/3"
    assert {"merge/proof.json", "publication/decision.json"} <= artifacts(client, run.run_id)


def test_a_publication_that_is_repeated_without_files_is_not_recorded_again(config, client, tmp_path):
    files = (OutputFile(path="spec.json", bytes=2, sha256="0" * 64),)
    known = {"model_name": "m", "model_version": "3", "champion": True, "tests": [], "reason": "better than the base"}
    first = Publication(key="2" * 16, directory=tmp_path, seconds=0.1, run_id="x", **known).sealed(files)
    with open_run(config, key="published", flow_run_id="one") as run:
        run.record(first)
    # Publishing again logs no model: its step leaves no files.
    with open_run(config, key="published", flow_run_id="two") as run:
        run.record(first.sealed(()))
    assert client.get_run(run.run_id).data.tags["prefect.flow_run_id"] == "one"


def test_a_table_that_is_recorded_again_replaces_the_first_one(config, client, tmp_path):
    with open_run(config, key="k") as run:
        for texts in (["a", "b"], ["c"]):
            run.handle.table(pl.DataFrame({"text": texts}), "evaluation/samples.json")
    with run.store.as_default():
        read = client.load_table(run.handle.experiment_id, "evaluation/samples.json", run_ids=[run.run_id])
    assert read["text"].tolist() == ["c"]


def test_a_setting_that_changes_under_the_same_key_becomes_a_tag(database, make_config):
    client = MlflowClient(database)
    with open_run(make_config(database), key="res") as run:
        pass
    with open_run(make_config(database, resources={"num_threads": 2}), key="res") as again:
        pass
    assert again.run_id == run.run_id
    data = client.get_run(run.run_id).data
    assert data.params["resources.num_threads"] == "null"
    assert data.tags["param.resources.num_threads"] == "2"


def test_a_deleted_experiment_is_named_with_the_command_that_restores_it(database, make_config):
    config, client = make_config(database), MlflowClient(database)
    with open_run(config, key="x"):
        pass
    client.delete_experiment(client.get_experiment_by_name(config.experiment).experiment_id)
    with pytest.raises(TrackingError, match="deleted") as caught, open_run(config, key="x"):
        pass
    assert "mlflow experiments restore" in caught.value.fix
    assert caught.value.place == database


@pytest.mark.slow
def test_the_default_store_is_a_database_in_the_working_directory(database, make_config, tmp_path):
    # In a separate process: mlflow caches relative addresses from the working directories that a process had before.
    code = (
        "import sys; from schemas.config.run import RunConfig; from grpo_tasks.tracking.runs import open_run\n"
        "with open_run(RunConfig.model_validate_json(sys.argv[1]), key='default') as run: pass\n"
        "print(run.store.uri, run.run_id)"
    )
    command = [sys.executable, "-c", code, make_config(None).model_dump_json()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    uri, run_id = done.stdout.split()
    assert uri == "sqlite:///mlflow.db"
    assert MlflowClient(database).get_run(run_id).info.status == "FINISHED"
    assert (tmp_path / "mlruns").is_dir()


@pytest.mark.slow
def test_pass_rates_and_the_what_it_trains_on_are_recorded(config, client, make_stage, tmp_path):
    folder = tmp_path / "difficulty"
    folder.mkdir()
    (folder / "report.md").write_text("# Difficulty")
    pl.DataFrame({"stage": ["format"], "prompt_id": ["a"]}).write_parquet(folder / "pass_rates.parquet")
    mean = Interval(value=0.3, low=0.2, high=0.4)
    solved = StageDifficulty(stage="format", prompts=4, mean=mean, never_solved=2, always_solved=1, histogram=[2, 0, 1, 0, 0, 1])
    difficulty = DifficultyReport(
        key="d" * 16, directory=folder, seconds=1.0, label="start", origin="measured", samples=8, success=0.8, stages=[solved]
    )
    counts = {"prompts": 4, "kept": 1, "low": 0.1, "high": 0.9, "never_solved": 2, "below": 0, "above": 0, "always_solved": 1}
    stage = make_stage(config)
    pl.DataFrame({"prompt_id": ["b"], "reason": ["never_solved"]}).write_parquet(stage.directory / "left_out.parquet")
    with open_run(config, key="1" * 64) as run:
        assert run.record(difficulty)
        assert not run.record(difficulty)
        run.record(stage.model_copy(update={"kept": KeptPrompts(**counts, unknown=0)}))
    metrics = client.get_run(run.run_id).data.metrics
    assert metrics["difficulty/start/format/mean_pass_rate"] == 0.3
    assert metrics["difficulty/start/format/mean_pass_rate_high"] == 0.4
    assert metrics["difficulty/start/format/never_solved"] == 2
    assert {"difficulty/start/report.md", "difficulty/start/pass_rates.parquet"} <= artifacts(client, run.run_id)
    child = children(client, run)["format"]
    assert child.data.metrics["prompts/kept"] == 1
    assert child.data.metrics["prompts/never_solved"] == 2
    assert {"prompts/left_out.parquet", "prompts/left_out.json"} <= artifacts(client, child.info.run_id)

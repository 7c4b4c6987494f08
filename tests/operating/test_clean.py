"""`grpo clean` lists what is left on the disk, with sizes. What is in use, undecided or the champion's stays."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_tasks.kit.lock import file_lock
from grpo_tasks.operating.clean import find
from schemas.config.operations import TrackingConfig
from schemas.results.publication import Approval, Publication
from tests.flows.place import SMALL, Place, wait_for_step
from tests.tracking.conftest import database, empty_database  # noqa: F401 - fixtures

KEY = "0123456789abcdef"
DAY_S = 86_400


def clean(*arguments, expect=0):
    outcome = CliRunner().invoke(app, ["clean", *arguments], env={"COLUMNS": "200"})
    assert outcome.exit_code == expect, outcome.output
    return outcome.output


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """An empty working directory with a cache of its own; returns what makes a finished run there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(name, *, days=0, size=1_000_000, version=None):
        folder = tmp_path / "runs" / name
        (folder / ".locks").mkdir(parents=True)
        for number, label in enumerate(["format", "format", "correctness"]):
            stage = folder / "train_stage" / f"{label}-{KEY[:-1]}{number}"
            stage.mkdir(parents=True)
            (stage / "weights").write_bytes(b"x" * size)
            (stage / "result.json").write_text("{}")
            os.utime(stage / "result.json", (1_000_000_000 + number,) * 2)
        if version is not None:
            published = folder / "publish_model" / f"all-{KEY}"
            published.mkdir(parents=True)
            known = {
                "run_id": "r",
                "model_name": name,
                "model_version": str(version),
                "champion": False,
                "tests": [],
                "reason": "",
            }
            Publication(key=KEY, directory=published, seconds=1.0, **known).sealed(()).save(published / "result.json")
        for path in folder.rglob("*"):
            if path.is_file() and days:
                os.utime(path, (time.time() - days * DAY_S,) * 2)
        return folder

    return make


@pytest.mark.parametrize("name", ["nosuch", "../other", "/", "x*"])
def test_a_name_of_no_run_is_refused_with_those_that_there_are(runs, name):
    runs("mine")
    output = clean(name, "--yes", expect=1)
    assert f"no such run: {name}" in output
    assert "the runs here are mine" in output
    assert (Path.cwd() / "runs/mine").is_dir()


def test_without_a_request_everything_is_listed_and_nothing_removed(runs, tmp_path):
    folder = runs("mine", size=2_000_000)
    (folder / "downloads").mkdir()
    (tmp_path / "runs" / "models").mkdir()
    (tmp_path / "runs" / "notes-of-mine").mkdir()
    before = sorted(tmp_path.rglob("*"))
    shown = clean()
    assert "runs/mine" in shown
    assert "6.0 MB" in shown
    assert "superseded" in shown
    assert "runs/mine/downloads" in shown
    assert "runs/models" in shown
    assert "notes-of-mine" not in shown, "no run has made it"
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == [folder / ".locks" / "folder"]
    assert "nothing was removed; add --yes" in clean("mine")
    assert folder.exists()


def test_a_run_goes_by_its_name_and_only_that_one(runs):
    mine, other = runs("mine"), runs("mine-too")
    assert "removed" in clean("mine", "--yes")
    assert not mine.exists()
    assert other.exists()
    runs("mine-3")
    clean("mine-*", "--yes")
    assert not other.exists()


def test_old_runs_go_by_their_age(runs):
    old, new = runs("old", days=40), runs("new", days=2)
    clean("--older-than", "30d", "--yes")
    assert (old.exists(), new.exists()) == (False, True)
    assert "30 moons" in clean("--older-than", "30 moons", expect=2)


@pytest.mark.parametrize("text", ['{"key": "0', '{"of_another": "version"}', ""])
def test_a_run_whose_publication_cannot_be_read_goes_by_its_name_only(runs, text):
    folder, result = runs("mine", days=40, version=1), f"publish_model/all-{KEY}/result.json"
    (folder / result).write_text(text)
    os.utime(folder / result, (time.time() - 40 * DAY_S,) * 2)
    for selection in (["--older-than", "30d"], ["--superseded"]):
        shown = clean(*selection, "--yes")
        assert f"{result} cannot be read, and a model that it names may wait for approval" in shown
    assert len(list((folder / "train_stage").iterdir())) == 3
    clean("mine", "--yes")
    assert not folder.exists()


def test_of_the_same_step_only_the_newest_result_stays(runs):
    folder = runs("mine")
    damaged = folder / "train_stage" / f"format-{KEY}.damaged-1"
    damaged.mkdir()
    unfinished = folder / "train_stage" / f"hard-{KEY}"
    (unfinished / "checkpoints").mkdir(parents=True)
    clean("--superseded", "--yes")
    left = sorted(path.name for path in (folder / "train_stage").iterdir())
    assert left == [f"correctness-{KEY[:-1]}2", f"format-{KEY[:-1]}1", f"hard-{KEY}"]
    assert "can resume hard" in clean()


def test_caches_go_and_runs_stay(runs, tmp_path):
    folder = runs("mine")
    for name in ("runs/models/m-1", "runs/mine/champions/c", "cache/grpo-pipeline"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("x")
    (tmp_path / ".grpo").mkdir()
    (tmp_path / ".grpo" / "prefect-server.log").write_text("x")
    clean("--caches", "--yes")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["mine"]
    assert not (folder / "champions").exists()
    assert list((tmp_path / "cache").iterdir()) == []
    assert list((tmp_path / ".grpo").iterdir()) == []
    assert len(list((folder / "train_stage").iterdir())) == 3


def test_what_a_run_or_process_uses_stays_even_if_named(runs, tmp_path):
    locked, named = runs("locked"), runs("named")
    (tmp_path / "runs" / "models").mkdir()
    process = subprocess.Popen([sys.executable, "-c", "input()", "runs/named/train_stage"], stdin=subprocess.PIPE, cwd=tmp_path)
    try:
        with file_lock(locked / ".locks" / "folder", holder="the run locked", shared=True):
            shown = clean("*", "--yes")
            assert "in use by the run locked" in shown
            assert f"in use by process {process.pid}" in shown
            assert "removed: 0.0 MB" in shown
            clean("--superseded", "--caches", "--yes")
        assert all(len(list((folder / "train_stage").iterdir())) == 3 for folder in (locked, named))
        assert (tmp_path / "runs" / "models").exists()
    finally:
        process.communicate(b"\n")
    clean("*", "--yes")
    assert list((tmp_path / "runs").glob("*ed")) == []


def test_a_champion_goes_by_name_only_and_an_undecided_model_stays(runs, database, tmp_path):  # noqa: F811
    client, folders = MlflowClient(database), {}
    for name in ("best", "asked", "past"):
        folders[name] = runs(name, days=40, version=1)
        client.create_registered_model(name)
        client.create_model_version(name, source=f"file://{tmp_path}/elsewhere")
    client.set_registered_model_alias("best", "champion", "1")
    client.set_model_version_tag("asked", "1", "grpo.approval", Approval(decision="pending").model_dump_json())
    shown = clean("--older-than", "30d", "--yes")
    assert "made best/1 (champion)" in shown
    assert "asked/1 waits for approval" in shown
    assert {name: folder.exists() for name, folder in folders.items()} == {"best": True, "asked": True, "past": False}
    clean("asked", "best", "--yes")
    assert {name: folder.exists() for name, folder in folders.items()} == {"best": False, "asked": True, "past": False}


def test_without_an_answer_from_mlflow_a_run_that_published_stays(runs, tmp_path):
    runs("mine", version=1)
    runs("silent")
    (tmp_path / "file").touch()
    tracking = TrackingConfig(tracking_uri=f"sqlite:///{tmp_path}/file/mlflow.db")
    found = {one.run.name: one.keep for one in find(tmp_path / "runs", tmp_path, tracking) if one.kind == "run"}
    assert found == {"mine": "MLflow cannot be asked about the model that it made", "silent": ""}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_running_run_ends_well_and_a_cleaned_one_runs_again(tmp_path, prefect_api):
    place = Place(tmp_path, prefect_api)
    place.write("small.yaml", yaml.safe_dump(SMALL))
    busy = SMALL | {"name": "busy", "stages": [SMALL["stages"][0] | {"max_steps": 40}]}
    place.write("busy.yaml", yaml.safe_dump(busy))
    place.grpo("run", "small.yaml")
    process = place.start("run", "busy.yaml")
    wait_for_step("runs/busy/train_stage/format-*/metrics.jsonl", place.root, 3, process)
    shown = place.grpo("clean", "*", "--yes")
    assert re.search(r"in use by the run [a-z-]+ \(process \d+\)", shown), "the name that Prefect shows"
    assert [path.name for path in (place.root / "runs").iterdir()] == ["busy"]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "can resume format" in place.grpo("clean")
    assert "busy version 1" in place.grpo("run", "busy.yaml")
    # The registered model needs nothing of what was removed.
    place.grpo("download", "small/1", "copy")
    assert (place.root / "copy" / "model.safetensors").exists()
    assert "train_stage-format: done" in place.grpo("run", "small.yaml")

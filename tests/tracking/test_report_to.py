"""TensorBoard and wandb get every update of the journal once, whatever was interrupted; wandb sends nothing unasked."""

import importlib.util
import json
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flows.preflight import check_installed
from grpo_tasks.tracking.runs import open_run
from schemas.errors import ConfigError

from .conftest import STARTED_MS, write_journal


def needs(*packages):
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} is not installed: pip install '.[{','.join(absent)}]'")


def tensorboard_runs(output):
    """What TensorBoard itself reads: {run: [(step, reward, wall time)]}."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    from tensorboard.util.tensor_util import make_ndarray

    found = EventMultiplexer(size_guidance={"tensors": 0}).AddRunsFromDirectory(str(output / "tensorboard")).Reload()
    return {
        run: [(event.step, float(make_ndarray(event.tensor_proto)), event.wall_time) for event in found.Tensors(run, "reward")]
        for run in found.Runs()
    }


def wandb_runs(output):
    """The records of each offline run, read with wandb's messages from its file, which is in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    runs = {}
    for file in (output / "wandb").glob("offline-run-*/*.wandb"):
        content, position, message, steps = file.read_bytes(), 7, b"", []
        while position + 7 <= len(content):
            _, size, kind = struct.unpack("<IHB", content[position : position + 7])
            message += content[position + 7 : position + 7 + size]
            position += 7 + size
            if 32_768 - position % 32_768 < 7:
                position += 32_768 - position % 32_768
            if kind in (1, 4):
                record, message = Record.FromString(message), b""
                row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                steps += [(record.history.step.num, float(row["reward"]), float(row["_timestamp"]))] if "reward" in row else []
        runs[file.parent.name] = steps
    return runs


def expected(journal):
    """The same of the journal."""
    lines = map(json.loads, journal.read_text().splitlines())
    return [(line["step"], pytest.approx(line["metrics"]["reward"]), line["timestamp_ms"] / 1000) for line in lines]


READ = {"tensorboard": tensorboard_runs, "wandb": wandb_runs}
WANDB = pytest.param("wandb", marks=[needs("wandb"), pytest.mark.slow])
each_tracker = pytest.mark.parametrize("tracker", [pytest.param("tensorboard", marks=needs("tensorboard")), WANDB])


@pytest.fixture
def reporting(make_config, database, tmp_path):
    """A config that reports to this tracker, and the folder of its run."""

    def make(*trackers):
        config = make_config(
            database,
            name="reported",
            tracking={"tracking_uri": database, "report_to": list(trackers)},
            resources={"output_dir": str(tmp_path / "runs")},
        )
        return config, tmp_path / "runs" / "reported"

    return make


@each_tracker
def test_a_tracker_gets_the_journal_as_it_grows_with_its_own_times(reporting, make_stage, tracker):
    config, output = reporting(tracker)
    result = make_stage(config, steps=3, finish=False)
    journal = result.directory / "metrics.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])
    with open_run(config, key="one") as run:
        shipper = run.follow(result.directory)
        assert shipper.ship()
        if tracker == "tensorboard":
            [seen] = READ[tracker](output).values()
            assert [step for step, *_ in seen] == [1, 2], "an incomplete line is sent once it is complete"
        journal.write_bytes(whole)
        write_journal(journal, range(4, 11))
        assert shipper.ship()
    assert list(READ[tracker](output).values()) == [expected(journal)]


KILLED = """
import os, signal, sys
from pathlib import Path
from grpo_tasks.tracking.runs import open_run
from schemas.config.load import load_config

with open_run(load_config("config.yaml"), key="one") as run:
    assert run.follow(Path(sys.argv[1])).ship()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@each_tracker
def test_after_a_kill_nothing_is_lost_and_nothing_there_twice(reporting, make_stage, tracker, tmp_path):
    config, output = reporting(tracker)
    result = make_stage(config, steps=7, finish=False)
    (tmp_path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    killed = subprocess.run([sys.executable, "-c", KILLED, result.directory], cwd=tmp_path, capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    journal = result.directory / "metrics.jsonl"
    write_journal(journal, range(8, 13))
    with open_run(config, key="one") as run:
        assert run.follow(result.directory).ship()
    assert list(READ[tracker](output).values()) == [expected(journal)]


@pytest.mark.slow
@each_tracker
def test_a_stage_that_was_trained_before_is_reported_once(reporting, make_stage, tracker):
    config, output = reporting(tracker)
    result = make_stage(config, steps=5)
    silent = config.model_copy(update={"tracking": config.tracking.model_copy(update={"report_to": []})})
    with open_run(silent, key="one") as run:
        run.record(result)
    assert not output.exists()
    for _ in range(2):
        with open_run(config, key="one") as run:
            run.record(result)
        seen = {path: path.stat().st_mtime_ns for path in (output / tracker).rglob("*") if path.is_file()}
        assert list(READ[tracker](output).values()) == [expected(result.directory / "metrics.jsonl")]
    with open_run(config, key="one") as run:
        run.record(result)
    assert seen == {path: path.stat().st_mtime_ns for path in (output / tracker).rglob("*") if path.is_file()}


@pytest.mark.slow
@needs("tensorboard")
def test_a_stage_that_is_trained_again_is_another_run_there(reporting, make_stage):
    config, output = reporting("tensorboard")
    result = make_stage(config, steps=5)
    with open_run(config, key="one") as run:
        run.record(result)
    journal = result.directory / "metrics.jsonl"
    journal.unlink()
    write_journal(journal, range(1, 3), started_ms=STARTED_MS + 3_600_000)
    with open_run(config, key="two", fresh=True) as run:
        run.record(result)
    assert sorted(len(steps) for steps in tensorboard_runs(output).values()) == [2, 5]


@needs("wandb")
@pytest.mark.slow
def test_wandb_stays_offline_and_makes_no_call(reporting, make_stage, monkeypatch):
    config, output = reporting("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def accept():
            while True:
                try:
                    calls.append(proxy.accept()[0].recv(200))
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        with open_run(config, key="one") as run:
            run.record(make_stage(config, steps=3))
    assert calls == []
    assert len(wandb_runs(output)) == 1


@needs("wandb")
def test_wandb_online_without_a_login_is_refused_before_the_run(reporting, monkeypatch, tmp_path):
    from flows.preflight import check_tracking

    config, _ = reporting("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    check_tracking(config)
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match="wandb: nobody is logged in") as refused:
        check_tracking(config)
    assert refused.value.fix == "wandb login, or unset WANDB_MODE to stay offline"


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_tracker_is_refused_with_the_extra_that_installs_it(reporting, package, monkeypatch):
    config, _ = reporting(package)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"{package} is not installed") as refused:
        check_installed(config)
    assert refused.value.place == "tracking.report_to"
    assert refused.value.fix == f"pip install -c deploy/constraints.txt '.[{package}]'"
    assert f"\n{package} = [" in (Path(__file__).parents[2] / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("given", "means"), [("wandb", ["wandb"]), ("none", []), (["mlflow", "tensorboard"], ["tensorboard"]), ([], [])]
)
def test_report_to_is_given_as_trl_takes_it(make_config, given, means):
    assert make_config("sqlite:///mlflow.db", tracking={"report_to": given}).tracking.report_to == means


def test_a_tracker_that_does_not_exist_here_is_refused(make_config):
    with pytest.raises(ValueError, match="'tensorboard' or 'wandb'"):
        make_config("sqlite:///mlflow.db", tracking={"report_to": ["comet_ml"]})

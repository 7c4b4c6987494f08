"""Surroundings that answer badly: one message within seconds, with the variable to set, and nothing is left behind."""

import subprocess
import time

import httpx
import prefect.server.api.server as prefect_server
import pytest
import yaml

from flows import temporary_server
from schemas.errors import OrchestratorError
from tests.answering import answering
from tests.flows.place import BIN, SMALL, Place, wait_for_step
from tests.flows.test_interrupted import fill
from tests.ports import free_ports

QUICK_S = 60.0
"""On a busy machine. What is tested here took from 95 seconds to for ever."""
MAX_LINES = 25
PROFILE = """
active = "team"
[profiles.team]
PREFECT_API_URL = "http://127.0.0.1:{port}/api/accounts/00000000-0000-0000-0000-000000000000"
PREFECT_API_KEY = "pnu_planted0123456789planted"
"""


@pytest.fixture
def surroundings(lone_place):
    lone_place.write("small.yaml", yaml.safe_dump(SMALL))

    def refused(*command, **variables):
        began = time.monotonic()
        output, _ = (process := lone_place.start(*command, "small.yaml", **variables)).communicate(timeout=300)
        assert time.monotonic() - began < QUICK_S, output[-3000:]
        assert process.returncode in (1, 2), output
        assert "Traceback" not in output
        assert len(output.splitlines()) < MAX_LINES, output
        assert "planted" not in output
        return " ".join(output.replace("│", " ").split())

    return refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "variable", "value", "says"),
    [
        ("run", "PREFECT_API_URL", "", "where: PREFECT_API_URL fix: correct it, or unset PREFECT_API_URL"),
        ("validate", "PREFECT_API_URL", "127.0.0.1:4200/api", "it begins with none of http://"),
        ("run", "MLFLOW_TRACKING_URI", "databricks", "not the address of an MLflow server or database"),
        ("validate", "MLFLOW_TRACKING_URI", "mlruns.db", "fix: sqlite:///mlruns.db where: MLFLOW_TRACKING_URI"),
        ("run", "MLFLOW_TRACKING_URI", "localhost:5000", "fix: http://localhost:5000 where: MLFLOW_TRACKING_URI"),
    ],
)
def test_an_address_that_is_none_is_refused_at_once(surroundings, command, variable, value, says):
    assert says in surroundings(command, **{variable: value})


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "validate"])
def test_a_profile_whose_server_does_not_answer_is_named(surroundings, lone_place, command):
    [port] = free_ports(1)
    home = lone_place.root / "home"
    home.mkdir()
    (home / "profiles.toml").write_text(PROFILE.format(port=port))
    output = surroundings(command, PREFECT_HOME=str(home))
    assert "the Prefect server does not answer" in output
    assert "PREFECT_API_URL of the profile team" in output
    assert "export PREFECT_PROFILE=ephemeral" in output
    assert not (lone_place.root / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("login refused", "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"),
        ("login page", "the server at this address is not MLflow, or a page to sign in is in front of it"),
        ("another server", "the server at this address is not MLflow"),
    ],
)
def test_a_bad_tracking_server_is_named_before_prefect_starts(surroundings, kind, says):
    with answering(kind) as address:
        output = surroundings("run", MLFLOW_TRACKING_URI=address)
    assert says in output
    assert "Starting temporary server" not in output


@pytest.mark.long
def test_a_home_that_is_read_only_is_named(tmp_path):
    place = Place(tmp_path)
    place.write("small.yaml", yaml.safe_dump(SMALL))
    (tmp_path / "home").mkdir()
    mounted = 'mount --bind "$HOME" "$HOME" && mount -o remount,ro,bind "$HOME" && exec "$0" run small.yaml'
    environment = place.environment | {"HOME": str(tmp_path / "home")}
    environment.pop("PREFECT_HOME")
    command = ["unshare", "-m", "sh", "-c", mounted, BIN / "grpo"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    output = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert done.returncode == 1, output
    assert "Prefect cannot write to" in output
    assert "fix: export PREFECT_HOME=/folder/that/can/be/written" in output
    assert len(done.stderr.splitlines()) < MAX_LINES


@pytest.mark.long
def test_a_temporary_server_that_cannot_start_is_not_started_again_and_again(surroundings, lone_place):
    home = lone_place.root / "prefect"
    home.mkdir()
    (home / "prefect.db").write_text("this is no database, and long enough that SQLite reads its header" * 20)
    output = surroundings("run")
    assert "Prefect's temporary server ended while it started: sqlalchemy.exc.DatabaseError" in output
    assert f"PREFECT_HOME={home}" in output


@pytest.mark.parametrize("fault", [RuntimeError("Timed out while attempting to connect"), httpx.ReadTimeout("timed out")])
def test_a_temporary_server_that_is_too_slow_is_one_message(tmp_path, monkeypatch, fault):
    def start(server, timeout=None):
        raise fault

    server = prefect_server.SubprocessASGIServer
    for name, value in {"start": start, "find_available_port": None, "_run_uvicorn_command": None}.items():
        monkeypatch.setattr(server, name, value)
    monkeypatch.setattr(temporary_server, "_database", lambda: tmp_path / "prefect.db")
    temporary_server._patch_prefect.__wrapped__()
    with pytest.raises(OrchestratorError, match=r"did not answer in time: .*imed out") as caught:
        server.start(None)
    assert "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS=1800" in caught.value.fix


@pytest.mark.long
def test_a_disk_that_is_full_at_once_for_everything_is_one_message(tmp_path):
    """Working directory, MLflow's database, Prefect's home: all on the disk that fills up while the stage trains."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", tmp_path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        place = Place(tmp_path)
        stage = SMALL["stages"][0] | {"max_steps": 200, "save_steps": 5}
        place.write("small.yaml", yaml.safe_dump(SMALL | {"stages": [stage]}))
        process = place.start("run", "small.yaml")
        wait_for_step("runs/small/train_stage/*/metrics.jsonl", tmp_path, 12, process)
        with pytest.raises(OSError, match="No space left"):
            fill(tmp_path / "filler")
        output, _ = process.communicate(timeout=300)
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
    assert process.returncode == 1, output
    assert "No space left on device" in output or "disk is full" in output
    assert "Traceback" not in output
    assert len(output.splitlines()) < 60, output

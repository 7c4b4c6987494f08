"""Commands and addresses of the servers, and the record of what runs, without starting any server."""

import json
import os
import subprocess
import sys
from itertools import islice

import psutil
import pytest
import torch
from mlflow import MlflowClient
from prefect.events import Resource
from prefect.events.actions import DoNothing
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.importtools import import_object

from flows.deployments import deployments, served
from flows.single import difficulty_flow
from flows.sweeps.variant import variant_flow
from grpo_tasks.kit import cards
from grpo_tasks.operating.automations import FLOWS, PRUNED, automations
from grpo_tasks.operating.commands import database_url, mlflow_environment, prefect_environment
from grpo_tasks.operating.doctor import OPTIONAL, PACKAGES, _device, _mlflow, findings
from grpo_tasks.operating.servers import Stack
from schemas.errors import UserError

POSTGRES = "postgresql://me:secret@db:5433"


def test_one_postgresql_address_gives_each_server_its_own_database():
    prefect = prefect_environment(4200, POSTGRES)["PREFECT_API_DATABASE_CONNECTION_URL"]
    mlflow = mlflow_environment(POSTGRES)["MLFLOW_BACKEND_STORE_URI"]
    assert prefect == "postgresql+asyncpg://me:secret@db:5433/prefect"
    assert mlflow == "postgresql+psycopg2://me:secret@db:5433/mlflow"


def test_an_address_of_no_database_is_refused(monkeypatch):
    for address in ("mysql://me@db", "postgresql://", "db:5432"):
        with pytest.raises(UserError, match="not the address of a PostgreSQL server") as refused:
            database_url(address, "postgresql", "mlflow")
        assert "postgresql://USER" in refused.value.fix
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    with pytest.raises(UserError, match="already names a server"):
        mlflow_environment(None)


def recorded(folder, **changes):
    """A folder whose record names this process, with changed fields."""
    process = {"name": "worker 1", "pid": psutil.Process().pid, "born": psutil.Process().create_time()}
    (folder / ".grpo").mkdir()
    (folder / ".grpo" / "stack.json").write_text(json.dumps([process | changes]))
    return Stack(folder)


def test_a_recorded_process_is_not_confused_with_one_of_its_pid(tmp_path):
    (tmp_path / "same").mkdir()
    (tmp_path / "other").mkdir()
    assert recorded(tmp_path / "same").running() == ["worker 1"]
    other = recorded(tmp_path / "other", born=1.0)
    assert other.running() == []
    with pytest.raises(UserError, match="worker 1 has ended"):
        other.check()
    # Nothing is stopped, above all not this process.
    assert other.stop() == []


@pytest.mark.parametrize("addresses", ["{", "[]", '{"prefect": 1}'])
def test_damaged_addresses_are_named_with_a_fix(tmp_path, addresses):
    stack = recorded(tmp_path)
    (tmp_path / ".grpo" / "addresses.json").write_text(addresses)
    with pytest.raises(UserError, match="addresses are damaged") as refused:
        stack.addresses()
    assert "grpo down" in refused.value.fix


@pytest.mark.slow
def test_prefect_finds_the_flow_of_every_deployment_that_grpo_serve_offers():
    offered = served()
    assert [one.name for one in offered] == [f"{one.name}-served" for one in deployments()]
    assert [load_flow_from_entrypoint(one.entrypoint).name for one in offered] == [one.flow_name for one in offered]


def test_every_deployments_failure_and_every_vanished_flow_is_reported():
    deployed = {import_object(deployment.flow).name for deployment in deployments()}
    assert set(FLOWS) == deployed
    [vanished] = [each for each in automations(DoNothing(type="do-nothing")) if "vanished" in each.name]
    for name in (*deployed, variant_flow.name, difficulty_flow.name):
        assert vanished.trigger.match_related.matches(Resource(ours(name))), name
    assert f"prefect.flow-run.{PRUNED}" in vanished.trigger.expect, "a pruned run has ended"


def test_deployments_that_grpo_serve_offers_are_meant_too():
    """Their names end in -served."""
    paused = [each for each in automations(DoNothing(type="do-nothing")) if "keeps failing" in each.name]
    triggers = [trigger for deployment in deployments() for trigger in deployment.triggers]
    matched = [each.trigger.match_related["prefect.resource.name"] for each in paused]
    matched += [trigger["match_related"]["prefect.resource.name"] for trigger in triggers if "match_related" in trigger]
    assert matched == [["retrain", "retrain-served"], ["watch-data", "watch-data-served"], ["validate", "validate-served"]]


def ours(name):
    """What an event of a run says about its flow."""
    return {"prefect.resource.id": "prefect.flow.any", "prefect.resource.role": "flow", "prefect.resource.name": name}


@pytest.mark.slow
def test_doctor_names_a_gpu_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cards, "cards_here", lambda: cards.Cards(0, ""))
    assert _device().ok
    monkeypatch.setattr(cards, "cards_here", lambda: cards.Cards(2, "535.104.05"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = _device()
    assert not found.ok
    assert "2 GPUs that torch cannot use: the driver is 535.104.05" in found.detail
    assert "fix: install driver 580 or newer" in found.detail


def test_doctor_says_what_a_missing_optional_package_is_for(monkeypatch):
    monkeypatch.setattr("grpo_tasks.operating.doctor._version", lambda package: "1.0" if package in PACKAGES else None)
    found = {one.subject: one for one in islice(findings(), 1 + len(PACKAGES) + len(OPTIONAL))}
    for package in ("flash-linear-attention", "causal-conv1d"):
        assert found[package].ok
        assert "not installed (optional, for fast recurrent layers on a GPU" in found[package].detail


def test_doctor_opens_database_and_artifacts_without_a_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    [absent] = _mlflow()
    assert absent.ok
    assert "the first run creates" in absent.detail
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'new.db'}")
    [named] = _mlflow()
    assert named.ok
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert list(tmp_path.iterdir()) == [], "asking creates nothing"
    (tmp_path / "mlflow.db").write_text("this is no database, and long enough that SQLite reads its header" * 20)
    [damaged] = _mlflow()
    assert not damaged.ok
    (tmp_path / "mlflow.db").unlink()
    MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").create_experiment("one")
    (tmp_path / "mlruns").mkdir(exist_ok=True)
    database, artifacts = _mlflow()
    assert database.ok
    assert "it has 2 experiments" in database.detail, "MLflow's own default and ours"
    assert artifacts.ok


@pytest.mark.slow
@pytest.mark.parametrize(("uri", "status"), [("databricks", 1), ("", 0)])
def test_the_exit_status_of_doctor_says_whether_something_is_wrong(tmp_path, uri, status):
    # A process of its own: other tests leave a Prefect server in the settings of this one.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"MLFLOW_TRACKING_URI": uri, "PREFECT_HOME": str(tmp_path / "prefect")}
    command = [sys.executable, "-c", "from flows.cli.main import app; app()", "doctor"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("not the address of an MLflow server" in " ".join(done.stdout.split())) == (status == 1)

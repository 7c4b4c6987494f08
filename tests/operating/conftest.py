"""One stack for all tests here, started by `grpo up`: both servers (on PostgreSQL if it is installed) and two workers."""

import json
import re
import time
from dataclasses import dataclass

import psutil
import pytest
import yaml

from tests.flows.place import SMALL, Place, ask
from tests.operating.chromium import browser, page
from tests.ports import free_ports
from tests.postgres import cluster, programs

__all__ = ["browser", "page"]
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
RUN_LIMIT_S = 900
"""A run takes a minute, but many on a busy machine."""


@dataclass
class Operated(Place):
    """A working directory with a running stack."""

    prefect: str = ""
    mlflow: str = ""
    postgres: str | None = None

    @property
    def environment(self):
        # Prefect checks its schedules once a minute, which is too slow for tests.
        quick = {"PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "3"}
        return super().environment | quick | ({"GRPO_POSTGRES": self.postgres} if self.postgres else {})

    @property
    def client(self):
        from mlflow import MlflowClient

        return MlflowClient(self.mlflow)

    def ask(self, path, body=None, method=None):
        return ask(f"{self.prefect}/api{path}", body, method)

    def deployment(self, name):
        [found] = self.ask("/deployments/filter", {"deployments": {"name": {"any_": [name]}}})
        return found

    def trigger(self, deployment, **parameters):
        found = self.deployment(deployment)
        return self.ask(f"/deployments/{found['id']}/create_flow_run", {"parameters": found["parameters"] | parameters})

    def runs_of(self, deployment):
        """Runs of a deployment, oldest first."""
        wanted = {"deployments": {"name": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return self.ask("/flow_runs/filter", wanted)

    def tasks_of(self, *runs, step):
        """States of the tasks of a step."""
        wanted = {"flow_runs": {"id": {"any_": [run["id"] for run in runs]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return [task["state_name"] for task in self.ask("/task_runs/filter", wanted) if task["name"].startswith(step)]

    def parents(self, name):
        """The runs in MLflow that are no stage's."""
        return [each for each in self.runs(name) if "mlflow.parentRunId" not in each.data.tags]

    def versions(self, name):
        """How many versions a model has."""
        return len(self.client.search_model_versions(f"name='{name}'"))

    def aliases(self, name):
        return self.client.get_registered_model(name).aliases

    def wait(self, run_id, *states, limit_s=RUN_LIMIT_S):
        """Wait until a run has ended; it must end in one of `states`, if any are named."""
        deadline = time.monotonic() + limit_s
        while (run := self.ask(f"/flow_runs/{run_id}"))["state_type"] not in FINAL:
            assert time.monotonic() < deadline, f"{run['name']} is {run['state_name']} after {limit_s} s\n{self.log_of(run_id)}"
            time.sleep(0.5)
        assert not states or run["state_type"] in states, f"{run['name']}: {run['state']}\n{self.log_of(run_id)}"
        return run

    def log_of(self, run_id):
        return "\n".join(line["message"] for line in self.lines_of(run_id))

    def lines_of(self, run_id):
        """Log lines of a run and its subflows."""
        children = self.ask("/flow_runs/filter", {"flow_runs": {"parent_flow_run_id": {"any_": [run_id]}}})
        family = {"flow_run_id": {"any_": [run_id, *(child["id"] for child in children)]}}
        return self.ask("/logs/filter", {"sort": "TIMESTAMP_ASC", "limit": 200, "logs": family})

    def says(self, run_id, text, limit_s=120):
        """Wait until the log of the run contains `text`: its last lines arrive a moment after its state."""
        deadline = time.monotonic() + limit_s
        while text not in (log := self.log_of(run_id)):
            if time.monotonic() > deadline:
                raise AssertionError(f"{text!r} is not in the log:\n{log}")
            time.sleep(0.5)
        return True

    def config(self, name, **changes):
        """A small config file in the working directory."""
        self.write(f"{name}.yaml", yaml.safe_dump(SMALL | {"name": name} | changes))
        return f"{name}.yaml"


@pytest.fixture(scope="session")
def postgres():
    """Address of a PostgreSQL server."""
    if programs() is None:
        pytest.skip("PostgreSQL is not installed on this machine")
    with cluster() as address:
        yield address


@pytest.fixture(scope="session")
def operated(tmp_path_factory, request):
    """`grpo up` with two workers. At the end, `grpo down` must leave no process behind."""
    place = Operated(tmp_path_factory.mktemp("operated"))
    if programs():
        place.postgres = request.getfixturevalue("postgres")
    ports = [str(port) for port in free_ports(2)]
    shown = place.grpo("up", "--prefect-port", ports[0], "--mlflow-port", ports[1], "--workers", "2")
    [place.prefect] = re.findall(r"Prefect UI +(\S+)", shown)
    [place.mlflow] = re.findall(r"MLflow UI +(\S+)", shown)
    yield place
    started = [psutil.Process(part["pid"]) for part in json.loads((place.root / ".grpo" / "stack.json").read_text())]
    family = [child for process in started for child in [process, *process.children(recursive=True)]]
    place.grpo("down")
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert "nothing is running here" in place.grpo("down")

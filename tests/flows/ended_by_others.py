"""Ten ways in which others end a run, at five moments: it stops, it publishes nothing, and Prefect and MLflow say the same.

python -m tests.flows.ended_by_others          prints the table: end, moment, what Prefect, MLflow and the registry say
"""

import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError

import yaml
from mlflow import MlflowClient

from tests.flows.place import BIN, SMALL, Place, ask, end_group, prefect_server, started_mlflow
from tests.flows.test_killed import wait_for_step
from tests.flows.test_servers_away import Between
from tests.ports import free_ports

STOPPED_S = 45.0
"""Longest time between an end and the last sign of the run: its next look at Prefect, and what it has to release."""


def set_state(api, run, kind, name=None):
    return ask(f"{api}/flow_runs/{run}/set_state", {"state": {"type": kind, "name": name or kind.title()}, "force": True})


ENDS = {
    "ctrl-c": (lambda run: run.process.send_signal(signal.SIGINT), "CRASHED", "KILLED"),
    "sigterm": (lambda run: run.process.send_signal(signal.SIGTERM), "CRASHED", "KILLED"),
    "sighup": (lambda run: run.process.send_signal(signal.SIGHUP), "CRASHED", "KILLED"),
    "cancel": (lambda run: run.prefect("flow-run", "cancel", run.flow_run), "CANCELLED", "KILLED"),
    "cancelled": (lambda run: set_state(run.api, run.flow_run, "CANCELLED"), "CANCELLED", "KILLED"),
    "failed": (lambda run: set_state(run.api, run.flow_run, "FAILED"), "FAILED", "FAILED"),
    "crashed": (lambda run: set_state(run.api, run.flow_run, "CRASHED"), "CRASHED", "KILLED"),
    "completed": (lambda run: set_state(run.api, run.flow_run, "COMPLETED"), "CANCELLED", "KILLED"),
    "deleted": (lambda run: run.delete(), None, "KILLED"),
    "deleted in MLflow": (lambda run: run.delete_tracked(), "FAILED", None),
}
"""How a run is ended; what Prefect and MLflow say afterwards, or None where the run is gone."""
MOMENTS = {
    "preparing": "data/sources.json",
    "training": "",
    "merging": "merge/proof.json",
    "evaluating": "evaluation/merged/report.md",
    "publishing": "model.safetensors",
}
"""A moment, and the end of the address of the upload that holds the run there. The stage is long: nothing has to hold it."""


class Holding(Between):
    """Lets one kind of upload wait."""

    def __init__(self, address):
        super().__init__(address)
        self.wanted, self.held, self.released = "", threading.Event(), threading.Event()

    def pass_on(self, hand):
        if self.wanted and hand.command == "PUT" and hand.path.endswith(self.wanted):
            self.held.set()
            self.released.wait(STOPPED_S)


class Run:
    def __init__(self, place, between, moment, case):
        self.place, self.api, self.between = place, place.api, between
        self.experiment = f"{moment}-{case}".replace(" ", "-")
        between.wanted = MOMENTS[moment]
        between.held.clear()
        between.released.clear()
        changed = ["--set", f"tracking.experiment={self.experiment}", "--set", f"tracking.registered_model={self.experiment}"]
        if moment == "training":
            changed += ["--set", "stages.0.max_steps=100000"]
        done = self._updates()
        self.process = place.start("run", "small.yaml", *changed)
        if moment == "training":
            wait_for_step("runs/small/train_stage/*/metrics.jsonl", place.root, done + 3, self.process)
        else:
            assert between.held.wait(300), self.process.communicate()[0]
        [self.flow_run] = [path.stem for path in place.root.glob("runs/small/.running/*.json")]

    def _updates(self):
        return max(len(path.read_text().splitlines()) for path in self.place.root.glob("runs/small/train_stage/*/metrics.jsonl"))

    def prefect(self, *arguments):
        subprocess.run([BIN / "prefect", *arguments], env=self.place.environment, check=True)

    @property
    def client(self):
        return MlflowClient(self.between.address)

    def tracked(self):
        found = self.client.get_experiment_by_name(self.experiment)
        return self.client.search_runs([found.experiment_id])

    def delete(self):
        """Delete the flow run; a server whose database is busy answers 503."""
        for _ in range(20):
            try:
                ask(f"{self.api}/flow_runs/{self.flow_run}", method="DELETE")
                return
            except HTTPError as error:
                if error.code != 503:
                    raise
                time.sleep(0.5)

    def delete_tracked(self):
        for run in self.tracked():
            self.client.delete_run(run.info.run_id)
        self.between.released.set()

    def state(self):
        found = ask(f"{self.api}/flow_runs/filter", {"flow_runs": {"id": {"any_": [self.flow_run]}}})
        return found[0]["state_type"] if found else None


@dataclass(frozen=True)
class Outcome:
    """What a run did when others ended it."""

    case: str
    moment: str
    said: str
    """The last states in Prefect and in MLflow."""
    faults: list[str]


@contextmanager
def prepared(root: Path, api: str) -> Iterator[Place]:
    """A folder with a finished run, so that the next one comes to any moment in seconds; uploads go through a `Holding`."""
    place, [port] = Place(root, api), free_ports(1)
    server = started_mlflow(root, port)
    place.between = Holding(f"http://127.0.0.1:{port}")
    try:
        place.write("small.yaml", yaml.safe_dump(SMALL | {"tracking": {"tracking_uri": place.between.own}}))
        place.grpo("run", "small.yaml")
        yield place
    finally:
        place.between.shutdown()
        end_group(server)


def ended(place: Place, moment: str, case: str) -> Outcome:
    """Start a run, end it at a moment, and compare what everybody says about it."""
    end, in_prefect, in_mlflow = ENDS[case]
    run = Run(place, place.between, moment, case)
    try:
        end(run)
        output, _ = run.process.communicate(timeout=STOPPED_S)
    except subprocess.TimeoutExpired:
        output = f"it did not stop within {STOPPED_S:g} s"
    finally:
        place.between.released.set()
        run.process.kill()
    tracked = run.tracked()
    parents = [found.info.status for found in tracked if "mlflow.parentRunId" not in found.data.tags]
    wrong = {
        f"exit code {run.process.returncode}: {output[-1000:]}": run.process.returncode in (0, None, -signal.SIGKILL),
        f"a traceback: {output[-1500:]}": "Traceback" in output,
        "a version was registered": bool(run.client.search_model_versions(f"name='{run.experiment}'")),
        f"{run.state()} in Prefect instead of {in_prefect}": run.state() != in_prefect,
        f"{parents} in MLflow instead of {in_mlflow}": parents != ([in_mlflow] if in_mlflow else []),
        "a stage that is still running in MLflow": any(found.info.status == "RUNNING" for found in tracked),
    }
    said = f"{run.state() or 'deleted'}, {', '.join(parents) or 'deleted'}"
    return Outcome(case, moment, said, [text for text, happened in wrong.items() if happened])


def main() -> None:
    """End runs in every way at every moment, and print the table."""
    failed = False
    # A child would inherit what nohup does: a run that ignores SIGHUP is not ended by it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    print("| ended by | while it is | Prefect, MLflow | nothing published, nothing wrong |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder)) as api:
        (root := Path(folder) / "work").mkdir()
        with prepared(root, api) as place:
            for moment in MOMENTS:
                for case in ENDS:
                    outcome = ended(place, moment, case)
                    failed |= bool(outcome.faults)
                    print(f"| {case} | {moment} | {outcome.said} | {'; '.join(outcome.faults) or 'yes'} |", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()

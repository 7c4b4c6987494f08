"""A working directory where a user calls `grpo`, and the smallest config that goes through everything."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from grpo_tasks.operating.commands import mlflow_command, prefect_command, prefect_environment
from tests.ports import free_ports

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
DONE = "\nDONE WITH ALL CALLS\n"


@contextmanager
def prefect_server(home, port=None, **variables):
    """A Prefect server that several commands share, because starting one takes ten seconds; yields its address."""
    port = port or free_ports(1)[0]
    log = home / "log.txt"
    with log.open("ab") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", *prefect_command(port)],
            env=os.environ | prefect_environment(port, None) | {"PREFECT_HOME": str(home)} | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    api, deadline = f"http://127.0.0.1:{port}/api", time.monotonic() + 300
    try:
        while not _answers(f"{api}/health"):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield api
    finally:
        server.terminate()
        server.wait(timeout=30)


def started_mlflow(root, port):
    """Start an MLflow server for the store in `root`, and wait until it answers."""
    stores = ["--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}", "--artifacts-destination", str(root / "artifacts")]
    command = [sys.executable, "-m", *mlflow_command(port), *stores]
    with (root / "mlflow.log").open("ab") as log:
        # As in `grpo up`: without this there are four more processes for jobs, which no test uses.
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    deadline = time.monotonic() + 300
    while not _answers(f"http://127.0.0.1:{port}/health"):
        assert process.poll() is None, (root / "mlflow.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.3)
    return process


def end_group(process, number=signal.SIGTERM):
    """Stop a server and the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    process.wait(timeout=60)


def ask(url, body=None, method=None):
    """The JSON that a server answers; a request with a body is a POST, unless `method` is given. A busy server is asked again."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"}, method=method)
    deadline = time.monotonic() + 300
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
            return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            # Prefect answers 503 while its database is locked.
            if error.code != 503 or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _answers(address):
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except OSError:
        return False


def wait_for_step(pattern, root, step, process, limit_s=600):
    """The folder of the journal that has so many updates, once it has."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for journal in root.glob(pattern):
            if len(journal.read_text().splitlines()) >= step:
                return journal.parent
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError(f"no update {step} within {limit_s} s")


@dataclass
class Place:
    """A working directory where a user calls `grpo`."""

    root: Path
    api: str | None = None
    """Address of the Prefect server; None: the command starts a temporary one, as for a user without a server."""

    @property
    def environment(self):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_TRACKING"))}
        own = {"PREFECT_HOME": str(self.root / "prefect"), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        return kept | own | ({"PREFECT_API_URL": self.api} if self.api else {})

    def start(self, *arguments, **variables):
        return subprocess.Popen(
            [BIN / "grpo", *map(str, arguments)],
            cwd=self.root,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def start_python(self, module, *arguments, stdin=None, **variables):
        """Start a module of the tests, as `python -m`, in this folder."""
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=self.root,
            env=self.environment | {"PYTHONPATH": str(ROOT)} | variables,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def grpo(self, *arguments, expect=0, timeout=900):
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=timeout)
        assert process.returncode == expect, output[-6000:]
        return output

    def grpo_in_one(self, calls, **variables):
        """Exit code and output of each call, by its label. One process for all: starting one takes seconds.

        An argument with a star stands for the one path that it fits.
        """
        process = self.start_python("tests.flows.place", stdin=subprocess.PIPE, **variables)
        output, _ = process.communicate(json.dumps({label: [*map(str, call)] for label, call in calls.items()}))
        assert DONE in output, output[-6000:]
        return json.loads(output.rpartition(DONE)[2])

    @property
    def client(self):
        from mlflow import MlflowClient

        return MlflowClient(f"sqlite:///{self.root / 'mlflow.db'}")

    def runs(self, name="grpo-demo"):
        experiment = self.client.get_experiment_by_name(name)
        return self.client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])

    def parent(self, name="grpo-demo"):
        [parent] = [run for run in self.runs(name) if "mlflow.parentRunId" not in run.data.tags]
        return parent

    def child(self, stage, name="grpo-demo"):
        [child] = [run for run in self.runs(name) if run.data.tags.get("grpo.stage") == stage]
        return child

    def write(self, name, text):
        path = self.root / name
        path.write_text(text, encoding="utf-8")
        return path


SMALL = {
    "name": "small",
    "seed": 7,
    "data": {
        "train": [{"path": "embedded:arithmetic_train.jsonl", "max_rows": 200}],
        "eval": [{"path": "embedded:arithmetic_eval.jsonl", "max_rows": 40}],
        "system_prompt": "Reply with <reasoning>...</reasoning><answer>...</answer>.",
    },
    "rollout": {"max_completion_length": 48},
    "stages": [
        {
            "name": "format",
            "rewards": ["incremental_format", "format"],
            "max_steps": 4,
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-3,
            "save_steps": 2,
        }
    ],
    "evaluation": {"max_prompts": 16, "num_samples": 2, "stages": False},
    "lab": {"num_rows": 4, "num_prompts": 4},
    "resources": {"num_threads": 1},
}
"""A complete pipeline in seconds: too short to learn anything, but it goes through every step."""


def answer_calls():
    """`grpo` once for each call on the standard input, in this process."""
    import logging

    from typer.testing import CliRunner

    from flows.cli.main import app

    # Each call has a stderr of its own; the log of the first one is closed afterwards.
    logging.raiseExceptions = False
    done = {}
    for label, call in json.load(sys.stdin).items():
        arguments = [*chain.from_iterable(map(str, Path().glob(word)) if "*" in word else [word] for word in call)]
        result = CliRunner().invoke(app, arguments)
        error = "" if isinstance(result.exception, SystemExit | None) else repr(result.exception)
        done[label] = [result.exit_code, result.output + error]
    print(DONE + json.dumps(done))


if __name__ == "__main__":
    answer_calls()

"""`grpo ui` shows runs from before the servers existed, and Ctrl-C stops everything that it started."""

import re
import signal
import subprocess
import sys

import psutil
import pytest
import yaml

from tests.flows.place import SMALL, ask

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FLOW = """
from flows.cli.environment import prepare_flow
prepare_flow()
from flows.single import validate_flow
from schemas.config.load import load_config
validate_flow(load_config("small.yaml"))
"""


def test_both_uis_show_the_run_and_stop_together(lone_place):
    place = lone_place
    place.write("small.yaml", yaml.safe_dump(SMALL))
    # `grpo validate` needs no Prefect; a flow that a script calls, like `grpo run`, leaves its record in Prefect's database.
    subprocess.run([sys.executable, "-c", FLOW], cwd=place.root, env=place.environment, check=True, timeout=900)
    process = place.start("ui", "--prefect-port", "14200", "--mlflow-port", "15000")
    addresses = {}
    while len(addresses) < 2:
        line = process.stdout.readline()
        assert line, "the servers ended"
        if found := re.match(r"(Prefect|MLflow) UI +(http://127\.0\.0\.1:\d+)", line):
            addresses[found[1]] = found[2]
    try:
        runs = ask(f"{addresses['Prefect']}/api/flow_runs/filter", {})
        assert [run["state_type"] for run in runs] == ["COMPLETED"]
        tasks = ask(f"{addresses['Prefect']}/api/task_runs/filter", {})
        assert {task["name"] for task in tasks} == {"prepare_data", "validate_data"}
        artifacts = ask(f"{addresses['Prefect']}/api/artifacts/filter", {})
        # A step that takes longer than a second says how far it is in one of its own.
        keys = {artifact["key"] for artifact in artifacts}
        assert keys - {"progress-prepare-data", "progress-validate-data"} == {"validation", "validation-rows"}
        experiments = ask(f"{addresses['MLflow']}/api/2.0/mlflow/experiments/search?max_results=10")
        assert "small" in {experiment["name"] for experiment in experiments["experiments"]}
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert process.returncode == 0

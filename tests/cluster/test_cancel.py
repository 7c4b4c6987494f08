"""A run that is cancelled in Prefect leaves the nodes of its cluster."""

import time

import pytest
import yaml

from tests.cluster.processes import MARK, lines_of, not_of_ray
from tests.flows.place import SMALL, Place, ask
from tests.flows.test_ends import LONG, Running

pytestmark = [pytest.mark.xdist_group("heavy"), pytest.mark.long, pytest.mark.timeout(1800)]

LIMIT_S = 15.0
"""What docs/gpus.md promises. It holds on a busy machine too: the run asks every three seconds whether it is cancelled."""


def busy(nodes):
    """Nodes with a CPU that is not free, or with a process of a run."""
    state = nodes.cluster.global_state
    free = state.available_resources_per_node()
    held = [
        node["NodeID"]
        for node in state.node_table()
        if node["Alive"] and free.get(node["NodeID"], {}).get("CPU", 0.0) < node["Resources"].get("CPU", 0.0)
    ]
    return held, lines_of(not_of_ray())


def test_cancelling_in_prefect_frees_all_nodes_within_fifteen_seconds(nodes, tmp_path, prefect_api):
    for _ in range(2):
        nodes.add(**MARK)
    place = Place(tmp_path / "driver", prefect_api)
    (place.root / "tmp").mkdir(parents=True)
    cluster = {"engine": "ray", "address": nodes.address, "num_nodes": 2}
    place.write("small.yaml", yaml.safe_dump(LONG | {"resources": SMALL["resources"] | {"cluster": cluster}}))
    running = Running(place)
    try:
        held, found = busy(nodes)
        assert len(held) == 2
        assert sum("grpo_tasks.grpo" in line for line in found) == 2
        began = time.monotonic()
        # As the button of the UI does.
        ask(f"{place.api}/flow_runs/{running.flow_run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
        while any(left := busy(nodes)):
            assert time.monotonic() - began < LIMIT_S, left
            time.sleep(0.2)
        assert time.monotonic() - began < LIMIT_S
        output, _ = running.process.communicate(timeout=300)
        assert running.process.returncode == 130, output[-3000:]
        assert running.state() == "CANCELLED"
        assert running.tracked() == "KILLED"
    finally:
        running.process.kill()

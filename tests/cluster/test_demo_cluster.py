"""`make demo-cluster`: the demo over two nodes of a Ray cluster, with two vLLM servers, and no directory that they share."""

import os
from pathlib import Path

import psutil
import pytest

from tests.flows.place import Place
from tests.flows.test_demo import assert_learnt
from tests.rollout.servers import PYTHON

pytestmark = [
    pytest.mark.xdist_group("heavy"),
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM environment (make vllm)"),
]

OWN = "GRPO_TEST_NODES_OF"
SETTINGS = {
    "resources.cluster.engine": "ray",
    "resources.cluster.num_nodes": "2",
    "rollout.engine": "vllm",
    "rollout.vllm.replicas": "2",
    "rollout.vllm.python": str(PYTHON),
    "evaluation.engine": "local",
    "evaluation.stages": "false",
}


def left_over():
    """Processes of the nodes that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(OWN) == str(os.getpid()) and "ray" not in process.name():
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_the_demo_learns_on_two_nodes_with_two_servers_and_leaves_nothing(nodes, tmp_path, prefect_api):
    made = [nodes.add(num_cpus=3, **{OWN: str(os.getpid())}) for _ in range(2)]
    place = Place(tmp_path / "driver", prefect_api)
    place.root.mkdir()
    settings = SETTINGS | {"resources.cluster.address": nodes.address}
    place.grpo("run", "demo", *(part for name, value in settings.items() for part in ("--set", f"{name}={value}")), timeout=3500)
    assert_learnt(place.parent())
    for stage, updates in (("format", 100), ("correctness", 150)):
        child = place.child(stage)
        steps = [point.step for point in place.client.get_metric_history(child.info.run_id, "reward")]
        assert steps == list(range(1, updates + 1))
        serving = place.client.get_metric_history(child.info.run_id, "sampling/replicas_serving")
        assert {point.value for point in serving} == {2.0}
    for node in made:
        # Each trained and sampled in a folder of its own, which is gone; what may stay is the cache of contents.
        assert list((node.private / "tmpdir").glob("grpo-*")) == []
        assert list((node.private / "xdg_cache_home").rglob("content/*"))
        assert not any(Path(node.private).rglob("final"))
    _, alive = psutil.wait_procs(left_over(), timeout=30)
    assert [process.cmdline() for process in alive if "grpo_tasks" in " ".join(process.cmdline())] == []

"""The demo over two nodes of a Ray cluster, with two vLLM servers, and no directory that they share.

`make demo-cluster` trains all of it and asks what it has learnt. Otherwise the stages are short: test_demo_vllm.py shows that
completions of a server teach, test_kills.py that a stage ends in the same bytes wherever it is trained.
"""

import os
from pathlib import Path

import psutil
import pytest

from tests.cluster.processes import MARK, lines_of, not_of_ray
from tests.flows.place import Place
from tests.flows.test_demo import assert_learnt
from tests.rollout.servers import PYTHON

pytestmark = [
    pytest.mark.xdist_group("heavy"),
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM environment (make vllm)"),
]

WHOLE = "WHOLE_DEMO" in os.environ
UPDATES = (100, 150) if WHOLE else (3, 3)
SHORT = {
    "stages.0.per_device_train_batch_size": "16",
    "stages.1.per_device_train_batch_size": "16",
    "evaluation.max_prompts": "16",
    "evaluation.num_samples": "1",
}
SETTINGS = ({} if WHOLE else SHORT) | {
    "stages.0.max_steps": str(UPDATES[0]),
    "stages.1.max_steps": str(UPDATES[1]),
    "resources.cluster.engine": "ray",
    "resources.cluster.num_nodes": "2",
    "rollout.engine": "vllm",
    "rollout.vllm.replicas": "2",
    "rollout.vllm.python": str(PYTHON),
    "evaluation.engine": "local",
    "evaluation.stages": "false",
}


def test_the_demo_runs_on_two_nodes_with_two_servers_and_leaves_nothing(nodes, tmp_path, prefect_api):
    made = [nodes.add(num_cpus=3, **MARK) for _ in range(2)]
    place = Place(tmp_path / "driver", prefect_api)
    place.root.mkdir()
    settings = SETTINGS | {"resources.cluster.address": nodes.address}
    place.grpo("run", "demo", *(part for name, value in settings.items() for part in ("--set", f"{name}={value}")), timeout=3500)
    if WHOLE:
        assert_learnt(place.parent())
    for stage, updates in zip(("format", "correctness"), UPDATES, strict=True):
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
    # Whatever it is: an engine of vLLM calls itself VLLM::EngineCore, and nothing in its command line says whose it is.
    _, alive = psutil.wait_procs(not_of_ray(), timeout=30)
    assert lines_of(alive) == []

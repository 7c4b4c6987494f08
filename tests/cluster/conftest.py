"""A Ray cluster on this machine: a head without CPUs and nodes that have a temporary folder, a cache and a home of their own."""

import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.grpo.conftest import stages  # noqa: F401 - a fixture

AGENTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def ports():
    """Ports for the agents of a node. Ray would have each agent choose its own, and gives up if that takes half a minute."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in AGENTS]
        for each in found:
            each.bind(("", 0))
        return {name: each.getsockname()[1] for name, each in zip(AGENTS, found, strict=True)}


def patiently(start):
    """What `start` returns. Ray gives a node half a minute to start, which a busy machine may exceed."""
    for _ in range(4):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


class Nodes:
    """The cluster and its nodes."""

    def __init__(self, folder):
        from ray.cluster_utils import Cluster

        self.folder, self.count = folder, 0
        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head | ports()))

    @property
    def address(self):
        return self.cluster.address

    def add(self, num_cpus=1, **environment):
        """One more node, by default with one CPU."""
        self.count += 1
        root = self.folder / f"node-{self.count}"
        own = {name: str(root / name.lower()) for name in ("TMPDIR", "XDG_CACHE_HOME", "HOME")}
        for path in own.values():
            Path(path).mkdir(parents=True)
        node = patiently(lambda: self.cluster.add_node(num_cpus=num_cpus, env_vars=own | environment, **ports()))
        node.private = root
        return node

    def remove(self, node):
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
def nodes(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Ray's workers are nice to everything else; beside other tests they would hardly run.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # tmp_path is too long for the sockets that vLLM opens in its temporary folder.
    with tempfile.TemporaryDirectory(prefix="nodes-", ignore_cleanup_errors=True) as folder:
        made = Nodes(Path(folder))
        yield made
        made.cluster.shutdown()

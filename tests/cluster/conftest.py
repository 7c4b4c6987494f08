"""A Ray cluster on this machine: a head without CPUs and nodes that have a temporary folder, a cache and a home of their own.

The tests of a module share the head. Each adds nodes, which go with it.
"""

import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.grpo.conftest import stages  # noqa: F401 - a fixture
from tests.processes.waiting import until

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


@pytest.fixture(scope="module")
def cluster():
    """The head, which the tests of a module share."""
    utils = pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        settings(patch)
        head = {"num_cpus": 0, "include_dashboard": False}
        made = patiently(lambda: utils.Cluster(initialize_head=True, head_node_args=head | ports()))
    yield made
    made.shutdown()


def settings(patch):
    """The environment of Ray's processes and of the drivers."""
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    patch.setenv("OMP_NUM_THREADS", "1")
    # Ray's workers are nice to everything else; beside other tests they would hardly run.
    patch.setenv("RAY_worker_niceness", "0")
    patch.delenv("RAY_ADDRESS", raising=False)


class Nodes:
    """The nodes of a test."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder, self.count = cluster, folder, 0

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

    def remove_all(self):
        """The next test meets a cluster without nodes."""
        for node in [*self.cluster.worker_nodes]:
            # One that is killed counts as alive until it has missed a few checks.
            self.cluster.remove_node(node, allow_graceful=True)
        until(lambda: sum(node["Alive"] for node in self.cluster.global_state.node_table()) == 1)


@pytest.fixture
def nodes(cluster, monkeypatch):
    settings(monkeypatch)
    # tmp_path is too long for the sockets that vLLM opens in its temporary folder.
    with tempfile.TemporaryDirectory(prefix="nodes-", ignore_cleanup_errors=True) as folder:
        made = Nodes(cluster, Path(folder))
        yield made
        made.remove_all()

"""Rollout servers on the nodes of a cluster: the driver starts them, and replaces those that die while the stage trains."""

import json
import os
import random
import sys

import psutil
import pytest

from grpo_tasks.rollout.vllm_server import VllmServer
from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.operations import ClusterConfig
from schemas.errors import RolloutError
from tests.cluster.processes import MARK, running
from tests.grpo.conftest import stages_in
from tests.processes.waiting import until
from tests.rollout.servers import SMALL, counts, small_servers, tell

pytestmark = [pytest.mark.xdist_group("heavy"), pytest.mark.long, pytest.mark.timeout(1800)]

UPDATES = 20
TRAINING = {"max_steps": UPDATES, "save_steps": 5, "learning_rate": 3e-3}
PATH = os.pathsep.join(filter(None, [str(SMALL), os.environ.get("PYTHONPATH")]))
"""With it a process finds the small servers of the tests as vLLM."""


def add(nodes, num_cpus):
    return nodes.add(num_cpus=num_cpus, PYTHONPATH=PATH, **MARK)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights of the same stage as trained by two processes here, on one server, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("local")
    spec = spec_of(stages_in(folder), "whole", None, 1, processes=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATH)
        with small_servers(folder) as [server]:
            resources = spec.resources.model_copy(update={"cluster": ClusterConfig(), "num_processes": 2})
            vllm = spec.rollout.vllm.model_copy(update={"base_urls": [server.address], "replicas": 1})
            rollout = spec.rollout.model_copy(update={"vllm": vllm})
            return run_stage(spec.model_copy(update={"resources": resources, "rollout": rollout}), folder / "run").sha256


@pytest.fixture
def two_nodes(nodes):
    """Nodes with room for a rank and a server each."""
    return [add(nodes, 3) for _ in range(2)]


def spec_of(stages, name, nodes, count, processes=1, **vllm):
    address = nodes.address if nodes else "auto"
    cluster = {"engine": "ray", "address": address, "num_nodes": count, "processes_per_node": processes}
    rollout = {"engine": "vllm", "vllm": {"python": sys.executable, "replicas": 2, "concurrency": 2, **vllm}}
    # Two groups for each process, so that it asks both servers.
    settings = TRAINING | {"per_device_train_batch_size": 8 * count * processes}
    return StageSpec.load(stages.write(name, rollout=rollout, resources={"cluster": cluster}, length=24, **settings).spec)


def api_servers():
    """The servers of this test, oldest first."""
    return running("vllm.entrypoints.openai.api_server")


def ended(processes):
    return psutil.wait_procs(processes, timeout=30)[1] == []


def steps(directory):
    return [json.loads(line)["step"] for line in StageDir(directory).journal.read_text().splitlines()]


def events(directory):
    path = StageDir(directory).events
    return path.read_text() if path.exists() else ""


def test_dead_servers_are_replaced_and_bytes_stay_the_same(whole, nodes, two_nodes, stages, tmp_path):
    there, killed, chance = tmp_path / "there", [], random.Random(20261124)
    first_after, second_after = chance.randrange(1, 4), chance.randrange(6, 12)

    def kill():
        journal = StageDir(there).journal
        if not journal.exists():
            return
        trained = len(journal.read_text().splitlines())
        if trained >= first_after and not killed:
            # The process of a server: its actor starts it again.
            [first, _] = api_servers()
            first.kill()
            killed.append("process")
        if trained >= second_after and len(killed) == 1:
            # Its actor: the driver starts another one.
            actor = next(parent for parent in api_servers()[-1].parents() if "ServerNode" in " ".join(parent.cmdline()))
            actor.kill()
            killed.append("actor")

    result = run_stage(spec_of(stages, "there", nodes, 2), there, tick=kill)
    assert killed == ["process", "actor"], (first_after, second_after)
    assert result.sha256 == whole
    assert steps(there) == list(range(1, UPDATES + 1))
    assert "is lost" in events(there)
    assert ended(api_servers())
    until(lambda: not any(list((node.private / "tmpdir").glob("grpo-stage-*")) for node in two_nodes))


def server_on(node):
    """The server of a node."""
    [process] = [each for each in api_servers() if each.environ()["TMPDIR"] == str(node.private / "tmpdir")]
    return server_of(process)


def server_of(process):
    arguments = process.cmdline()
    host, port = (arguments[arguments.index(name) + 1] for name in ("--host", "--port"))
    return VllmServer(f"http://{host}:{port}")


@pytest.mark.parametrize("room", [1, 0], ids=["replaced", "fewer"])
def test_a_servers_node_dies_and_the_bytes_are_the_same(whole, nodes, stages, tmp_path, monkeypatch, room):
    monkeypatch.setenv("VLLM_API_KEY", "of-this-test")
    # One node for both ranks, a server and perhaps another one; the other node has room for a server only.
    stays, dies = add(nodes, 3 + room), add(nodes, 1)
    spec = spec_of(stages, "there", nodes, 1, processes=2)
    there, did = tmp_path / "there", []

    def kill():
        journal = StageDir(there).journal
        if not journal.exists() or len(journal.read_text().splitlines()) < 2:
            return
        if not did:
            tell(server_on(dies), delay_s=60.0)
            did.append("slow")
        elif did == ["slow"] and counts(server_on(dies))["running"]:
            # Until it is replaced the stage must not end.
            tell(server_on(stays), delay_s=2.0 * room)
            nodes.remove(dies)
            did.append("killed")
        elif did == ["slow", "killed"] and "joins" in events(there):
            tell(server_of(api_servers()[0]), delay_s=0.0)
            did.append("replaced")

    result = run_stage(spec, there, tick=kill)
    assert did == ["slow", "killed", *["replaced"] * room]
    assert result.sha256 == whole
    assert steps(there) == list(range(1, UPDATES + 1))
    assert "is lost" in events(there)
    assert "node_lost" not in events(there), "the ranks were on another node"
    assert ended(api_servers())


def test_a_node_without_vllm_is_named(nodes, two_nodes, stages, tmp_path):
    with pytest.raises(RolloutError, match="there is no /nowhere/python on") as caught:
        run_stage(spec_of(stages, "there", nodes, 1, python="/nowhere/python"), tmp_path / "there")
    assert "make vllm" in caught.value.fix

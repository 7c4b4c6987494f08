"""What a stage reserves: all of it or nothing. What a cluster cannot hold is refused, or made smaller where that is possible."""

import itertools
import random
import subprocess
import sys
import time

import pytest

from grpo_tasks.cluster.placement import Demand, Share
from grpo_tasks.stage.stage_dir import StageDir
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ClusterError, UserError
from tests.cluster.test_sampling import on, sampled, spec_of
from tests.cluster.test_servers import add

CARD = Share(1.0, 1)


def on_ray(test):
    """Marks of a test that starts a cluster."""
    return pytest.mark.xdist_group("heavy")(pytest.mark.long(pytest.mark.timeout(1800)(test)))


def machines(*gpus, cpus=64.0):
    return {f"m{number}": {"CPU": cpus, "GPU": float(each), "memory": 1e9} for number, each in enumerate(gpus)}


def stage(count, cards, servers=0, size=1, strategy="STRICT_SPREAD"):
    return Demand(count, Share(float(cards), cards), strategy, servers, Share(1.0, size))


ONE = Share(1.0, 0)
A, B = {"a": {"CPU": 2.0}}, {"b": {"CPU": 2.0}}


@pytest.mark.parametrize(
    ("demand", "there", "places"),
    [
        # Cards of ranks are none for servers.
        (stage(2, 4, servers=2), machines(4, 4), None),
        (stage(2, 4), machines(4, 4), ("m0", "m1")),
        (stage(2, 4, servers=2), machines(4, 4, 2), ("m0", "m1")),
        # Nodes are machines of their own unless they are packed.
        (stage(2, 2), machines(4), None),
        (stage(2, 2, strategy="PACK"), machines(4), ("m0", "m0")),
        # A node leaves room for a larger server.
        (stage(1, 1, servers=1, size=8), machines(8, 4), ("m1",)),
        (stage(1, 1, servers=2, size=8), machines(8, 4), None),
        # CPUs count as cards do.
        (Demand(2, ONE, "STRICT_SPREAD", 2, ONE), A | B, ("a", "b")),
        (Demand(2, ONE, "STRICT_SPREAD", 3, ONE), A | B, None),
        (Demand(1, ONE, "STRICT_SPREAD"), {"head": {"memory": 1.0}} | B, ("b",)),
        (Demand(3, Share(0.1, 0), "PACK"), {"a": {"CPU": 0.3}}, ("a", "a", "a")),
    ],
)
def test_nodes_and_servers_are_placed_on_what_machines_have(demand, there, places):
    assert demand.arranged(there) == places


def by_trying(demand, there):
    """Whether any choice of machines for the nodes leaves room for the servers."""
    for chosen in itertools.combinations_with_replacement(sorted(there), demand.count):
        taken = [chosen.count(name) for name in sorted(there)]
        if demand.strategy == "STRICT_SPREAD" and max(taken, default=0) > 1:
            continue
        left = [there[name]["GPU"] - count * demand.share.gpus for name, count in zip(sorted(there), taken, strict=True)]
        if min(left, default=0) >= 0 and sum(int(each // demand.server.gpus) for each in left) >= demand.servers:
            return True
    return False


def test_an_arrangement_is_found_exactly_when_there_is_one():
    chance, found = random.Random(3), []
    for _ in range(400):
        there = machines(*(chance.randrange(9) for _ in range(chance.randrange(1, 5))))
        strategy = chance.choice(["STRICT_SPREAD", "PACK"])
        demand = stage(chance.randrange(1, 4), chance.randrange(1, 5), chance.randrange(4), chance.randrange(1, 5), strategy)
        found.append(demand.arranged(there) is not None)
        assert found[-1] == by_trying(demand, there), (demand, there)
    assert 100 < sum(found) < 300


def test_an_evaluations_process_reserves_only_its_own_cards():
    cluster = {"engine": "ray", "address": "auto", "num_nodes": 4, "processes_per_node": 4, "gpus_per_process": 4}
    wanted = Demand.of_processes(ResourcesConfig(cluster=cluster), RolloutConfig(), 16)
    assert (wanted.share, wanted.strategy) == (Share(1.0, 4), "SPREAD")
    assert wanted.arranged(machines(8, 8, 8, 8)) is None
    assert Demand.of_processes(ResourcesConfig(cluster=cluster), RolloutConfig(), 8).arranged(machines(8, 8, 8, 8)) is not None
    assert wanted.each == "processes", "it starts with those that there is room for"


def test_a_stage_reserves_room_for_the_servers_that_it_starts_itself():
    resources = ResourcesConfig(cluster={"engine": "ray", "address": "auto", "num_nodes": 2, "gpus_per_process": 1})
    own = Demand.of_stage(resources, RolloutConfig(engine="vllm", vllm={"replicas": 3, "tensor_parallel_size": 2}))
    assert (own.servers, own.server) == (3, Share(1.0, 2))
    assert str(own) == "2 nodes with 1 CPU and 1 GPU each and 3 rollout servers with 1 CPU and 2 GPU each"
    foreign = RolloutConfig(engine="vllm", vllm={"base_urls": ["http://10.0.0.1:8000"]})
    assert Demand.of_stage(resources, foreign).servers == Demand.of_stage(resources, RolloutConfig()).servers == 0


def with_servers(stages, nodes, name, **cluster):
    """A stage of two ranks and two servers, ready to be trained."""
    own = {"engine": "ray", "address": nodes.address, "num_nodes": 2, **cluster}
    rollout = {"engine": "vllm", "vllm": {"python": sys.executable, "replicas": 2, "concurrency": 2}}
    return stages.write(name, rollout=rollout, resources={"cluster": own}, length=24, max_steps=2)


def started(directory, code="from grpo_tasks.cluster.stage import main"):
    """The driver of a stage."""
    call = f"{code}\nimport sys\nfrom grpo_tasks.processes.child import run_child\nrun_child(main)"
    with directory.log.open("ab") as log:
        return subprocess.Popen([sys.executable, "-P", "-c", call, str(directory.root)], stdout=log, stderr=log)


@on_ray
def test_two_runs_of_one_name_use_a_cluster_in_turn(nodes, stages):
    for _ in range(2):
        add(nodes, 2)
    both = [with_servers(stages, nodes, name) for name in ("one", "two")]
    drivers = [started(directory) for directory in both]
    try:
        deadline = time.monotonic() + 900
        while any(driver.poll() is None for driver in drivers):
            assert time.monotonic() < deadline, [directory.events.read_text() for directory in both if directory.events.exists()]
            time.sleep(0.5)
    finally:
        for driver in drivers:
            driver.kill()
    assert [driver.returncode for driver in drivers] == [0, 0], [directory.log.read_text()[-3000:] for directory in both]
    waited = [directory.events.read_text() for directory in both if directory.events.exists()]
    assert any("waits for 2 nodes with 1 CPU each and 2 rollout servers with 1 CPU each; " in text for text in waited)


@on_ray
def test_a_stage_that_the_cluster_can_never_hold_is_refused(nodes, stages):
    for _ in range(2):
        add(nodes, 2)
    directory = with_servers(stages, nodes, "large", processes_per_node=2, replacement_wait_s=5.0)
    short = "from grpo_tasks.cluster import placement\nplacement.JOIN_S = 5.0\nfrom grpo_tasks.cluster.stage import main"
    driver = started(directory, short)
    try:
        assert driver.wait(timeout=300) != 0
    finally:
        driver.kill()
    error = UserError.from_json((directory.root / "error.json").read_text())
    assert isinstance(error, ClusterError)
    assert "cannot hold 2 nodes with 2 CPU each and 2 rollout servers with 1 CPU each" in error.message
    assert "more than the whole cluster has" in StageDir(directory.root).events.read_text()


@on_ray
def test_an_evaluation_without_room_samples_with_fewer_processes(nodes, stages, tmp_path):
    nodes.add(num_cpus=2)
    local = sampled(spec_of(stages), tmp_path / "local")
    there = on(nodes, 1, processes_per_node=4, replacement_wait_s=2.0)
    assert sampled(spec_of(stages, **there), tmp_path / "there") == local
    assert "continues with 2" in (tmp_path / "there" / "log.txt").read_text()

"""Which rollout servers are replaced, when, and who learns of it; without Ray, whose part is the transport."""

from itertools import count
from types import SimpleNamespace

import pytest

from grpo_tasks.cluster.messages import NodeLost
from grpo_tasks.cluster.parcel import ServerAddress, pack
from grpo_tasks.cluster.placement import Share
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import ClusterError, RolloutError

pytest.importorskip("ray")

from grpo_tasks.cluster import servers as room


class Driver:
    """Servers with a clock of their own. `starts` says for each start whether it succeeds; `lost` how an actor answers."""

    def __init__(self, stages, monkeypatch, name, replicas=1, **vllm):
        self.now, self.starts, self.lost, self.said, self.announced, self.begun = 1000.0, [], {}, [], [], []
        rollout = {"engine": "vllm", "vllm": {"replicas": replicas, **vllm}}
        directory = stages.write(name, rollout=rollout, resources={"cluster": {"engine": "ray", "num_nodes": 2}})
        spec = StageSpec.load(directory.spec)
        self.servers = room.ClusterServers(spec, pack(spec, directory), None, Share(1.0, 0), self.said.append)
        transport = SimpleNamespace(kill=lambda _: None, wait=lambda asked, **_: (asked, []))
        monkeypatch.setattr(room, "ray", transport)
        monkeypatch.setattr(room, "ask", lambda answer, *_: answer())
        monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        self.start, self.servers._start = self.servers._start, self.begin

    def begin(self, server):
        self.begun.append(self.now)
        outcome = self.starts.pop(0) if self.starts else None
        server.actor = SimpleNamespace(tend=SimpleNamespace(remote=lambda: lambda: self.answer(server.number)))
        if outcome is None:
            server.address = ServerAddress(f"http://node:{8000 + len(self.begun)}", "http://node:1")
        server.fault = outcome

    def answer(self, number):
        fault = self.lost.pop(number, None)
        if fault is not None:
            raise fault
        return ""

    def tend(self):
        """Two looks: one asks, the next one reads the answer."""
        self.look()
        self.look()

    def look(self):
        self.sleep(room.TEND_S)
        self.servers.tend(self.announced.append)
        for server in self.servers._servers:
            if server.starting is not None:
                server.starting.join()

    def sleep(self, seconds):
        self.now += seconds

    def urls(self):
        return [address.url for address in self.servers.addresses]


@pytest.fixture
def driver(stages, monkeypatch):
    names = count()
    return lambda **settings: Driver(stages, monkeypatch, f"stage-{next(names)}", **settings)


def test_a_server_that_does_not_start_again_is_tried_less_and_less_often_and_then_left_out(driver):
    one = driver(replicas=2, max_restarts=4)
    one.servers.start()
    one.said.clear()
    one.starts = [RolloutError(f"no room\n{attempt} lines of a log") for attempt in range(9)]
    one.lost[0] = NodeLost("node-1 is lost")
    began = one.now
    for _ in range(400):
        one.tend()
    first, *later = [round(at - began) for at in one.begun[2:]]
    assert first <= 2 * 2 * room.TEND_S
    assert len(later) == 3, "four attempts after the loss"
    pauses = [after - before for before, after in zip([first, *later], later, strict=False)]
    assert [10 <= pauses[0] < 20, 20 <= pauses[1] < 30, 40 <= pauses[2] < 50] == [True] * 3
    # The loss, the new reason once, and the end.
    assert [line.split(":")[0] for line in one.said] == [
        "rollout server 0 is started again",
        "rollout server 0 is started again",
        "rollout server 0 is left out after 5 failures in a row (rollout.vllm.max_restarts)",
    ]
    assert one.urls() == ["http://node:8002"]


def test_failures_long_ago_do_not_count(driver):
    one = driver(max_restarts=1)
    one.servers.start()
    for _ in range(5):
        one.lost[0] = NodeLost("node-1 is lost")
        one.tend()
        one.tend()
        assert len(one.urls()) == 1
        one.sleep(room.SETTLED_S + 1)
    one.lost[0] = NodeLost("node-1 is lost")
    one.tend()
    one.tend()
    one.lost[0] = NodeLost("node-1 is lost")
    with pytest.raises(ClusterError, match="no rollout server is left: node-1 is lost"):
        one.tend()


def test_ranks_that_start_while_a_server_is_replaced_learn_of_it_once(driver):
    one = driver(replicas=2)
    one.servers.start()
    assert len(one.urls()) == 2
    one.lost[1] = NodeLost("node-1 is lost")
    while one.servers._servers[1].starting is None:
        one.look()
    # It has started, and `tend` has not seen that: it will be announced to the ranks that start now.
    given = one.urls()
    one.look()
    learnt = [*given, *(address.url for address in one.announced)]
    assert sorted(learnt) == sorted(set(learnt)) == sorted(one.urls())


def test_ranks_that_start_when_no_server_is_there_wait_for_one(driver):
    one = driver()
    one.servers.start()
    one.lost[0] = NodeLost("node-1 is lost")
    one.tend()
    assert one.urls() == []
    assert len(one.servers.wait_for_one()) == 1


def test_an_error_that_nobody_foresaw_ends_the_start_and_replaces_a_running_server(driver):
    one = driver()
    one.starts = [ValueError("unforeseen")]
    with pytest.raises(ValueError, match="unforeseen"):
        one.servers.start()
    one = driver()
    one.servers.start()
    one.lost[0] = RolloutError("its port is taken")
    one.tend()
    one.tend()
    assert "its port is taken" in one.said[0]
    assert len(one.urls()) == 1


def test_what_a_start_raises_is_its_fault_whatever_it_is(driver):
    one = driver()
    server = one.servers._servers[0]
    room.ray.remote = lambda _: {}["unforeseen"]
    one.start(server)
    assert isinstance(server.fault, KeyError)
    assert server.address is None


def test_a_server_has_room_for_the_adapter_of_every_process(driver):
    assert driver().servers._served.num_adapters == 2

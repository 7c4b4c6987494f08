"""Which rollout servers are replaced, when, and who learns of it; without Ray, whose part is the transport."""

from itertools import count
from types import SimpleNamespace

import pytest

from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import ClusterError, RolloutError

pytest.importorskip("ray")

from grpo_tasks.cluster import servers as room
from grpo_tasks.cluster.jobs import NodeLost
from grpo_tasks.cluster.placement import Share
from grpo_tasks.cluster.servers import ServerAddress


class Driver:
    """Servers with a clock of their own, kept in this thread for as long as the script says.

    `script` says for each start how long the server runs (s), or why it does not start; the end of it ends all servers.
    """

    def __init__(self, stages, monkeypatch, name, replicas=1, **vllm):
        self.now, self.script, self.said, self.begun, self.lost = 1000.0, [], [], [], NodeLost("node-1 is lost")
        rollout = {"engine": "vllm", "vllm": {"replicas": replicas, **vllm}}
        directory = stages.write(name, rollout=rollout, resources={"cluster": {"engine": "ray", "num_nodes": 2}})
        self.servers = room.ClusterServers(StageSpec.load(directory.spec), None, Share(1.0, 0), self.said.append)
        monkeypatch.setattr(room, "ray", SimpleNamespace(kill=lambda _: None))
        monkeypatch.setattr(room, "answer", lambda *_: self.check())
        monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        self.start, self.servers._start = self.servers._start, self.begin
        self.servers._ended = SimpleNamespace(wait=self.sleep, set=lambda: None)

    def begin(self, number):
        self.begun.append(self.now)
        runs_s = self.script.pop(0)
        if isinstance(runs_s, Exception):
            raise runs_s
        self.ends = self.now + runs_s
        self.servers._actors[number] = SimpleNamespace(check=SimpleNamespace(remote=lambda: None))
        return ServerAddress(f"http://node:{8000 + len(self.begun)}", "http://node:1")

    def check(self):
        if self.now >= self.ends:
            raise self.lost

    def sleep(self, seconds):
        """True when the script is at its end."""
        self.now += seconds
        return not self.script and self.now >= self.ends

    def keep(self, *script, number=0):
        self.script, self.ends = [*script], 0.0
        self.servers.keep(number)

    def taken(self):
        """What `check` reports now, and the addresses that it announces."""
        announced = self.servers.check()
        return [address.url for address in announced]


@pytest.fixture
def driver(stages, monkeypatch):
    names = count()
    return lambda **settings: Driver(stages, monkeypatch, f"stage-{next(names)}", **settings)


def test_a_server_that_cannot_restart_is_left_out(driver):
    one = driver(max_restarts=4)
    one.keep(9.0, *(RolloutError(f"no room\n{attempt} lines of a log") for attempt in range(9)))
    with pytest.raises(ClusterError, match="no rollout server is left"):
        one.taken()
    first, second, *later = [at - one.begun[0] for at in one.begun]
    assert 9.0 <= second - first <= 9.0 + room.CHECK_S, "it is started again at once"
    pauses = [after - before for before, after in zip([second, *later], later, strict=False)]
    assert pauses == [10.0, 20.0, 40.0], "four attempts after the loss"
    # The loss, the new reason once, and the end.
    assert [line.split(":")[0] for line in one.said] == [
        "rollout server 0 is started again",
        "rollout server 0 is started again",
        "rollout server 0 is left out after 5 failures in a row (rollout.vllm.max_restarts)",
    ]


def test_one_that_is_left_out_ends_nothing_while_another_one_runs(driver):
    one = driver(replicas=2, max_restarts=0)
    one.keep(9.0, 0.0)
    one.keep(900.0, number=1)
    one.taken()
    assert "rollout server 0 is left out" in one.said[0]
    assert [address.url for address in one.servers.wait_for_one()] == ["http://node:8002"]


def test_failures_long_ago_do_not_count(driver):
    one = driver(max_restarts=1)
    one.keep(*[room.SETTLED_S + 9] * 5, 1.0, 1.0, 1.0)
    assert len(one.begun) == 6
    with pytest.raises(ClusterError, match="no rollout server is left: node-1 is lost"):
        one.taken()


def test_ranks_that_start_while_a_server_is_replaced_learn_of_it_once(driver):
    one = driver()
    one.keep(9.0, 900.0)
    first, lost, joined = (one.servers._news.get() for _ in range(3))
    one.servers._take(first)
    one.servers._news.put(lost)
    # It has joined, and nobody has taken that: it will be announced to the ranks that start now.
    given = [address.url for address in one.servers.wait_for_one()]
    one.servers._news.put(joined)
    assert [*given, *one.taken()] == ["http://node:8001", "http://node:8002"]
    assert one.said[-1] == "rollout server 0 joins at http://node:8002"


def test_ranks_that_start_when_no_server_is_there_wait_for_one(driver):
    one = driver()
    one.keep(9.0, 900.0)
    first, lost, joined = (one.servers._news.get() for _ in range(3))
    one.servers._take(first)
    one.servers._take(lost)
    one.servers._news.put(joined)
    assert [address.url for address in one.servers.wait_for_one()] == ["http://node:8002"]


def test_an_unforeseen_error_ends_the_start_or_replaces_the_server(driver):
    one = driver(max_restarts=0)
    one.script, one.ends = [ValueError("unforeseen")], 0.0
    with pytest.raises(ValueError, match="unforeseen"), one.servers:
        pass
    one = driver()
    one.lost = RolloutError("its port is taken")
    one.keep(9.0, 900.0)
    assert one.taken() == ["http://node:8001", "http://node:8002"]
    assert "its port is taken" in one.said[0]


def test_a_stage_whose_servers_lose_all_nodes_early_is_refused(driver):
    one = driver(max_restarts=0)
    one.script, one.ends = [one.lost], 0.0
    with pytest.raises(ClusterError, match="no rollout server has started: node-1 is lost"), one.servers:
        pass

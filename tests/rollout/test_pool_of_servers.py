"""Several servers behind the engine, as processes: killed, stopped, overloaded, restarted by somebody else, asleep or late."""

import gc
import os
import shutil
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from grpo_tasks.kit import share
from grpo_tasks.kit.share import State
from grpo_tasks.policy.load import trainable_policy
from grpo_tasks.rollout.engine import Request, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import VllmServer, existing_servers
from schemas.config.model import ModelConfig
from schemas.errors import RolloutError, ServerGoneError
from schemas.metrics import REPLICAS_SERVING, SYNC_BYTES
from tests.rollout.servers import (
    CALIBRATE,
    LOAD,
    PROBE,
    SLEEP,
    UNLOAD,
    WAKE,
    counts,
    kill,
    listener,
    moved,
    restore,
    sampling,
    small_config,
    small_servers,
    tell,
    watched,
)

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pair(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_STARTS", str(folder / "starts"))
        with small_servers(folder, replicas=2, devices=["3", "5"]) as found:
            # Each server was started with its own cards, at its own address.
            assert sorted((folder / "starts").read_text().split()) == ["3", "5"]
            assert len({server.address for server in found}) == 2
            yield found


@pytest.fixture
def servers(pair):
    yield pair
    for server in pair:
        if server._supervisor.poll() is not None:
            server.restart()
        tell(server, delay_s=0.0, status=200, count=None, instead=None, no_memory=0)
        restore(server)
        for name in server.loaded:
            httpx.post(server.address + UNLOAD, json={"lora_name": name})
        server.asleep, server.stale = False, False
        server.loaded.clear()


def engine_of(servers, policy, tokenizer, folder, *, merged=False, **settings):
    config = small_config(**{"concurrency": 2, **settings})
    return VllmEngine(policy, tokenizer, config, servers, weights=folder / "weights", dtype="float32", merged=merged)


@pytest.fixture
def engine_on(policy, tokenizer, tmp_path):
    """An engine that has loaded the policy into some servers; it is closed in the end."""
    engines = []

    def make(servers, policy=policy, **settings):
        engine = engine_of(servers, policy, tokenizer, tmp_path, **settings)
        engines.append(engine)
        engine.sync()
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def new_policy(base_ref):
    """It is the base: nothing but the calibration tells servers that take over weights from those that do not."""
    return trainable_policy(base_ref, ModelConfig(), device=torch.device("cpu"), seed=3)


def local(policy, tokenizer, prompts):
    """What the engine in this process samples."""
    engine = LocalEngine(policy, tokenizer)
    engine.sync()
    return generate(engine, prompts)


def generate(engine, prompts):
    requests = [
        Request(prompts[group % len(prompts)], completion_seed(4, group) % 2**30 + index)
        for group in range(12)
        for index in range(2)
    ]
    return [completion.token_ids for completion in engine.generate(requests, sampling(max_completion_length=12))]


@pytest.fixture
def wanted(policy, tokenizer, prompts):
    return local(policy, tokenizer, prompts)


def soon(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("merged", [pytest.param(False, marks=pytest.mark.ci), True])
def test_a_server_killed_in_a_batch_serves_the_next_policy(servers, engine_on, policy, tokenizer, prompts, wanted, merged):
    engine = engine_on(servers, merged=merged)
    assert generate(engine, prompts) == wanted
    assert all(counts(server)["requests"] for server in servers)
    # It is killed while it holds requests, however slow the machine is.
    tell(servers[0], delay_s=60)
    killer = threading.Thread(target=lambda: (soon(lambda: counts(servers[0])["running"]), kill(servers[0])))
    killer.start()
    assert generate(engine, prompts) == wanted
    killer.join()
    report = engine.report()
    assert report.figures[REPLICAS_SERVING] == 1
    assert any("replica 0" in event and "is left out" in event for event in report.events)
    # A batch that begins before it is back is sampled by the other one.
    assert generate(engine, prompts) == wanted
    moved(policy, 0.2)
    soon(lambda: engine.pool.replicas[0].state in (State.UP, State.SERVING))
    engine.sync()
    assert len(engine.pool.serving) == 2
    fresh = local(policy, tokenizer, prompts)
    assert fresh != wanted
    assert generate(engine, prompts) == fresh
    assert counts(servers[0])["requests"]
    assert engine.report().figures[SYNC_BYTES] > 0


@pytest.mark.long
def test_a_stopped_servers_requests_are_sampled_by_the_other(servers, engine_on, prompts, wanted):
    engine = engine_on(servers, request_timeout_s=20.0)
    process = listener(servers[0].address)
    os.kill(process.pid, signal.SIGSTOP)
    assert generate(engine, prompts) == wanted
    assert any("is left out: no answer to /v1/completions" in event for event in engine.report().events)
    # It is our own: what is stopped is ended and started again.
    soon(lambda: engine.pool.replicas[0].state is State.UP)
    assert not process.is_running()
    engine.sync()
    assert len(engine.pool.serving) == 2


@pytest.mark.long
def test_an_overloaded_server_rests_and_nothing_is_lost(servers, engine_on, prompts, wanted):
    engine = engine_on(servers[:1], concurrency=8)
    tell(servers[0], status=503, count=4)
    assert generate(engine, prompts) == wanted
    assert engine.report().events == ()


@pytest.mark.slow
def test_a_foreign_server_that_somebody_restarted_gets_the_policy_again(servers, engine_on, prompts, wanted):
    [foreign] = existing_servers(small_config(base_urls=[servers[0].address]), adapters=True)
    engine = engine_on([foreign])
    # It forgets its adapters, as after a restart, and answers 404 for the policy.
    engine._post(foreign, UNLOAD, {"lora_name": engine._present.name})
    assert generate(engine, prompts) == wanted
    assert any("has lost the policy" in event for event in engine.report().events)


@pytest.mark.slow
def test_an_absent_foreign_server_joins_when_it_answers(servers, engine_on, prompts, wanted, caplog, monkeypatch):
    class Late(VllmServer):
        """A name that leads nowhere at first."""

    config = small_config(base_urls=[servers[0].address, "http://127.0.0.1:9"])
    present, absent = existing_servers(config, adapters=True)
    assert (present.stale, absent.stale) == (False, True)
    assert "127.0.0.1:9" in caplog.text
    late = Late(absent.address)
    monkeypatch.setattr(share, "RETRY_S", 0.1)
    engine = engine_on([present, late])
    assert generate(engine, prompts) == wanted
    late.address = servers[1].address
    before = counts(servers[1])["requests"]
    tell(servers[0], delay_s=0.3)
    soon(lambda: generate(engine, prompts) == wanted and counts(servers[1])["requests"] > before)


@pytest.mark.long
@pytest.mark.parametrize("planted", ["nothing", "another stage"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_server_that_takes_no_weights_is_refused_early(
    servers, engine_on, new_policy, base_ref, tokenizer, prompts, tmp_path, merged, planted
):
    instead, wanted = planted, "shows no shift from its base"
    if planted == "another stage":
        theirs = moved(trainable_policy(base_ref, ModelConfig(), device=torch.device("cpu"), seed=4), 0.05)
        other = engine_of([], theirs, tokenizer, tmp_path / "other", merged=merged)
        instead, wanted = str(other.prepare().folder), "its shift from the base is another one"
    before = [parameter.detach().clone() for parameter in new_policy.parameters()]
    tell(servers[0], instead=instead)
    engine = engine_on(servers, new_policy, merged=merged)
    assert engine.pool.serving == [servers[1]]
    [event] = engine.report().events
    assert all(part in event for part in (servers[0].address, wanted, "All keys name layers of its Qwen2ForCausalLM"))
    assert all(torch.equal(was, now) for was, now in zip(before, new_policy.parameters(), strict=True))
    assert generate(engine, prompts) == local(new_policy, tokenizer, prompts)
    engine.close()
    with pytest.raises(RolloutError, match=wanted) as caught:
        engine_on(servers[:1], new_policy, merged=merged)
    assert caught.value.place == servers[0].address


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_nothing_of_a_calibration_is_left(servers, engine_on, new_policy, tmp_path, merged):
    tell(servers[0], instead="nothing")
    engine_on(servers, new_policy, merged=merged).close()
    for server in servers:
        assert {model["id"] for model in httpx.get(f"{server.address}/v1/models").json()["data"]} == {"base"}
    assert not (tmp_path / "weights").exists()


@pytest.mark.slow
def test_a_server_that_is_restarted_or_joins_shows_it_again(servers, engine_on, new_policy, tokenizer, prompts):
    engine = engine_on(servers[:1], new_policy, max_restarts=3)
    tell(servers[0], instead="nothing")
    # The policy is still the base, which a server that ignores it serves too.
    engine.sync()
    assert engine.pool.serving == servers[:1]
    engine.pool.take_out(servers[0], ServerGoneError("away for a while", place=servers[0].address))
    soon(lambda: engine.pool.replicas[0].state is State.UP)
    with pytest.raises(RolloutError, match="shows no shift"):
        engine.sync()
    engine.pool.add(servers[1])
    assert generate(engine, prompts) == local(new_policy, tokenizer, prompts)
    assert engine.pool.serving == [servers[1]]


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_a_server_with_another_policy_serves_nothing(servers, engine_on, policy, prompts, wanted, tmp_path, merged):
    engine = engine_on(servers, merged=merged)
    old = str(shutil.copytree(engine._present.folder, tmp_path / "old"))
    moved(policy, 0.5)
    post = engine._post

    def stale(server, path, body):
        paths = {LOAD: {"lora_path": old}, "/collective_rpc": {"kwargs": {"weights_path": old}}}
        return post(server, path, body | (paths.get(path, {}) if server is servers[0] else {}))

    engine._post = stale
    engine.sync()
    assert engine.pool.serving == [servers[1]]
    assert any("does not serve the trainer's policy" in event for event in engine.report().events)
    assert generate(engine, prompts) != wanted


@pytest.mark.long
def test_a_restarting_server_is_not_left_behind_by_its_stage(engine_on, tmp_path):
    with small_servers(tmp_path, replicas=1) as [server]:
        engine = engine_on([server])
        kill(server)
        with pytest.raises(RolloutError, match="no answer to") as caught:
            engine._post(server, "/v1/completions", {})
        assert caught.value.place == server.address
        assert "vllm.log" in caught.value.fix
        # The stage ends while it restarts.
        thread = ThreadPoolExecutor(1)
        restart = thread.submit(server.restart)
    assert isinstance(restart.exception(60), RolloutError)
    thread.shutdown()
    with pytest.raises(RolloutError, match="ended"):
        server.start()
    assert server._supervisor.poll() is not None


def update(policy):
    """What an update leaves: gradients, moved weights, and an activation in a cycle of references, which nothing but gc frees."""
    policy(input_ids=torch.tensor([[3, 4, 5]])).logits.sum().backward()
    moved(policy, 0.01)
    cycle = [torch.zeros(1)]
    cycle.append(cycle)
    return weakref.ref(cycle[0])


@pytest.mark.slow
def test_the_trainer_gives_up_all_it_can_before_the_server_wakes_up(servers, policy, tokenizer, tmp_path, monkeypatch):
    engine, freed, seen = engine_of(servers[:1], policy, tokenizer, tmp_path, sleep=True), [], []
    servers[0].calibrated = None

    def held():
        """(gradients, activations) that the trainer holds."""
        return sum(parameter.grad is not None for parameter in policy.parameters()), activation() is not None

    def look():
        seen.append((held(), list(freed), len(list((tmp_path / "weights").iterdir()))))

    asked = watched(engine, look)
    engine.sync()
    engine.sleep()
    gc.disable()
    try:
        activation = update(policy)
        assert held() == (len([p for p in policy.parameters() if p.requires_grad]), True)
        # The one thing that cannot be seen without a card: whether torch's blocks went, and that after what was in them.
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(held()))
        engine.sync()
    finally:
        gc.enable()
    nothing = (0, False)
    assert seen == [(nothing, [nothing], 3)]
    # The new weights are loaded and probed by a server that is awake, and the old ones unloaded last.
    assert [path for path, _ in asked] == [*CALIBRATE, LOAD, PROBE, SLEEP, WAKE, LOAD, PROBE, UNLOAD]
    folders = [Path(body["lora_path"]) for path, body in asked if path == LOAD]
    assert [folder.exists() for folder in folders] == [True, False, True]
    # A server is left awake.
    engine.sleep()
    engine.close()
    assert [path for path, _ in asked[-3:]] == [SLEEP, WAKE, UNLOAD]


@pytest.fixture
def beside(servers, monkeypatch):
    """A server on the trainer's card, and what happens to the card: a list that grows."""
    [server, *_], happened = servers, []
    monkeypatch.setattr(server, "on_trainers_card", True)
    restart = server.restart
    monkeypatch.setattr(server, "restart", lambda: (happened.append("restart"), restart()))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("room"))
    return server, happened


@pytest.mark.slow
def test_a_dead_server_on_the_trainers_card_gets_room_before_its_restart(beside, engine_on, prompts, wanted):
    server, happened = beside
    engine = engine_on([server])
    kill(server)
    happened.clear()
    assert generate(engine, prompts) == wanted
    assert happened == ["room", "restart"]


@pytest.mark.slow
@pytest.mark.parametrize("sleep", [True, False])
def test_a_server_on_the_trainers_card_is_not_restarted_in_an_update(beside, engine_on, policy, sleep):
    server, happened = beside
    engine = engine_on([server], sleep=sleep)
    kill(server)
    happened.clear()
    engine.sleep()
    if not sleep:
        # Nobody asks a server that stays awake; a server that others sample from meanwhile would be found in the same way.
        engine.pool.take_out(server, ServerGoneError("killed", place=server.address))
    soon(lambda: engine.pool.replicas[0].state is State.OUT)
    update(policy)
    happened.append("update")
    engine.sync()
    # With sleep the gradients go first, too.
    assert happened == ["update", *["room"] * (1 + sleep), "restart"]
    assert all(parameter.grad is None for parameter in policy.parameters()) == sleep
    assert engine.pool.serving == [server]


@pytest.mark.slow
def test_a_server_that_came_back_after_the_last_completion_sleeps_too(servers, engine_on):
    engine = engine_on(servers, sleep=True)
    engine.pool.take_out(servers[1], ServerGoneError("away for a while", place=servers[1].address))
    soon(lambda: engine.pool.replicas[1].state is State.UP)
    engine.sleep()
    assert [server.asleep for server in servers] == [True, True]


@pytest.mark.slow
def test_waking_up_is_tried_again_as_often_as_servers_are_started_again(servers, engine_on):
    engine = engine_on(servers[:1], sleep=True, max_restarts=1)
    asked = watched(engine)
    engine.sleep()
    tell(servers[0], no_memory=1)
    engine.sync()
    assert [path for path, _ in asked].count(WAKE) == 2
    engine.sleep()
    tell(servers[0], no_memory=1)
    with pytest.raises(ServerGoneError, match="out of memory"):
        engine.sync()


@pytest.mark.slow
def test_without_sleep_no_server_sleeps_or_wakes_up(servers, engine_on, policy):
    engine = engine_on(servers[:1])
    asked = watched(engine)
    engine.sleep()
    policy(input_ids=torch.tensor([[3, 4, 5]])).logits.sum().backward()
    engine.sync()
    assert any(parameter.grad is not None for parameter in policy.parameters())
    assert {path for path, _ in asked} == {LOAD, PROBE, UNLOAD}

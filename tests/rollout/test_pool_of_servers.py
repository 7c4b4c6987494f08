"""Several servers behind the engine, as processes: killed, stopped, overloaded, restarted by somebody else, or joining late."""

import os
import shutil
import signal
import threading
import time

import httpx
import pytest
import torch

from grpo_tasks.kit import share
from grpo_tasks.kit.share import State
from grpo_tasks.policy.load import trainable_policy
from grpo_tasks.rollout.engine import Request, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import VllmServer, existing_servers, replica_devices
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmConfig
from schemas.errors import RolloutError, ServerGoneError
from schemas.metrics import REPLICAS_SERVING, SYNC_BYTES
from tests.rollout.servers import listener, moved, sampling
from tests.rollout.small_servers import counts, kill, restore, small_config, small_servers, tell

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pair(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_STARTS", str(folder / "starts"))
        with small_servers(folder, replicas=2, devices=["3", "5"]) as found:
            # Each server was started with its own cards.
            assert sorted((folder / "starts").read_text().split()) == ["3", "5"]
            yield found


@pytest.fixture
def servers(pair):
    yield pair
    for server in pair:
        if server._supervisor.poll() is not None:
            server.restart()
        tell(server, delay_s=0.0, status=200, count=None, instead=None)
        restore(server)


def engine_of(servers, policy, tokenizer, folder, *, merged=False, **settings):
    config = small_config(**{"concurrency": 2, **settings})
    return VllmEngine(policy, tokenizer, config, servers, weights=folder / "weights", dtype="float32", merged=merged)


def requests_of(prompts, groups=12, size=2):
    return [
        Request(prompts[group % len(prompts)], completion_seed(4, group) % 2**30 + index)
        for group in range(groups)
        for index in range(size)
    ]


def ids(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture
def wanted(policy, tokenizer, prompts):
    """What the engine in this process samples for the same requests."""
    return local(policy, tokenizer, prompts)


def local(policy, tokenizer, prompts):
    engine = LocalEngine(policy, tokenizer)
    engine.sync()
    return generate(engine, prompts)


def generate(engine, prompts):
    return ids(engine.generate(requests_of(prompts), sampling(max_completion_length=12)))


def soon(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.ci
@pytest.mark.parametrize("merged", [False, True])
def test_a_server_killed_in_a_batch_serves_the_next_policy(servers, policy, tokenizer, prompts, wanted, tmp_path, merged):
    engine = engine_of(servers, policy, tokenizer, tmp_path, merged=merged)
    engine.sync()
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
    engine.close()


@pytest.mark.long
def test_a_stopped_servers_requests_are_sampled_by_the_other(servers, policy, tokenizer, prompts, wanted, tmp_path):
    engine = engine_of(servers, policy, tokenizer, tmp_path, request_timeout_s=20.0)
    engine.sync()
    process = listener(servers[0].address)
    os.kill(process.pid, signal.SIGSTOP)
    assert generate(engine, prompts) == wanted
    assert any("is left out: no answer to /v1/completions" in event for event in engine.report().events)
    # It is our own: what is stopped is ended and started again.
    soon(lambda: engine.pool.replicas[0].state is State.UP)
    assert not process.is_running()
    engine.sync()
    assert len(engine.pool.serving) == 2
    engine.close()


@pytest.mark.long
def test_an_overloaded_server_rests_and_nothing_is_lost(servers, policy, tokenizer, prompts, wanted, tmp_path):
    engine = engine_of(servers[:1], policy, tokenizer, tmp_path, concurrency=8)
    engine.sync()
    tell(servers[0], status=503, count=4)
    assert generate(engine, prompts) == wanted
    assert engine.report().events == ()
    engine.close()


@pytest.mark.slow
def test_a_foreign_server_that_somebody_restarted_gets_the_policy_again(servers, policy, tokenizer, prompts, wanted, tmp_path):
    config = small_config(base_urls=[servers[0].address])
    [foreign] = existing_servers(config, adapters=True)
    engine = engine_of([foreign], policy, tokenizer, tmp_path)
    engine.sync()
    # It forgets its adapters, as after a restart, and answers 404 for the policy.
    name = engine._present.name
    engine._post(foreign, "/v1/unload_lora_adapter", {"lora_name": name})
    assert generate(engine, prompts) == wanted
    assert any("has lost the policy" in event for event in engine.report().events)
    engine.close()


@pytest.mark.slow
def test_an_absent_foreign_server_joins_when_it_answers(
    servers, policy, tokenizer, prompts, wanted, tmp_path, caplog, monkeypatch
):
    class Late(VllmServer):
        """A name that leads nowhere until `arrive`."""

        def arrive(self):
            self.address = servers[1].address

    config = small_config(base_urls=[servers[0].address, "http://127.0.0.1:9"])
    present, absent = existing_servers(config, adapters=True)
    assert (present.stale, absent.stale) == (False, True)
    assert "127.0.0.1:9" in caplog.text
    late = Late(absent.address)
    engine = engine_of([present, late], policy, tokenizer, tmp_path)
    monkeypatch.setattr(share, "RETRY_S", 0.1)
    engine.sync()
    assert generate(engine, prompts) == wanted
    late.arrive()
    before = counts(servers[1])["requests"]
    tell(servers[0], delay_s=0.3)
    soon(lambda: generate(engine, prompts) == wanted and counts(servers[1])["requests"] > before)
    engine.close()


@pytest.mark.long
@pytest.mark.parametrize("planted", ["nothing", "another stage"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_server_that_takes_no_weights_is_refused_early(servers, base_ref, tokenizer, prompts, tmp_path, merged, planted):
    """The policy is new, so it is the base: nothing but the calibration tells the servers apart."""
    policy = trainable_policy(base_ref, ModelConfig(), device=torch.device("cpu"), seed=3)
    instead, wanted = planted, "shows no shift from its base"
    if planted == "another stage":
        theirs = moved(trainable_policy(base_ref, ModelConfig(), device=torch.device("cpu"), seed=4), 0.05)
        other = engine_of([], theirs, tokenizer, tmp_path / "other", merged=merged)
        instead, wanted = str(other.prepare().folder), "its shift from the base is another one"
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    tell(servers[0], instead=instead)
    engine = engine_of(servers, policy, tokenizer, tmp_path, merged=merged)
    engine.sync()
    assert engine.pool.serving == [servers[1]]
    [event] = engine.report().events
    assert servers[0].address in event
    assert wanted in event
    assert "All keys name layers of its Qwen2ForCausalLM" in event
    assert all(torch.equal(was, now) for was, now in zip(before, policy.parameters(), strict=True))
    assert generate(engine, prompts) == local(policy, tokenizer, prompts)
    engine.close()
    alone = engine_of(servers[:1], policy, tokenizer, tmp_path, merged=merged)
    with pytest.raises(RolloutError, match=wanted) as caught:
        alone.sync()
    assert caught.value.place == servers[0].address
    alone.close()
    # Nothing of the calibration is left, there or here.
    models = {model["id"] for model in httpx.get(f"{servers[0].address}/v1/models").json()["data"]}
    assert models == {"base"}
    assert not (tmp_path / "weights").exists()


@pytest.mark.slow
def test_a_server_that_is_restarted_or_joins_shows_it_again(servers, base_ref, tokenizer, prompts, tmp_path):
    policy = trainable_policy(base_ref, ModelConfig(), device=torch.device("cpu"), seed=3)
    engine = engine_of(servers[:1], policy, tokenizer, tmp_path, max_restarts=3)
    engine.sync()
    tell(servers[0], instead="nothing")
    # The policy is still the base, which a server that ignores it serves too.
    engine.sync()
    assert engine.pool.serving == servers[:1]
    engine.pool.take_out(servers[0], ServerGoneError("away for a while", place=servers[0].address))
    soon(lambda: engine.pool.replicas[0].state is State.UP)
    with pytest.raises(RolloutError, match="shows no shift"):
        engine.sync()
    engine.pool.add(servers[1])
    assert generate(engine, prompts) == local(policy, tokenizer, prompts)
    assert engine.pool.serving == [servers[1]]
    engine.close()


@pytest.mark.slow
def test_a_server_with_another_policy_serves_nothing(servers, policy, tokenizer, prompts, wanted, tmp_path):
    engine = engine_of(servers, policy, tokenizer, tmp_path)
    engine.sync()
    old = str(shutil.copytree(engine._present.folder, tmp_path / "old"))
    moved(policy, 0.5)
    post = engine._post

    def stale(server, path, body):
        if path == "/v1/load_lora_adapter" and server is servers[0]:
            body = body | {"lora_path": old}
        return post(server, path, body)

    engine._post = stale
    engine.sync()
    assert engine.pool.serving == [servers[1]]
    assert any("does not serve the trainer's policy" in event for event in engine.report().events)
    assert generate(engine, prompts) != wanted
    engine.close()


def test_every_server_has_an_address_and_cards_of_its_own(pair):
    assert len({server.address for server in pair}) == 2
    assert len({server._device for server in pair}) == 2


def test_without_devices_servers_get_the_cards_behind_the_trainers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    assert replica_devices(VllmConfig(replicas=2, tensor_parallel_size=2), cuda=True) == ["5,6", "7,8"]
    assert replica_devices(VllmConfig(replicas=5), cuda=True) == ["4", "5", "6", "7", "8"]
    assert replica_devices(VllmConfig(replicas=3), cuda=False) == [None] * 3
    assert replica_devices(VllmConfig(), cuda=True) == [None]
    with pytest.raises(RolloutError, match="need 6 cards") as caught:
        replica_devices(VllmConfig(replicas=6), cuda=True)
    assert "rollout.vllm.devices" in caught.value.fix


@pytest.mark.long
def test_a_restarting_server_is_not_left_behind_by_its_stage(policy, tokenizer, prompts, tmp_path):
    with small_servers(tmp_path, replicas=1) as [server]:
        engine = engine_of([server], policy, tokenizer, tmp_path)
        engine.sync()
        kill(server)
        with pytest.raises(RolloutError):
            engine._post(server, "/v1/completions", {})
        failed = []

        def restarted():
            try:
                server.restart()
            except RolloutError as error:
                failed.append(error)

        restart = threading.Thread(target=restarted)
        restart.start()
    restart.join(60)
    assert len(failed) == 1
    with pytest.raises(RolloutError, match="ended"):
        server.start()
    assert server._supervisor.poll() is not None

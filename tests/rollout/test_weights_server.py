"""Weights that reach a server over HTTP: the server sees no file of the trainer."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from grpo_tasks.kit import share
from grpo_tasks.rollout import vllm_engine
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import deliver, existing_servers
from schemas.config.rollout import VllmConfig
from schemas.errors import RolloutError, ServerGoneError
from schemas.metrics import SYNC_BYTES
from tests.ports import free_ports
from tests.rollout.servers import ROOT, counts, moved, restore, small_config, small_servers, watched
from tests.rollout.test_pool_of_servers import generate, local

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.timeout(300)]


@contextmanager
def receiver(folder, *, key=None, port=None):
    """`grpo weights-server` as a process, in a folder of its own."""
    port = port or free_ports(1)[0]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    environment |= {"VLLM_API_KEY": key} if key else {}
    call = [sys.executable, "-m", "flows.cli", "weights-server", str(folder), "--port", str(port)]
    process = subprocess.Popen(call, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None
            try:
                httpx.get(f"{address}/weights")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield address, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def elsewhere(small, tmp_path_factory):
    """Two servers, and the folder that belongs to them and not to the trainer."""
    with small_servers(tmp_path_factory.mktemp("small"), replicas=2) as servers:
        yield servers


def engine_for(servers, receivers, policy, tokenizer, folder, *, merged=False):
    config = small_config(base_urls=[server.address for server in servers], weights_urls=receivers, concurrency=2)
    found = existing_servers(config, adapters=not merged)
    return VllmEngine(policy, tokenizer, config, found, weights=folder / "weights", dtype="float32", merged=merged)


def names(address):
    return httpx.get(f"{address}/weights").json()["names"]


@pytest.mark.long
@pytest.mark.parametrize("merged", [pytest.param(False, marks=pytest.mark.ci), True])
def test_a_server_samples_the_policy_that_was_sent_to_it(elsewhere, policy, tokenizer, prompts, tmp_path, merged):
    with receiver(tmp_path / "theirs") as (address, _):
        engine = engine_for(elsewhere[:1], [address], policy, tokenizer, tmp_path, merged=merged)
        asked = watched(engine)
        for change in (0.0, 0.2, 0.1):
            moved(policy, change)
            engine.sync()
            assert generate(engine, prompts) == local(policy, tokenizer, prompts)
            # The policies before it are gone, here and there.
            assert names(address) == [engine._present.name]
            assert [entry.name for entry in (tmp_path / "theirs").iterdir()] == [engine._present.name]
        assert not any(str(tmp_path / "weights") in str(body) for _, body in asked)
        engine.close()
        assert names(address) == []
    restore(elsewhere[0])


@pytest.mark.long
def test_a_killed_receiver_leaves_its_server_out_until_it_returns(elsewhere, policy, tokenizer, prompts, tmp_path, monkeypatch):
    with receiver(tmp_path / "a") as (first, _), receiver(tmp_path / "b") as (second, process):
        engine = engine_for(elsewhere, [first, second], policy, tokenizer, tmp_path)
        monkeypatch.setattr(share, "RETRY_S", 0.1)
        engine.sync()
        assert len(engine.pool.serving) == 2
        process.kill()
        process.wait()
        moved(policy, 0.2)
        engine.sync()
        wanted = local(policy, tokenizer, prompts)
        assert generate(engine, prompts) == wanted
        assert [server.receiver for server in engine.pool.serving] == [first]
        assert any("replica 1" in event and "is left out" in event for event in engine.report().events)
        with receiver(tmp_path / "b", port=int(second.rpartition(":")[2])):
            deadline = time.monotonic() + 120
            while len(engine.pool.serving) < 2:
                assert time.monotonic() < deadline
                assert generate(engine, prompts) == wanted
            assert engine._present.name in names(second)
            assert generate(engine, prompts) == wanted
            engine.close()


@pytest.mark.long
def test_a_policy_received_during_a_load_is_served_next(elsewhere, policy, tokenizer, prompts, tmp_path, monkeypatch):
    arrived, switching = threading.Event(), threading.Event()

    def slowly(client, receiver, name, folder):
        path = deliver(client, receiver, name, folder)
        if receiver == second and not switching.is_set():
            arrived.set()
            assert switching.wait(60)
        return path

    with receiver(tmp_path / "a") as (first, _), receiver(tmp_path / "b") as (second, _):
        engine = engine_for(elsewhere, [first, second], policy, tokenizer, tmp_path)
        engine.sync()
        # Somebody restarts the second server: it has lost its adapter, and gets it again during a batch.
        engine._post(elsewhere[1], "/v1/unload_lora_adapter", {"lora_name": next(iter(engine.pool.replicas[1].server.loaded))})
        monkeypatch.setattr(vllm_engine, "deliver", slowly)
        engine.pool.take_out(engine.pool.replicas[1].server, ServerGoneError("restarted", place=second))
        while not arrived.is_set():
            assert generate(engine, prompts) == local(policy, tokenizer, prompts)
        moved(policy, 0.2)
        weights, refresh = engine.prepare(), engine.pool.refresh
        monkeypatch.setattr(engine.pool, "refresh", lambda: (switching.set(), refresh()))
        engine.load(weights)
        # The name stands for the new weights there too.
        assert len(engine.pool.serving) == 2
        before = [counts(server)["requests"] for server in elsewhere]
        assert generate(engine, prompts) == local(policy, tokenizer, prompts)
        assert all(counts(server)["requests"] > was for server, was in zip(elsewhere, before, strict=True))
        # Each of the two has loaded the new weights once, and the second one the old ones meanwhile.
        size = sum(file.stat().st_size for file in weights.folder.iterdir())
        assert engine.report().figures[SYNC_BYTES] >= 2 * size
        engine.close()


@pytest.mark.slow
def test_what_does_not_arrive_whole_is_never_loaded(tmp_path):
    content, sha256 = b"weights" * 1000, hashlib.sha256(b"weights" * 1000).hexdigest()
    with receiver(tmp_path / "theirs") as (address, _):
        at = f"{address}/weights/policy-1"

        def put(name, body, digest):
            return httpx.put(f"{at}/{name}", content=body, headers={"X-SHA256": digest}).status_code

        complete = {"files": {"a.safetensors": sha256}}
        assert put("a.safetensors", content[:-1], sha256) == 500
        assert httpx.post(at, json=complete).status_code == 500
        assert names(address) == []
        # Cut off in the middle: the header promises more than what comes.
        headers = {"X-SHA256": sha256, "Content-Length": str(len(content) * 2)}
        with pytest.raises(ConnectionAbortedError):
            httpx.put(f"{at}/a.safetensors", content=cut_off(content), headers=headers)
        assert httpx.post(at, json=complete).status_code == 500
        assert put("a.safetensors", content, sha256) == 200
        assert httpx.post(at, json={"files": complete["files"] | {"b.json": sha256}}).status_code == 500
        answers = [httpx.post(at, json=complete) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        folder = tmp_path / "theirs" / "policy-1"
        assert answers[0].json() == answers[1].json() == {"path": str(folder)}
        assert (folder / "a.safetensors").read_bytes() == content
        for name in ("weights.pkl", "weights.bin", "code.py", "..%2Fa.json", ".a.json"):
            assert put(name, content, sha256) in (400, 404), name
        assert httpx.delete(f"{address}/weights/..").status_code in (400, 404, 405)
        assert [entry.name for entry in (tmp_path / "theirs").iterdir()] == ["policy-1"]


def cut_off(content):
    yield content
    raise ConnectionAbortedError


@pytest.mark.slow
def test_a_receiver_with_a_key_refuses_everybody_else(elsewhere, policy, tokenizer, tmp_path, monkeypatch):
    with receiver(tmp_path / "theirs", key="right") as (address, _):
        for key in ("", "Bearer wrong", "right"):
            assert httpx.get(f"{address}/weights", headers={"Authorization": key}).status_code == 401
            assert httpx.delete(f"{address}/weights/policy", headers={"Authorization": key}).status_code == 401
        with pytest.raises(RolloutError, match="the weights server refuses us") as caught:
            engine_for(elsewhere[:1], [address], policy, tokenizer, tmp_path)
        assert "VLLM_API_KEY" in caught.value.fix
        assert httpx.get(f"{address}/weights", headers={"Authorization": "Bearer right"}).status_code == 200


@pytest.mark.slow
def test_without_a_key_other_machines_and_web_pages_cannot_send_weights(tmp_path):
    call = [sys.executable, "-m", "flows.cli", "weights-server", str(tmp_path / "theirs"), "--host", "0.0.0.0"]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "only with a key" in done.stderr + done.stdout
    with receiver(tmp_path / "theirs") as (address, _):
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            assert httpx.delete(f"{address}/weights/policy", headers=headers).status_code == 403


@pytest.mark.slow
def test_each_server_needs_a_receiver_and_an_absent_one_is_named(elsewhere):
    with pytest.raises(ValueError, match="one for each"):
        VllmConfig(base_urls=["http://a:1", "http://b:1"], weights_urls=["http://a:2"])
    config = small_config(base_urls=[elsewhere[0].address], weights_urls=["http://127.0.0.1:9"])
    with pytest.raises(RolloutError, match="no weights server answers") as caught:
        existing_servers(config, adapters=True)
    assert "grpo weights-server" in caught.value.fix

"""vLLM servers that are missing, lack an endpoint, die or are killed: what is restarted, what is named, and who ends what."""

import http.server
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.chat import prompt_ids
from grpo_tasks.policy.load import load_tokenizer, trainable_policy
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rollout.engine import Request, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import existing_servers, serving
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmConfig
from schemas.errors import RolloutError
from tests.rollout.servers import CONFIG, MARKS, PYTHON, ROOT, engine_on, listener, moved, sampling, served
from tests.rollout.stops import assert_stops, stop_requests, stop_settings

pytestmark = MARKS


def test_without_an_environment_the_fix_is_named(tmp_path):
    with pytest.raises(RolloutError, match="make vllm"), serving(VllmConfig(python="nowhere"), served(), tmp_path):
        pass


def test_a_server_without_an_end_point_is_named_with_its_version(tmp_path):
    (tmp_path / "v1").mkdir()
    for path, answer in (
        ("openapi.json", '{"paths": {"/v1/completions": {}}}'),
        ("version", '{"version": "0.5"}'),
        ("v1/models", '{"data": [{"id": "m"}]}'),
    ):
        (tmp_path / path).write_text(answer)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietFiles, directory=str(tmp_path))) as files:
        threading.Thread(target=files.serve_forever).start()
        config = CONFIG.model_copy(update={"base_urls": [f"http://127.0.0.1:{files.server_port}"]})
        with pytest.raises(RolloutError, match=r"vLLM 0\.5 does not offer /v1/load_lora_adapter"):
            existing_servers(config, adapters=True)
        files.shutdown()
    with pytest.raises(RolloutError, match="no vLLM server answers"):
        existing_servers(config, adapters=True)


class QuietFiles(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


STARTER = """
import sys, time
from pathlib import Path
from grpo_tasks.rollout.vllm_server import ServerModel, serving
from schemas.config.rollout import VllmConfig
from schemas.paths import resolve
served = ServerModel(Path(resolve("embedded:base")), "float32", None, False)
with serving(VllmConfig(python=sys.argv[1]), served, Path(sys.argv[2])) as [server]:
    print(server.address, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["starter", "supervisor"])
def test_a_server_with_a_killed_supervisor_ends_completely(tmp_path, victim):
    with tempfile.TemporaryDirectory(prefix="t-") as temporary:  # tmp_path is too long for sockets
        environment = os.environ | {"TMPDIR": temporary}
        starter = subprocess.Popen(
            [sys.executable, "-c", STARTER, PYTHON, tmp_path], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        address = starter.stdout.readline().strip()
        assert address, (tmp_path / "vllm.log").read_text()[-2000:]
        family = psutil.Process(starter.pid).children(recursive=True)
        assert len(family) >= 2
        assert any(path.is_socket() for path in Path(temporary).rglob("*"))
        assert "grpo_tasks.processes.serve" in " ".join(family[0].cmdline())
        (family[0] if victim == "supervisor" else starter).kill()
        _, alive = psutil.wait_procs(family[1:], timeout=30)
        assert not alive
        time.sleep(0.1)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{address}/health", timeout=2)
        starter.kill()
        starter.wait()
        assert not any(path.is_socket() for path in Path(temporary).rglob("*"))


@pytest.fixture(scope="module")
def mortal(key, tmp_path_factory, widened):
    """A server that tests kill, with a model of more tokens than the embedded one."""
    what = replace(served(), model=Path(widened.path))
    with serving(CONFIG, what, tmp_path_factory.mktemp("vllm-mortal")) as [server]:
        yield server


def policy_of(ref):
    return moved(trainable_policy(ref, ModelConfig(), device=torch.device("cpu"), seed=1), 0.02)


def test_stop_strings_with_added_tokens_mean_the_same_on_a_server(mortal, widened, tmp_path):
    policy, tokenizer = policy_of(widened), load_tokenizer(widened)
    engine = engine_on(mortal, policy, tokenizer, tmp_path)
    engine.sync()
    requests = stop_requests(tokenizer, count=48)
    free = engine.generate(requests, sampling(temperature=1.0))
    for settings in stop_settings(tokenizer, free):
        assert_stops(engine, tokenizer, requests, free, sampling(temperature=1.0, **settings))
    # Added tokens are scored by the trainer as they were sampled, those of the prompt included.
    batch = token_batch([requests[0].prompt_ids], [c.token_ids for c in free], [0] * len(free), device=torch.device("cpu"))
    scores = completion_logprobs(policy.eval(), batch, temperature=1.0)
    given = torch.tensor([logp for completion in free for logp in completion.logprobs])
    torch.testing.assert_close(scores.logps[batch.completion_mask].detach(), given, rtol=0, atol=1e-4)
    greedy = [replace(request, seed=0) for request in requests[:1]]
    for settings in stop_settings(tokenizer, free):
        ours, theirs = (
            one.generate(greedy, sampling(temperature=0.0, **settings)) for one in (LocalEngine(policy, tokenizer), engine)
        )
        assert [(c.token_ids, c.text, c.finish_reason) for c in ours] == [(c.token_ids, c.text, c.finish_reason) for c in theirs]
    engine.close()


def kill_once(server, engine, monkeypatch, after):
    """Kill the server's process once it has answered `after` requests of the batch."""
    answered, complete, lock = [], engine._complete, threading.Lock()

    def counted(*arguments):
        answer = complete(*arguments)
        with lock:
            answered.append(answer)
            if len(answered) == after:
                os.kill(listener(server.address).pid, signal.SIGKILL)
        return answer

    monkeypatch.setattr(engine, "_complete", counted)


def test_a_server_killed_in_a_rollout_changes_no_completion(mortal, widened, tmp_path, monkeypatch, capfd):
    policy, tokenizer = policy_of(widened), load_tokenizer(widened)
    remote = engine_on(mortal, policy, tokenizer, tmp_path, config=CONFIG.model_copy(update={"concurrency": 2}))
    remote.sync()
    prompt = prompt_ids(tokenizer, [{"role": "user", "content": "What is 15 + 27?"}])
    requests = [Request(prompt, completion_seed(6, k)) for k in range(24)]
    whole = remote.generate(requests, sampling())
    first = listener(mortal.address)
    kill_once(mortal, remote, monkeypatch, after=8)
    again = remote.generate(requests, sampling())
    assert [c.token_ids for c in again] == [c.token_ids for c in whole]
    assert not first.is_running()
    assert listener(mortal.address).pid != first.pid
    remote.close()


def test_a_server_that_dies_too_often_stops_the_run(mortal, widened, tmp_path, monkeypatch):
    policy, tokenizer = policy_of(widened), load_tokenizer(widened)
    remote = engine_on(mortal, policy, tokenizer, tmp_path, config=CONFIG.model_copy(update={"max_restarts": 0}))
    remote.sync()
    kill_once(mortal, remote, monkeypatch, after=1)
    requests = [Request([3, 4, 5], completion_seed(7, k)) for k in range(200)]
    with pytest.raises(RolloutError, match="no answer to") as caught:
        remote.generate(requests, sampling())
    assert caught.value.place == mortal.address
    assert "vllm.log" in caught.value.fix


@pytest.mark.timeout(1500)
def test_one_of_two_replicas_killed_in_a_batch_changes_no_completion(key, policy, tokenizer, prompts, tmp_path, monkeypatch):
    config = CONFIG.model_copy(update={"replicas": 2, "concurrency": 2})
    with serving(config, served(), tmp_path) as servers:
        engine = VllmEngine(policy, tokenizer, config, servers, weights=tmp_path / "served", dtype="float32", merged=False)
        engine.sync()
        requests = [
            Request(prompts[group % len(prompts)], completion_seed(8, group) % 2**30 + k) for group in range(24) for k in range(3)
        ]
        before = [requests_of(server) for server in servers]
        whole = [completion.token_ids for completion in engine.generate(requests, sampling())]
        assert all(requests_of(server) > count for server, count in zip(servers, before, strict=True))
        assert engine.report().figures["sampling/replicas_serving"] == 2
        first = listener(servers[0].address)
        kill_once(servers[0], engine, monkeypatch, after=6)
        assert [completion.token_ids for completion in engine.generate(requests, sampling())] == whole
        assert not first.is_running()
        report = engine.report()
        assert report.figures["sampling/replicas_serving"] == 1
        assert any("is left out" in event for event in report.events)
        # It comes back with the policy of then, and works again.
        moved(policy, 0.1)
        engine.sync()
        while len(engine.pool.serving) < 2:
            time.sleep(1)
            engine.generate(requests[:3], sampling())
        before = requests_of(servers[0])
        after = [completion.token_ids for completion in engine.generate(requests, sampling())]
        assert after != whole
        assert requests_of(servers[0]) > before
        engine.close()


def requests_of(server):
    """Completions that a server has made so far, by its own count."""
    lines = httpx.get(f"{server.address}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:request_success_total"))

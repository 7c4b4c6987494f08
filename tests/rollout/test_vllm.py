"""The vLLM engine on real servers (CPU build): the contract of the local engine, swaps, the probe, deaths, and who ends what."""

import http.server
import os
import shutil
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
import polars as pl
import psutil
import pytest
import torch

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.chat import completion_text, prompt_ids
from grpo_tasks.policy.load import load_tokenizer, trainable_policy
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rollout.engine import Request, Sampling, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.sample_table import sample_table
from grpo_tasks.rollout.spec import GREEDY, SampleSpec
from grpo_tasks.rollout.vllm_engine import VllmEngine, VllmSampler
from grpo_tasks.rollout.vllm_server import ServedModel, authorization, existing_servers, serving
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig, VllmConfig
from schemas.errors import RolloutError
from schemas.paths import resolve
from schemas.results.model import ModelRef
from tests.rollout.stops import assert_stops, stop_requests, stop_settings
from tests.web_pages import FOREIGN, status

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = Path(os.environ.get("GRPO_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM environment (make vllm)"),
]
CONFIG = VllmConfig(python=str(PYTHON))


def served(rank=16):
    return ServedModel(Path(resolve("embedded:base")), "float32", rank, cuda=False)


@pytest.fixture(scope="module", autouse=True)
def key():
    """All servers here ask for a key, those started by us too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "planted-key-of-the-tests")
        yield


@pytest.fixture(scope="module")
def lora_server(tmp_path_factory):
    with serving(CONFIG, served(), tmp_path_factory.mktemp("vllm")) as [server]:
        yield server


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory):
    """For whole weights."""
    with serving(CONFIG, served(rank=None), tmp_path_factory.mktemp("vllm-plain")) as [server]:
        yield server


@pytest.fixture(params=["adapter", "merged"])
def server(request):
    return request.getfixturevalue("plain_server" if request.param == "merged" else "lora_server")


def moved(policy, by):
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    return policy


def engine_on(server, policy, tokenizer, folder, *, merged=False, config=CONFIG):
    return VllmEngine(policy, tokenizer, config, [server], weights=folder / "served", dtype="float32", merged=merged)


@pytest.fixture
def engines(policy, tokenizer, server, request, tmp_path):
    merged = request.node.callspec.params["server"] == "merged"
    remote = engine_on(server, policy, tokenizer, tmp_path, merged=merged)
    remote.sync()
    yield {"local": LocalEngine(policy, tokenizer), "vllm": remote}
    remote.close()
    assert not (tmp_path / "served").exists()


def sampling(temperature=None, **settings):
    return Sampling.of(RolloutConfig(**{"max_completion_length": 40, **settings}), temperature=temperature)


def test_log_probs_of_sampled_tokens_are_the_trainers(engines, policy, prompts):
    requests = [Request(prompt, completion_seed(1, index) + k) for index, prompt in enumerate(prompts) for k in range(4)]
    drawn = engines["vllm"].generate(requests, sampling(temperature=0.9))
    batch = token_batch(prompts, [c.token_ids for c in drawn], [i // 4 for i in range(16)], device=torch.device("cpu"))
    scores = completion_logprobs(policy.eval(), batch, temperature=0.9)
    given = torch.tensor([logp for completion in drawn for logp in completion.logprobs])
    torch.testing.assert_close(scores.logps[batch.completion_mask].detach(), given, rtol=0, atol=1e-4)
    assert len({tuple(completion.token_ids) for completion in drawn}) > 4
    # Asked for in another order, so not as groups, each is the same again.
    again = engines["vllm"].generate(requests[::-1], sampling(temperature=0.9))
    assert [completion.token_ids for completion in again[::-1]] == [completion.token_ids for completion in drawn]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stop": ["</reasoning>"]},
        {"stop": ["</reasoning>"], "include_stop_str_in_output": False},
        {"stop": ["</answer>"]},
        {"stop": ["+ 27"], "max_completion_length": 60},
        {"stop_token_ids": [30, 31, 32, 33, 34]},
        {"max_completion_length": 3},
    ],
    ids=str,
)
def test_both_engines_give_the_same_greedy_completions(engines, prompts, settings):
    requests = [Request(prompt, index) for index, prompt in enumerate(prompts)]
    ours, theirs = (engines[name].generate(requests, sampling(temperature=0.0, **settings)) for name in ("local", "vllm"))
    for one, other in zip(ours, theirs, strict=True):
        assert (other.token_ids, other.text, other.finish_reason) == (one.token_ids, one.text, one.finish_reason)
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("name", ["local", "vllm"])
def test_a_seeded_completion_ends_at_the_stop_string_and_counts_as_whole(engines, tokenizer, prompts, name, include):
    stop = "</answer>"
    requests = [Request(prompt, completion_seed(2, index) + k) for index, prompt in enumerate(prompts) for k in range(24)]
    wanted = sampling(temperature=1.0, stop=[stop], include_stop_str_in_output=include, max_completion_length=64)
    drawn = engines[name].generate(requests, wanted)
    assert [one.token_ids for one in engines[name].generate(requests, wanted)] == [one.token_ids for one in drawn]
    stopped = 0
    for completion in drawn:
        whole = completion_text(tokenizer, completion.token_ids)
        assert len(completion.logprobs) == len(completion.token_ids)
        if stop not in whole:
            assert completion.text == whole
            continue
        stopped += 1
        assert not completion.truncated
        assert completion.text == whole[: whole.index(stop) + (len(stop) if include else 0)]
        # Nothing was sampled beyond the token that ended it.
        assert stop not in completion_text(tokenizer, completion.token_ids[:-1])
    assert stopped > 5


def test_requests_are_spread_over_servers_and_come_back_in_order(lora_server, plain_server, policy, tokenizer, prompts):
    def sampled(*servers):
        sampler = VllmSampler(tokenizer, policy.generation_config.eos_token_id, CONFIG, servers)
        requests = [Request(prompt, completion_seed(8, index) + k) for index, prompt in enumerate(prompts) for k in range(3)]
        return [completion.token_ids for completion in sampler.generate(requests, sampling(temperature=0.9))]

    # The two servers may have different weights by now, so each completion shows which server made it.
    servers = (lora_server, plain_server)
    alone, before = [sampled(server) for server in servers], [requests_of(server) for server in servers]
    wanted = [alone[index // 3 % 2][index] for index in range(3 * len(prompts))]
    assert sampled(*servers) == wanted
    assert all(requests_of(server) > count for server, count in zip(servers, before, strict=True))


def requests_of(server):
    """Completions that a server has made so far, by its own count."""
    lines = httpx.get(f"{server.address}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:request_success_total"))


def test_fifty_swaps_leave_the_server_healthy_and_one_folder(engines, policy, server, tmp_path):
    address, engine, before = server.address, engines["vllm"], None
    for swap in range(50):
        moved(policy, 0.001)
        engine.sync()
        if swap == 9:
            before = server_memory(address)
    assert httpx.get(f"{address}/health").status_code == 200
    assert len(list((tmp_path / "served").iterdir())) == 1
    assert server_memory(address) < 1.1 * before
    models = {model["id"] for model in httpx.get(f"{address}/v1/models", headers=authorization()).json()["data"]}
    assert len(models) == (1 if engine._merged else 2)


def server_memory(address):
    process = listener(address)
    return sum(part.memory_info().rss for part in [process, *process.children(recursive=True)])


def test_a_server_that_stays_with_old_weights_is_found_out(engines, policy, tmp_path, monkeypatch):
    engine = engines["vllm"]
    post, old = engine._post, str(shutil.copytree(engine._folder, tmp_path / "old"))

    def stale(server, path, body):
        if path == "/v1/load_lora_adapter":
            body = body | {"lora_path": old}
        if path == "/collective_rpc":
            body = body | {"kwargs": {"weights_path": old}}
        return post(server, path, body)

    monkeypatch.setattr(engine, "_post", stale)
    engine.sync()
    moved(policy, 0.5)
    with pytest.raises(RolloutError, match="does not serve the trainer's policy"):
        engine.sync()


def test_without_an_environment_the_fix_is_named(tmp_path):
    with pytest.raises(RolloutError, match="make vllm"), serving(VllmConfig(python="nowhere"), served(), tmp_path):
        pass


def test_an_existing_server_is_checked(lora_server):
    config = CONFIG.model_copy(update={"base_urls": [f"{lora_server.address}/"]})
    [found] = existing_servers(config, adapters=True)
    assert (found.address, found.base) == (lora_server.address, "base")


def test_an_existing_server_that_asks_for_a_key_refuses_requests_without_one(lora_server, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(RolloutError, match=r"401 Unauthorized[\s\S]*VLLM_API_KEY"):
        existing_servers(CONFIG.model_copy(update={"base_urls": [lora_server.address]}), adapters=True)


def test_an_existing_server_that_lacks_an_end_point_is_named_with_its_version(tmp_path):
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


def test_an_adapter_is_evaluated_by_a_server_as_it_is_here(lora_server, policy, tmp_path):
    policy.save_pretrained(str(tmp_path / "adapter"))
    messages = [{"role": "user", "content": "What is 15 + 27?"}]
    rows = {
        "prompt_id": [f"{number:016x}" for number in range(6)], "source": ["s"] * 6, "line": list(range(1, 7)),
        "prompt": [messages] * 6, "answer": ["42"] * 6, "prompt_tokens": [9] * 6, "extra": ["{}"] * 6,
        "answers": [None] * 6, "task": [""] * 6,
    }  # fmt: skip
    pl.DataFrame(rows).write_parquet(tmp_path / "eval.parquet")
    config = CONFIG.model_copy(update={"base_urls": [lora_server.address]})
    tables = [
        sample_table(
            SampleSpec(
                model=ModelConfig(path="embedded:base"),
                ref=ModelRef(path="embedded:base", adapter=tmp_path / "adapter"),
                prompts=tmp_path / "eval.parquet",
                max_prompts=None,
                num_samples=2,
                temperature=1.0,
                greedy=True,
                rollout=RolloutConfig(engine=engine, vllm=config, max_completion_length=40),
                resources=ResourcesConfig(device="cpu"),
                seed=5,
            ),
            tmp_path,
        )
        for engine in ("local", "vllm")
    ]
    ours, theirs = (table.filter(sample=GREEDY) for table in tables)
    assert ours.equals(theirs)
    assert tables[1].height == 18
    assert tables[1].filter(pl.col("sample") >= 0)["completion"].n_unique() > 4


STARTER = """
import sys, time
from pathlib import Path
from grpo_tasks.rollout.vllm_server import ServedModel, serving
from schemas.config.rollout import VllmConfig
from schemas.paths import resolve
served = ServedModel(Path(resolve("embedded:base")), "float32", None, False)
with serving(VllmConfig(python=sys.argv[1]), served, Path(sys.argv[2])) as [server]:
    print(server.address, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["starter", "supervisor"])
def test_a_server_whose_starter_or_supervisor_is_killed_ends_with_everything_it_started(tmp_path, victim):
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
        assert "server_supervisor" in " ".join(family[0].cmdline())
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
def mortal(tmp_path_factory, widened):
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


def test_a_server_killed_in_a_rollout_is_started_again_and_the_same_completions_come(
    mortal, widened, tmp_path, monkeypatch, capfd
):
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


def test_a_server_that_dies_too_often_stops_the_run_with_its_log_named(mortal, widened, tmp_path, monkeypatch):
    policy, tokenizer = policy_of(widened), load_tokenizer(widened)
    remote = engine_on(mortal, policy, tokenizer, tmp_path, config=CONFIG.model_copy(update={"max_restarts": 0}))
    remote.sync()
    kill_once(mortal, remote, monkeypatch, after=1)
    requests = [Request([3, 4, 5], completion_seed(7, k)) for k in range(200)]
    with pytest.raises(RolloutError, match="no answer to") as caught:
        remote.generate(requests, sampling())
    assert caught.value.place == mortal.address
    assert "vllm.log" in caught.value.fix


def listener(address):
    port = int(address.rpartition(":")[2])
    [pid] = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"}
    return psutil.Process(pid)


@pytest.mark.parametrize("page", FOREIGN)
def test_a_server_started_here_refuses_web_pages_also_where_vllm_asks_for_no_key(lora_server, page):
    for path in ("/reset_prefix_cache", "/collective_rpc", "/v1/completions"):
        assert status(lora_server.address + path, FOREIGN[page] | authorization(), "POST", {"method": "none"}) == 403
    assert status(lora_server.address + "/v1/models", FOREIGN[page] | authorization()) == 403
    assert status(lora_server.address + "/reset_prefix_cache", {}, "POST", {}) == 200

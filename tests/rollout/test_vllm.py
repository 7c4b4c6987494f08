"""The vLLM engine on real servers (CPU build): the contract of the local engine, swaps, keys, and deaths."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import polars as pl
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.load import load_tokenizer, trainable_policy
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rollout.engine import Request, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.sample_table import sample_table
from grpo_tasks.rollout.spec import SampleSpec
from grpo_tasks.rollout.vllm_server import OwnServer, VllmServer, authorization, existing_servers, serving
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import RolloutError
from schemas.prompts import GREEDY
from schemas.results.model import ModelRef
from tests.rollout.counting import six_starts
from tests.rollout.identity import assert_exact
from tests.rollout.servers import CONFIG, MARKS, engine_on, listener, moved, sampling, served
from tests.rollout.stops import assert_stops, stop_requests, stop_settings
from tests.web_pages import FOREIGN, status

pytestmark = MARKS


@pytest.fixture(scope="module")
def lora_server(key, tmp_path_factory):
    """On another address than the loopback one, as for other machines, with room for the adapters of two processes."""
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    server = OwnServer(CONFIG, replace(served(), num_adapters=2), log, host="127.0.0.2")
    try:
        server.start()
        yield server
    finally:
        server.end()


@pytest.fixture(scope="module")
def plain_server(key, tmp_path_factory):
    """For whole weights."""
    with serving(CONFIG, served(rank=None), tmp_path_factory.mktemp("vllm-plain")) as [server]:
        yield server


@pytest.fixture(scope="module")
def mortal(key, tmp_path_factory, widened):
    """A server that tests kill, with a model of more tokens than the embedded one."""
    what = replace(served(), model=Path(widened.path))
    with serving(CONFIG, what, tmp_path_factory.mktemp("vllm-mortal")) as [server]:
        yield server


@pytest.fixture(params=["adapter", "merged"])
def server(request):
    return request.getfixturevalue("plain_server" if request.param == "merged" else "lora_server")


@pytest.fixture
def engines(policy, tokenizer, server, request, tmp_path):
    merged = request.node.callspec.params["server"] == "merged"
    remote = engine_on(server, policy, tokenizer, tmp_path, merged=merged)
    remote.sync()
    yield {"local": LocalEngine(policy, tokenizer), "vllm": remote}
    remote.close()
    assert not (tmp_path / "served").exists()


def shown(completions):
    return [(one.token_ids, one.text, one.finish_reason) for one in completions]


@pytest.mark.parametrize("server", [pytest.param("adapter", marks=pytest.mark.ci), "merged"], indirect=True)
def test_five_turns_continue_from_the_exact_tokens_so_far(engines, policy, tokenizer):
    assert_exact(engines["vllm"], policy, tokenizer, six_starts())


@pytest.mark.parametrize(
    "settings",
    [
        {"stop": ["</reasoning>"], "include_stop_str_in_output": False},
        {"stop": ["+ 27"], "max_completion_length": 60},
        {"stop_token_ids": [30, 31, 32, 33, 34]},
        {"max_completion_length": 3},
        {"repetition_penalty": 1.25, "min_p": 0.2},
    ],
    ids=str,
)
def test_both_engines_give_the_same_greedy_completions(engines, prompts, settings):
    requests = [Request(prompt, index) for index, prompt in enumerate(prompts)]
    ours, theirs = (engines[name].generate(requests, sampling(temperature=0.0, **settings)) for name in ("local", "vllm"))
    assert shown(theirs) == shown(ours)
    for one, other in zip(ours, theirs, strict=True):
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3)


def test_penalty_and_min_p_draw_from_the_distribution_of_transformers(engines, policy, prompts):
    requests = [Request(prompt, completion_seed(9, index) + k) for index, prompt in enumerate(prompts) for k in range(3)]
    settings = sampling(temperature=0.9, min_p=0.1, repetition_penalty=1.3, max_completion_length=20)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.9), MinPLogitsWarper(0.1)])
    for request, drawn in zip(requests, engines["vllm"].generate(requests, settings), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *drawn.token_ids]])
        with torch.no_grad():
            logits = policy.eval()(ids).logits[0]
        for index, (token, logp) in enumerate(zip(drawn.token_ids, drawn.logprobs, strict=True)):
            last = len(request.prompt_ids) + index
            wanted = processors(ids[:, :last], logits[last - 1 : last].clone()).log_softmax(-1)[0, token].item()
            assert logp == pytest.approx(wanted, abs=1e-3)
        assert drawn.policy_logprobs is None


def test_thirty_swaps_leave_the_server_healthy_and_one_folder(engines, policy, server, tmp_path):
    address, engine, before = server.address, engines["vllm"], None
    for swap in range(30):
        moved(policy, 0.001)
        engine.sync()
        if swap == 9:
            before = server_memory(address)
    assert httpx.get(f"{address}/health").status_code == 200
    # The policy and, for a server that is restarted, the calibration.
    assert len(list((tmp_path / "served").iterdir())) == 2
    assert server_memory(address) < 1.1 * before
    models = {model["id"] for model in httpx.get(f"{address}/v1/models", headers=authorization()).json()["data"]}
    assert len(models) == (1 if engine._merged else 2)


def server_memory(address):
    process = listener(address)
    return sum(part.memory_info().rss for part in [process, *process.children(recursive=True)])


def test_an_adapter_is_evaluated_by_a_server_as_it_is_here(lora_server, policy, tmp_path):
    policy.save_pretrained(str(tmp_path / "adapter"))
    rows = {
        "prompt_id": [f"{number:016x}" for number in range(6)], "source": ["s"] * 6, "line": list(range(1, 7)),
        "prompt": [[{"role": "user", "content": "What is 15 + 27?"}]] * 6, "answer": ["42"] * 6, "prompt_tokens": [9] * 6,
        "extra": ["{}"] * 6, "answers": [None] * 6, "task": [""] * 6,
    }  # fmt: skip
    pl.DataFrame(rows).write_parquet(tmp_path / "eval.parquet")
    config = CONFIG.model_copy(update={"base_urls": [lora_server.address]})
    spec = SampleSpec(
        model=ModelConfig(path="embedded:base"),
        ref=ModelRef(path="embedded:base", adapter=tmp_path / "adapter"),
        prompts=tmp_path / "eval.parquet",
        num_samples=2,
        greedy=True,
        rollout=RolloutConfig(vllm=config, max_completion_length=40),
        resources=ResourcesConfig(device="cpu"),
        seed=5,
    )
    remote = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"engine": "vllm"})})
    ours, theirs = (sample_table(each, tmp_path) for each in (spec, remote))
    assert ours.filter(sample=GREEDY).equals(theirs.filter(sample=GREEDY))
    assert theirs.height == 18
    assert theirs.filter(pl.col("sample") >= 0)["completion"].n_unique() > 4


@pytest.mark.parametrize("page", FOREIGN)
def test_a_server_started_here_refuses_web_pages_without_a_key(plain_server, page):
    for path in ("/reset_prefix_cache", "/collective_rpc", "/v1/completions"):
        assert status(plain_server.address + path, FOREIGN[page] | authorization(), "POST", {"method": "none"}) == 403
    assert status(plain_server.address + "/v1/models", FOREIGN[page] | authorization()) == 403
    assert status(plain_server.address + "/reset_prefix_cache", {}, "POST", {}) == 200


def test_a_server_that_loads_adapters_has_no_path_that_replaces_its_weights(lora_server):
    for path in ("/collective_rpc", "/reset_prefix_cache", "/sleep"):
        assert status(lora_server.address + path, authorization(), "POST", {"method": "none"}) == 404


def test_a_server_on_a_network_wants_the_key_on_every_path(lora_server, monkeypatch):
    paths = ("/v1/load_lora_adapter", "/collective_rpc", "/reset_prefix_cache", "/sleep", "/metrics", "/openapi.json")
    for path in paths:
        assert status(lora_server.address + path, {}, "POST", {"method": "none"}) == 401
        assert status(lora_server.address + path, {"Authorization": "Bearer wrong"}) == 401
    assert status(lora_server.address + "/health", {}) == 200
    config = CONFIG.model_copy(update={"base_urls": [f"{lora_server.address}/"]})
    [found] = existing_servers(config, adapters=True)
    assert (found.address, found.base) == (lora_server.address, "base")
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(RolloutError, match=r"401 Unauthorized[\s\S]*VLLM_API_KEY"):
        existing_servers(config, adapters=True)


def test_a_prompt_that_the_server_has_no_room_for_names_the_setting(plain_server, policy, tokenizer, prompts, tmp_path):
    engine = engine_on(plain_server, policy, tokenizer, tmp_path, merged=True)
    engine.sync()
    with pytest.raises(RolloutError, match="maximum context length is 2048 tokens") as refused:
        engine.generate([Request(prompts[0] * 200, 1)], sampling())
    assert "rollout.vllm.max_model_len" in refused.value.fix


def test_adapters_of_two_processes_are_sampled_in_the_same_batch(lora_server, policy, tokenizer, prompts, tmp_path):
    requests = [[Request(prompts[0], completion_seed(rank, 0) + k) for k in range(64)] for rank in range(2)]
    # What a process that trains does: an engine and an adapter of its own for the server that they share.
    shares = [VllmServer(lora_server.address) for _ in requests]
    engines = [engine_on(share, policy, tokenizer, tmp_path / str(rank)) for rank, share in enumerate(shares)]
    for engine in engines:
        engine.sync()
    long = sampling(max_completion_length=400, stop_token_ids=[], temperature=2.0)
    began = threading.Event()

    def first():
        began.set()
        engines[0].generate(requests[0], long)
        return time.monotonic()

    with ThreadPoolExecutor(1) as thread:
        busy = thread.submit(first)
        began.wait()
        time.sleep(0.3)
        engines[1].generate(requests[1], sampling(max_completion_length=2))
        answered = time.monotonic()
        assert answered < busy.result()
    for engine in engines:
        engine.close()


@pytest.fixture
def widened_engine(mortal, widened, tmp_path):
    policy, tokenizer = trainable_policy(widened, ModelConfig(), device=torch.device("cpu"), seed=1), load_tokenizer(widened)

    def make(**settings):
        config = CONFIG.model_copy(update=settings)
        engine = engine_on(mortal, moved(policy, 0.02), tokenizer, tmp_path, config=config)
        engine.sync()
        return engine, policy, tokenizer

    return make


def test_stop_strings_with_added_tokens_mean_the_same_on_a_server(widened_engine):
    engine, policy, tokenizer = widened_engine()
    requests = stop_requests(tokenizer, count=48)
    free = engine.generate(requests, sampling(temperature=1.0))
    # Asked for in another order, so not as a group, each is the same again.
    assert shown(engine.generate(requests[::-1], sampling(temperature=1.0))[::-1]) == shown(free)
    # Added tokens are scored by the trainer as they were sampled, those of the prompt included.
    prompts = [request.prompt_ids for request in requests]
    batch = token_batch(prompts, [c.token_ids for c in free], range(len(free)), device=torch.device("cpu"))
    scores = completion_logprobs(policy.eval(), batch, temperature=1.0)
    given = torch.tensor([logp for completion in free for logp in completion.logprobs])
    torch.testing.assert_close(scores.logps[batch.completion_mask].detach(), given, rtol=0, atol=1e-4)
    greedy, local = [replace(requests[0], seed=0)], LocalEngine(policy, tokenizer)
    for settings in stop_settings(tokenizer, free):
        assert_stops(engine, tokenizer, requests, free, sampling(temperature=1.0, **settings))
        ours, theirs = (one.generate(greedy, sampling(temperature=0.0, **settings)) for one in (local, engine))
        assert shown(ours) == shown(theirs)
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


def test_a_server_killed_in_a_rollout_changes_no_completion(mortal, widened_engine, monkeypatch):
    engine, _, tokenizer = widened_engine(concurrency=2)
    prompt = prompt_ids(tokenizer, [{"role": "user", "content": "What is 15 + 27?"}])
    requests = [Request(prompt, completion_seed(6, k)) for k in range(24)]
    whole = engine.generate(requests, sampling())
    first = listener(mortal.address)
    kill_once(mortal, engine, monkeypatch, after=8)
    assert shown(engine.generate(requests, sampling())) == shown(whole)
    assert not first.is_running()
    assert listener(mortal.address).pid != first.pid
    engine.close()

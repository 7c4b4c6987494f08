"""The vLLM engine on real servers (CPU build): the contract of the local engine, swaps, the probe, and existing servers."""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import polars as pl
import pytest
import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.chat import completion_text
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
from tests.web_pages import FOREIGN, status

pytestmark = MARKS


@pytest.fixture(scope="module")
def lora_server(key, tmp_path_factory):
    with serving(CONFIG, served(), tmp_path_factory.mktemp("vllm")) as [server]:
        yield server


@pytest.fixture(scope="module")
def plain_server(key, tmp_path_factory):
    """For whole weights."""
    with serving(CONFIG, served(rank=None), tmp_path_factory.mktemp("vllm-plain")) as [server]:
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


@pytest.mark.parametrize("server", [pytest.param("adapter", marks=pytest.mark.ci), "merged"], indirect=True)
def test_five_turns_continue_from_the_exact_tokens_so_far(engines, policy, tokenizer):
    assert_exact(engines["vllm"], policy, tokenizer, six_starts())


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
        {"repetition_penalty": 1.25, "min_p": 0.2},
    ],
    ids=str,
)
def test_both_engines_give_the_same_greedy_completions(engines, prompts, settings):
    requests = [Request(prompt, index) for index, prompt in enumerate(prompts)]
    ours, theirs = (engines[name].generate(requests, sampling(temperature=0.0, **settings)) for name in ("local", "vllm"))
    for one, other in zip(ours, theirs, strict=True):
        assert (other.token_ids, other.text, other.finish_reason) == (one.token_ids, one.text, one.finish_reason)
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-3)


@pytest.mark.parametrize("name", ["local", "vllm"])
def test_penalty_and_min_p_draw_from_the_distribution_of_transformers(engines, policy, prompts, name):
    requests = [Request(prompt, completion_seed(9, index) + k) for index, prompt in enumerate(prompts) for k in range(3)]
    settings = sampling(temperature=0.9, min_p=0.1, repetition_penalty=1.3, max_completion_length=20)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.9), MinPLogitsWarper(0.1)])
    for request, drawn in zip(requests, engines[name].generate(requests, settings), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *drawn.token_ids]])
        with torch.no_grad():
            logits = policy.eval()(ids).logits[0]
        for index, (token, logp) in enumerate(zip(drawn.token_ids, drawn.logprobs, strict=True)):
            last = len(request.prompt_ids) + index
            wanted = processors(ids[:, :last], logits[last - 1 : last].clone()).log_softmax(-1)[0, token].item()
            assert logp == pytest.approx(wanted, abs=1e-3)
        assert (drawn.policy_logprobs is None) == (name == "vllm")


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


def test_fifty_swaps_leave_the_server_healthy_and_one_folder(engines, policy, server, tmp_path):
    address, engine, before = server.address, engines["vllm"], None
    for swap in range(50):
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


def test_a_server_that_stays_with_old_weights_is_found_out(engines, policy, tmp_path, monkeypatch):
    engine = engines["vllm"]
    post, old = engine._post, str(shutil.copytree(engine._present.folder, tmp_path / "old"))

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


def test_an_existing_server_is_checked(lora_server):
    config = CONFIG.model_copy(update={"base_urls": [f"{lora_server.address}/"]})
    [found] = existing_servers(config, adapters=True)
    assert (found.address, found.base) == (lora_server.address, "base")


def test_an_existing_server_that_asks_for_a_key_refuses_requests_without_one(lora_server, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(RolloutError, match=r"401 Unauthorized[\s\S]*VLLM_API_KEY"):
        existing_servers(CONFIG.model_copy(update={"base_urls": [lora_server.address]}), adapters=True)


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


@pytest.mark.parametrize("page", FOREIGN)
def test_a_server_started_here_refuses_web_pages_without_a_key(plain_server, page):
    for path in ("/reset_prefix_cache", "/collective_rpc", "/v1/completions"):
        assert status(plain_server.address + path, FOREIGN[page] | authorization(), "POST", {"method": "none"}) == 403
    assert status(plain_server.address + "/v1/models", FOREIGN[page] | authorization()) == 403
    assert status(plain_server.address + "/reset_prefix_cache", {}, "POST", {}) == 200


def test_a_server_that_loads_adapters_has_no_path_that_replaces_its_weights(lora_server):
    for path in ("/collective_rpc", "/reset_prefix_cache", "/sleep"):
        assert status(lora_server.address + path, authorization(), "POST", {"method": "none"}) == 404


@pytest.mark.parametrize("rank", [16, None], ids=["adapter", "weights"])
def test_a_server_on_a_network_wants_the_key_on_every_path(key, tmp_path, rank):
    server = OwnServer(CONFIG, served(rank), tmp_path / "vllm.log", host="127.0.0.2")
    server.start()
    try:
        paths = ("/v1/load_lora_adapter", "/collective_rpc", "/reset_prefix_cache", "/sleep", "/metrics", "/openapi.json")
        for path in paths:
            assert status(server.address + path, {}, "POST", {"method": "none"}) == 401
            assert status(server.address + path, {"Authorization": "Bearer wrong"}) == 401
        assert status(server.address + "/health", {}) == 200
        [found] = existing_servers(CONFIG.model_copy(update={"base_urls": [server.address]}), adapters=rank is not None)
        assert found.base == "base"
    finally:
        server.end()


def test_adapters_of_two_processes_are_sampled_in_the_same_batch(key, policy, tokenizer, prompts, tmp_path):
    requests = [[Request(prompts[0], completion_seed(rank, 0) + k) for k in range(64)] for rank in range(2)]
    with serving(CONFIG, replace(served(), num_adapters=2), tmp_path) as [server]:
        # What a process that trains does: an engine and an adapter of its own for the server that they share.
        shares = [VllmServer(server.address) for _ in requests]
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

"""How servers are started: room for adapters, cards, open paths; and what they may lack."""

import http.server
import json
import os
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.policy.load import pick_device, trainable_policy
from grpo_tasks.rollout.engine import EngineReport
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import (
    Client,
    OwnServer,
    command,
    existing_servers,
    has_recurrent_layers,
    replica_devices,
    serving,
    swaps_merged_weights,
)
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import VllmConfig
from schemas.errors import Notice, RolloutError
from schemas.metrics import POLICY_LAG, QUEUE_DEPTH, REPLICAS_SERVING, SYNC_BYTES, SYNC_TIME
from tests.rollout.servers import counts, served, small_servers
from tests.zoo.build import config
from tests.zoo.kinds import ZOO


def flags(what, address="http://127.0.0.1:8000"):
    return command(VllmConfig(python="python"), what, address, recurrent=has_recurrent_layers(what))


@pytest.mark.parametrize("processes", [1, 3])
def test_a_server_has_room_for_current_and_next_adapters(processes):
    found = flags(replace(served(), num_adapters=processes))
    room = [found[found.index(flag) + 1] for flag in ("--max-loras", "--max-cpu-loras")]
    assert room == [str(processes), str(2 * processes)]


def test_only_a_server_open_to_others_wants_keys_everywhere():
    assert flags(served()).count("--middleware") == 1
    found = flags(served(), "http://10.0.0.7:8000")
    guards = [found[at + 1] for at, flag in enumerate(found) if flag == "--middleware"]
    assert guards == ["request_guard.SameOrigin", "request_guard.BearerKey"]


@pytest.mark.parametrize(
    ("kind", "states"),
    [("bamba", True), ("lfm2", True), ("nemotron_h", True), ("qwen3_5_text", True), ("gemma3_text", False), ("llama", False)],
)
def test_vllm_caches_no_prompts_of_recurrent_layers_on_a_cpu(tmp_path, kind, states):
    # vLLM stops there: "Chunked prefill is required for mamba cache mode 'align'".
    config(*ZOO[kind]).save_pretrained(tmp_path)
    assert ("--no-enable-prefix-caching" in flags(replace(served(), model=tmp_path))) == states
    assert "--no-enable-prefix-caching" not in flags(replace(served(), model=tmp_path, cuda=True))


@pytest.mark.parametrize(
    ("reach", "asked", "longest", "batch"),
    [(2048, None, 2048, 4096), (8192, None, 4096, 4096), (8192, 512, 512, 4096), (8192, 6000, 6000, 6000)],
)
def test_a_batch_on_a_cpu_holds_the_longest_prompt(tmp_path, reach, asked, longest, batch):
    # vLLM refuses others: "max_num_batched_tokens (4096) is smaller than max_model_len (8192)".
    kind, changes = ZOO["llama"]
    config(kind, changes | {"max_position_embeddings": reach}).save_pretrained(tmp_path)
    server = VllmConfig(python="python", max_model_len=asked)
    found = command(server, replace(served(), model=tmp_path), "http://127.0.0.1:8000", recurrent=False)
    sizes = [found[found.index(flag) + 1] for flag in ("--max-model-len", "--max-num-batched-tokens")]
    assert sizes == [str(longest), str(batch)]


@pytest.mark.usefixtures("small")
def test_servers_start_without_changing_torchs_dtype_for_other_threads(tmp_path, monkeypatch):
    # Two threads that build a model at once can leave its dtype behind as the default of the process.
    changed_by = []
    monkeypatch.setattr(torch, "set_default_dtype", lambda _: changed_by.append(threading.current_thread()))
    with small_servers(tmp_path, replicas=2) as servers:
        assert changed_by
        with ThreadPoolExecutor(1) as rollout:
            rollout.submit(servers[0].restart).result()
    assert set(changed_by) == {threading.main_thread()}


@pytest.mark.long
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("rank", "opens"), [(16, False), (None, True)], ids=["adapter", "weights"])
def test_the_paths_that_replace_weights_are_open_only_where_weights_are_replaced(tmp_path, monkeypatch, rank, opens):
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    with small_servers(tmp_path, rank=rank) as [server]:
        assert counts(server)["dev_mode"] == opens


PRINTS_ITS_ENVIRONMENT = """
import http.server, json, os, sys

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

print(json.dumps(dict(os.environ)), flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


def test_a_server_gets_no_setting_of_the_trainers_allocator_or_process_group(tmp_path, monkeypatch):
    program = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    program.parent.mkdir(parents=True)
    program.write_text(PRINTS_ITS_ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    pick_device(ResourcesConfig(device="cpu"))
    assert "CUBLAS_WORKSPACE_CONFIG" in os.environ
    # Those of a user and of torchrun.
    memory = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"]
    group = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"]
    for name in [*memory, *group, "NCCL_DEBUG"]:
        monkeypatch.setenv(name, "1")
    with serving(VllmConfig(python=sys.executable), served(), tmp_path):
        found = json.loads((tmp_path / "vllm.log").read_text())
    assert not found.keys() & {"CUBLAS_WORKSPACE_CONFIG", *memory, *group}
    assert (found["NCCL_DEBUG"], found["PATH"]) == ("1", os.environ["PATH"])


def test_a_server_knows_whether_it_has_the_card_of_the_trainer(tmp_path, monkeypatch):
    def beside(device, **settings):
        return OwnServer(VllmConfig(), replace(served(), **{"cuda": True} | settings), tmp_path / "log", device).on_trainers_card

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [beside(device) for device in (None, "0", "1", "2,0", "10")] == [True, True, False, True, False]
    assert not beside(None, cuda=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert [beside(device) for device in (None, "0", "4", "5")] == [True, False, True, False]


def test_without_devices_servers_get_the_cards_behind_the_trainers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    assert replica_devices(VllmConfig(replicas=2, tensor_parallel_size=2), cuda=True) == ["5,6", "7,8"]
    assert replica_devices(VllmConfig(replicas=5), cuda=True) == ["4", "5", "6", "7", "8"]
    assert replica_devices(VllmConfig(replicas=3), cuda=False) == [None] * 3
    assert replica_devices(VllmConfig(), cuda=True) == [None]
    with pytest.raises(RolloutError, match="need 6 cards") as caught:
        replica_devices(VllmConfig(replicas=6), cuda=True)
    assert "rollout.vllm.devices" in caught.value.fix


def test_without_an_environment_the_fix_is_named(tmp_path):
    with pytest.raises(RolloutError, match="make vllm"), serving(VllmConfig(python="nowhere"), served(), tmp_path):
        pass


def test_a_server_without_an_end_point_is_named_with_its_version(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "openapi.json").write_text('{"paths": {"/v1/completions": {}}}')
    (tmp_path / "version").write_text('{"version": "0.5"}')
    (tmp_path / "v1" / "models").write_text('{"data": [{"id": "m"}]}')

    class QuietFiles(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietFiles, directory=str(tmp_path))) as files:
        threading.Thread(target=files.serve_forever).start()
        config = VllmConfig(base_urls=[f"http://127.0.0.1:{files.server_port}"])
        with pytest.raises(RolloutError, match=r"vLLM 0\.5 does not offer /v1/load_lora_adapter"):
            existing_servers(config, adapters=True)
        files.shutdown()
    with pytest.raises(RolloutError, match="no vLLM server answers"):
        existing_servers(config, adapters=True)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.floats(-50, 0, width=32), max_size=50))
def test_the_numbers_of_an_answer_are_those_of_json(values):
    text = json.dumps({"choices": [{"logprobs": {"token_logprobs": values}, "token_ids": list(range(len(values)))}]})
    answers = httpx.MockTransport(lambda _: httpx.Response(200, text=text, headers={"content-type": "application/json"}))
    client = Client({}, timeout_s=1.0, retries=0)
    client._client = httpx.Client(transport=answers)
    found = client.post("http://server", "/v1/completions", {})
    # As text, in which -0.0 is not 0.0; and an integer stays one.
    assert repr(found) == repr(json.loads(text))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "merged"), [("float32", True), ("bfloat16", False), ("float16", False)])
def test_a_small_update_is_not_rounded_away_for_a_server(base_ref, tokenizer, tmp_path, dtype, merged):
    """What 16 bits leave of a small update is measured in tests/policy/test_folded_adapter.py."""
    model = ModelConfig(dtype=dtype)
    assert swaps_merged_weights(VllmConfig(), model, cuda=False) is merged
    assert swaps_merged_weights(VllmConfig(sync="merged"), model, cuda=False)
    for lora, fix in ((model.lora, "rollout.vllm.sync: adapter"), (None, "model.dtype: float32")):
        config = ModelConfig(dtype=dtype, lora=lora)
        policy = trainable_policy(base_ref, config, device=torch.device("cpu"), seed=1)
        with warnings.catch_warnings(record=True, action="always") as said:
            VllmEngine(policy, tokenizer, VllmConfig(), [], weights=tmp_path / "served", dtype=dtype, merged=True, untied=True)
        assert [one.category for one in said] == ([] if merged else [Notice])
        assert all(f"merged weights in {dtype}" in str(one.message) and fix in str(one.message) for one in said)


def test_the_report_on_all_ranks_adds_up_and_loses_nothing():
    first = {"replica/0/tokens_per_s": 10.0, QUEUE_DEPTH: 2.0, SYNC_BYTES: 100.0, SYNC_TIME: 0.5, REPLICAS_SERVING: 2.0}
    other = {"replica/0/tokens_per_s": 5.0, QUEUE_DEPTH: 1.0, SYNC_BYTES: 100.0, SYNC_TIME: 0.9, REPLICAS_SERVING: 1.0}
    reports = [EngineReport(first | {POLICY_LAG: 1.0}, ("gone",)), EngineReport(other | {POLICY_LAG: 1.0}, ("gone", "back"))]
    both = EngineReport.of_ranks(reports)
    summed = {"replica/0/tokens_per_s": 15.0, QUEUE_DEPTH: 3.0, SYNC_BYTES: 200.0}
    assert both.figures == summed | {SYNC_TIME: 0.9, REPLICAS_SERVING: 1.0, POLICY_LAG: 1.0}
    assert both.events == ("gone", "back")
    assert EngineReport.of_ranks(reports[:1]) == reports[0]

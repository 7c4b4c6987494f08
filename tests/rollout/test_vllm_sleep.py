"""`rollout.vllm.sleep`: what the engine requests from a server, and what the trainer still holds when the server wakes up.

There is no GPU here, so the server is a small one of our own. It answers as vLLM does and loads the adapters that it receives.
"""

import gc
import json
import threading
import weakref
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from grpo_tasks.policy.load import load_base
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import VllmServer
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmConfig
from schemas.errors import ServerGoneError

LOAD, UNLOAD, PROBE, WAKE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions", "/wake_up"
CALIBRATE = [PROBE, LOAD, PROBE, UNLOAD]
"""Base, and calibration adapter: once for each start of a server."""


class Served(ThreadingHTTPServer):
    """Serves the embedded model."""

    def __init__(self, base_ref):
        super().__init__(("127.0.0.1", 0), Answers)
        self.base_ref, self.paths, self.adapters = base_ref, [], {}
        self.seen, self.faults = [], 0
        self.look = lambda: None
        """Called when the server receives the request to wake up; returns the state of the trainer."""

    def logprobs(self, adapter, ids):
        model = load_base(self.base_ref, ModelConfig(), device=torch.device("cpu"))
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter).eval()
        with torch.no_grad():
            logps = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), dim=-1)
        return [None, *({str(token): {"logprob": logps[at, token].item()}} for at, token in enumerate(ids[1:]))]


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.append(self.path)
        if self.path == WAKE:
            self.server.seen.append(self.server.look())
            if self.server.faults:
                self.server.faults -= 1
                self.answer(500, {"error": "CUDA out of memory"})
                return
        if self.path == LOAD:
            self.server.adapters[body["lora_name"]] = body["lora_path"]
        if self.path != PROBE:
            self.answer(200, {})
            return
        logprobs = self.server.logprobs(self.server.adapters.get(body["model"]), body["prompt"])
        self.answer(200, {"choices": [{"prompt_logprobs": logprobs}]})

    def answer(self, code, body):
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(base_ref):
    with Served(base_ref) as found:
        threading.Thread(target=found.serve_forever).start()
        yield found
        found.shutdown()


def engine_on(server, policy, tokenizer, tmp_path, *, sleep=True):
    config, found = VllmConfig(sleep=sleep, max_restarts=1), VllmServer(f"http://127.0.0.1:{server.server_port}")
    return VllmEngine(policy, tokenizer, config, [found], weights=tmp_path / "served", dtype="float32", merged=False)


def update(policy):
    """What an update leaves: gradients, moved weights, and an activation in a cycle of references, which nothing but gc frees."""
    policy(input_ids=torch.tensor([[3, 4, 5]])).logits.sum().backward()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.01)
    cycle = [torch.zeros(1)]
    cycle.append(cycle)
    return weakref.ref(cycle[0])


def held(policy, activation):
    """(gradients, activations) that the trainer holds."""
    return sum(parameter.grad is not None for parameter in policy.parameters()), activation() is not None


@pytest.mark.slow
def test_the_trainer_gives_up_all_it_can_before_the_server_wakes_up(server, policy, tokenizer, tmp_path, monkeypatch):
    engine, freed = engine_on(server, policy, tokenizer, tmp_path), []
    engine.sync()
    engine.sleep()
    gc.disable()
    try:
        activation = update(policy)
        assert held(policy, activation) == (len([p for p in policy.parameters() if p.requires_grad]), True)
        # The one thing that cannot be seen without a card: whether torch's blocks went, and that after what was in them.
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(held(policy, activation)))
        server.look = lambda: (held(policy, activation), list(freed), len(list((tmp_path / "served").iterdir())))
        engine.sync()
    finally:
        gc.enable()
    nothing = (0, False)
    assert server.seen == [(nothing, [nothing], 3)]
    # The new weights are loaded and probed by a server that is awake, and the old ones forgotten last.
    assert server.paths == [*CALIBRATE, LOAD, PROBE, "/sleep?level=1", WAKE, LOAD, PROBE, UNLOAD]
    assert [Path(folder).exists() for folder in server.adapters.values()] == [True, False, True]
    engine.close()


@pytest.mark.slow
def test_a_server_is_left_awake(server, policy, tokenizer, tmp_path):
    engine = engine_on(server, policy, tokenizer, tmp_path)
    engine.sync()
    engine.sleep()
    engine.close()
    assert server.paths == [*CALIBRATE, LOAD, PROBE, "/sleep?level=1", WAKE, UNLOAD]


@pytest.mark.slow
def test_waking_up_is_tried_again_as_often_as_servers_are_started_again(server, policy, tokenizer, tmp_path):
    engine = engine_on(server, policy, tokenizer, tmp_path)
    engine.sync()
    engine.sleep()
    server.faults = 1
    engine.sync()
    assert server.paths.count(WAKE) == 2
    engine.sleep()
    server.faults = 1
    with pytest.raises(ServerGoneError, match="out of memory"):
        engine.sync()
    engine.close()


def test_without_sleep_no_server_sleeps_or_wakes_up(server, policy, tokenizer, tmp_path):
    engine = engine_on(server, policy, tokenizer, tmp_path, sleep=False)
    for _ in range(2):
        engine.sync()
        engine.sleep()
    policy(input_ids=torch.tensor([[3, 4, 5]])).logits.sum().backward()
    engine.sync()
    assert any(parameter.grad is not None for parameter in policy.parameters())
    engine.close()
    assert set(server.paths) == {LOAD, PROBE, UNLOAD}

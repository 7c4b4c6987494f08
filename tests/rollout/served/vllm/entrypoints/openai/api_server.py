"""A small server that speaks the part of vLLM's API that the engine uses, with our local engine behind it.

Found as `vllm` by the servers that tests start with this folder in PYTHONPATH: in 3 s instead of 45 s, and in 0.5 GB. It samples
from real weights with real adapters, one completion per seed, as vLLM does. POST /test changes how it behaves: `delay_s` of every
completion, `status` of every answer to a request for completions, `count` to restrict that to so many of them, `no_memory` for
failures to wake up, `instead` to load the weights of this folder whatever is sent, or none with "nothing", as vLLM does with keys
that match nothing. The environment's TEST_INSTEAD is `instead` from the start.
"""

import argparse
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from grpo_tasks.policy.load import load_tokenizer
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from schemas.results.model import ModelRef


class Server(ThreadingHTTPServer):
    """Holds the models by name; one request at a time computes."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, host, port, model):
        super().__init__((host, port), Handler)
        self.path, self.lock = model, threading.Lock()
        self.tokenizer = load_tokenizer(ModelRef(path=model))
        self.adapters, self.counts = {}, {"requests": 0, "running": 0, "most": 0}
        self.test = {"delay_s": 0.0, "status": 200, "count": None, "instead": None, "no_memory": 0}
        self.models = {"base": self.read(model)}
        self.test["instead"] = os.environ.get("TEST_INSTEAD")

    def read(self, folder, adapter=None):
        if self.test["instead"] == "nothing":
            return self.models["base"]
        if self.test["instead"]:
            folder, adapter = (folder, self.test["instead"]) if adapter else (self.test["instead"], None)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()

    def completions(self, body):
        model = self.models[body["model"]]
        if "prompt_logprobs" in body:
            with torch.no_grad():
                logps = model(input_ids=torch.tensor([body["prompt"]])).logits[0].float().log_softmax(-1)
            entries = [{str(token): {"logprob": logps[at, token].item()}} for at, token in enumerate(body["prompt"][1:])]
            return {"choices": [{"prompt_logprobs": [None, *entries]}]}
        sampling = Sampling(
            body["temperature"], body["top_p"], max(body["top_k"], 0), body["min_p"], body["repetition_penalty"],
            body["max_tokens"], tuple(body["stop"]), True, frozenset(body["stop_token_ids"]), 256,
        )  # fmt: skip
        requests = [Request(body["prompt"], body["seed"] + index) for index in range(body["n"])]
        drawn = LocalEngine(model, self.tokenizer, fold_adapter=False).generate(requests, sampling)
        choices = [
            {"index": index, "token_ids": one.token_ids, "logprobs": {"token_logprobs": one.logprobs}}
            | {"finish_reason": one.finish_reason}
            for index, one in enumerate(drawn)
        ]
        return {"choices": choices}


class Handler(BaseHTTPRequestHandler):
    """Routes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        """Health, models, counts."""
        models = [{"id": name, "parent": None if name == "base" else "base"} for name in self.server.models]
        paths = ("/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc", "/reset_prefix_cache")
        answers = {
            "/v1/models": {"data": models},
            "/openapi.json": {"paths": dict.fromkeys(paths)},
            "/version": {"version": "0.32.0"},
            "/test": self.server.counts | {"dev_mode": os.environ.get("VLLM_SERVER_DEV_MODE") == "1"},
        }
        self.answer(200, answers.get(self.path, {}))

    def do_POST(self):
        """Everything else."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(*getattr(self, self.path.rpartition("/")[2].partition("?")[0])(body))

    def test(self, body):
        self.server.test |= body
        return 200, {}

    def completions(self, body):
        server = self.server
        if "prompt_logprobs" not in body:
            server.counts["requests"] += 1
            server.counts["running"] += 1
            server.counts["most"] = max(server.counts["most"], server.counts["running"])
        try:
            test, status = server.test, 200
            if "prompt_logprobs" not in body and test["count"] != 0:
                test["count"] = None if test["count"] is None else test["count"] - 1
                time.sleep(test["delay_s"])
                status = test["status"]
            if status != 200:
                return status, {"error": "as the test wanted"}
            if body["model"] not in server.models:
                return 404, {"error": f"no model {body['model']}"}
            with server.lock:
                return 200, server.completions(body)
        finally:
            server.counts["running"] -= "prompt_logprobs" not in body

    def load_lora_adapter(self, body):
        if body["lora_name"] in self.server.models:
            return 400, {"error": "already loaded"}
        with self.server.lock:
            self.server.models[body["lora_name"]] = self.server.read(self.server.path, body["lora_path"])
        return 200, {}

    def unload_lora_adapter(self, body):
        return (200, {}) if self.server.models.pop(body["lora_name"], None) is not None else (404, {})

    def collective_rpc(self, body):
        with self.server.lock:
            self.server.models["base"] = self.server.read(body["kwargs"]["weights_path"])
        return 200, {}

    def reset_prefix_cache(self, _):
        return 200, {}

    def sleep(self, _):
        return 200, {}

    def wake_up(self, _):
        self.server.test["no_memory"] -= 1
        return (200, {}) if self.server.test["no_memory"] < 0 else (500, {"error": "CUDA out of memory"})

    def answer(self, code, body):
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """Quiet."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    arguments, _ = parser.parse_known_args()
    started = os.environ.get("TEST_STARTS")
    if started:
        with Path(started).open("a") as file:
            file.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    Server(arguments.host, arguments.port, arguments.model).serve_forever()

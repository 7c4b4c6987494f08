"""Servers for the tests, and policies to hand to them: real vLLM (CPU build), and the small ones of `served/`.

Those speak vLLM's API and start in seconds; they are started, killed and ended as real ones are.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from grpo_tasks.rollout.engine import Sampling
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import ServerModel, authorization, serving
from schemas.config.rollout import RolloutConfig, VllmConfig
from schemas.paths import resolve

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = Path(os.environ.get("GRPO_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
CONFIG = VllmConfig(python=str(PYTHON))
SMALL = Path(__file__).resolve().parent / "served"
LOAD, UNLOAD, PROBE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
WAKE, SLEEP = "/wake_up", "/sleep?level=1"
CALIBRATE = [PROBE, LOAD, PROBE, UNLOAD]
"""Base, and calibration adapter: once for each start of a server."""
MARKS = [
    pytest.mark.xdist_group("heavy"),
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM environment (make vllm)"),
    pytest.mark.usefixtures("key"),
]


def served(rank=16):
    return ServerModel(Path(resolve("embedded:base")), "float32", rank, cuda=False)


def moved(policy, by):
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    return policy


def engine_on(server, policy, tokenizer, folder, *, merged=False, config=CONFIG):
    return VllmEngine(policy, tokenizer, config, [server], weights=folder / "served", dtype="float32", merged=merged)


def sampling(temperature=None, **settings):
    return Sampling.of(RolloutConfig(**{"max_completion_length": 40, **settings}), temperature=temperature)


def listener(address):
    port = int(address.rpartition(":")[2])
    [pid] = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"}
    return psutil.Process(pid)


def small_config(**settings):
    """Settings with which a stage or a step starts small servers; PYTHONPATH has to contain `SMALL`."""
    return VllmConfig(python=sys.executable, retries=1, **settings)


@contextmanager
def small_servers(folder, *, rank=16, **settings):
    with serving(small_config(**settings), served(rank), folder) as servers:
        yield servers


def tell(server, **behaviour):
    """How the server behaves from now on; see `served/`."""
    httpx.post(f"{server.address}/test", json=behaviour, headers=authorization()).raise_for_status()


def restore(server):
    """The server serves the weights that it was started with, as after a restart."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": resolve("embedded:base")}}
    httpx.post(f"{server.address}/collective_rpc", json=body, headers=authorization()).raise_for_status()


def counts(server):
    return httpx.get(f"{server.address}/test", timeout=30, headers=authorization()).json()


def kill(server):
    process = listener(server.address)
    process.kill()
    psutil.wait_procs([process], timeout=10)
    return process.pid


def watched(engine, look=None):
    """What the engine asks of servers from now on: (path, body); `look` is called before each request to wake up."""
    asked, post = [], engine._post

    def record(server, path, body):
        asked.append((path, body))
        if path == WAKE and look is not None:
            look()
        return post(server, path, body)

    engine._post = record
    return asked

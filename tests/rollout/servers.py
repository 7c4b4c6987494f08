"""Real vLLM servers (CPU build) for the tests: their environment, their config, and policies to hand to them."""

import os
from pathlib import Path

import psutil
import pytest
import torch

from grpo_tasks.rollout.engine import Sampling
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.rollout.vllm_server import ServerModel
from schemas.config.rollout import RolloutConfig, VllmConfig
from schemas.paths import resolve

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = Path(os.environ.get("GRPO_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
CONFIG = VllmConfig(python=str(PYTHON))
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

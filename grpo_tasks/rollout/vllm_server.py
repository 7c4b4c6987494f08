"""A vLLM server in an environment and a process group of its own, started here and ended with us.

vLLM and the trainer cannot share an environment, so nothing here imports it: it is a command, an address and a log file.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from schemas.child import PARENT
from schemas.config import VllmConfig
from schemas.errors import RolloutError
from schemas.ports import free_port

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
LOADING = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
ON_CPU = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Without the first the first log-probs take seconds; the second is in GiB."""
FLAGS_ON_CPU = ("--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096")
"""Chunked prefill with seeded requests ends vLLM's engine on a CPU."""
LOG_SHOWN = 15


@dataclass(frozen=True, slots=True)
class Served:
    """What the server is to serve."""

    model: Path
    """Directory with weights and tokenizer."""
    dtype: str
    max_lora_rank: int | None
    """Rank of the adapters that will be loaded; None: no adapters."""
    cuda: bool


@contextmanager
def serving(config: VllmConfig, served: Served, log: Path) -> Iterator[str]:
    """Address of a server that is up; it is ended when the block is left, however it is left.

    Raises:
        RolloutError: there is no vLLM environment, or the server does not come up.
    """
    python = Path(config.python)
    if not python.exists():
        raise RolloutError(f"there is no {python}", place="rollout.vllm.python", mend="make vllm, or rollout.engine: local")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with log.open("ab") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_tasks.rollout.keeper", *command(config, served, python, port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | QUIET | LOADING | ({} if served.cuda else ON_CPU) | {PARENT: str(os.getpid())},
        )
    try:
        _wait_until_up(address, keeper, log, config.start_timeout_s)
        yield address
    finally:
        keeper.terminate()
        keeper.wait()


def command(config: VllmConfig, served: Served, python: Path, port: int) -> list[str]:
    """The command line of the server."""
    flags: list[str] = ["--model", str(served.model), "--served-model-name", BASE, "--host", "127.0.0.1", "--port", str(port)]
    # Sampling settings in a model's generation_config would be added to ours unasked.
    flags += ["--dtype", served.dtype, "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    flags += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)] if served.cuda else FLAGS_ON_CPU
    if config.tensor_parallel_size > 1:
        flags += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    if config.max_model_len is not None:
        flags += ["--max-model-len", str(config.max_model_len)]
    if served.max_lora_rank is not None:
        rank = next(known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= served.max_lora_rank)
        flags += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "1", "--max-cpu-loras", "2"]
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", *flags, *config.extra_args]


BASE = "base"
"""Name under which the server knows the model without an adapter."""


def _wait_until_up(address: str, keeper: "subprocess.Popen[bytes]", log: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if keeper.poll() is not None:
            raise RolloutError(f"the vLLM server ended while it started; the end of its log:\n{tail(log)}", place=str(log))
        try:
            if httpx.get(f"{address}/health", timeout=2.0).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    raise RolloutError(
        f"the vLLM server did not come up within {limit_s:g} s; the end of its log:\n{tail(log)}",
        place=str(log),
        mend="raise rollout.vllm.start_timeout_s",
    )


def tail(log: Path, lines: int = LOG_SHOWN) -> str:
    """The last lines of a log, indented."""
    text: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:] if log.exists() else []
    return "\n".join(f"    {line}" for line in text)

"""Servers of `served/`, which speak vLLM's API and start in seconds; started, killed and ended as real ones are."""

import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from grpo_tasks.rollout.vllm_server import authorization, serving
from schemas.config.rollout import VllmConfig
from schemas.paths import resolve
from tests.rollout.servers import listener, served

SMALL = Path(__file__).resolve().parent / "served"


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

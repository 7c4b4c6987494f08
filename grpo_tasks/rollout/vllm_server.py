"""A vLLM server in an environment and a process group of its own, started here and ended with us.

vLLM and the trainer cannot share an environment, so nothing here imports it: it is a command, an address and a log file.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from grpo_tasks.processes.entry import PARENT
from grpo_tasks.processes.ports import HOST, free_port
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmConfig
from schemas.errors import RolloutError

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
LOADING = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
ON_CPU = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Without the first the first log-probs take seconds; the second is in GiB."""
FLAGS_ON_CPU = ("--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096")
"""Chunked prefill with seeded requests ends vLLM's engine on a CPU."""
GUARD = Path(__file__).resolve().parents[1] / "web"
"""Folder of the middleware that keeps web pages away; vLLM's own key does not cover the paths that hand over weights."""
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
WEIGHT_PATHS = ("/collective_rpc", "/reset_prefix_cache")
LOG_SHOWN = 15
BASE = "base"
"""Name under which a server of ours knows the model without an adapter."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the server is to serve."""

    model: Path
    """Directory with weights and tokenizer."""
    dtype: str
    max_lora_rank: int | None
    """Rank of the adapters that will be loaded; None: no adapters."""
    cuda: bool


class VllmServer:
    """One server that runs: its address, what it knows, and how to have it again when it has died.

    Attributes:
        address: such as http://127.0.0.1:8000.
        base: the name under which it knows the model without an adapter.
        holds: policies that it has taken over since it was started.
    """

    def __init__(self, address: str) -> None:
        self.address, self.base = address.rstrip("/"), BASE
        self.loaded: set[str] = set()

    def restart(self) -> None:
        """Start it again.

        Raises:
            RolloutError: it is not ours, or does not come up.
        """
        raise RolloutError(
            "the server does not answer", place=self.address, fix="start it, then the same command again: the stage goes on"
        )


class OwnServer(VllmServer):
    """A server started here.

    Raises:
        RolloutError: it does not come up.
    """

    def __init__(self, config: VllmConfig, served: ServedModel, log: Path, device: str | None = None) -> None:
        self._config, self._served, self._log, self._device = config, served, log, device
        super().__init__(self._start())

    def restart(self) -> None:
        """End what is left of it and start another one."""
        self.end()
        self.address = self._start()
        self.loaded.clear()

    def end(self) -> None:
        """End it and all that it has started."""
        self._supervisor.terminate()
        self._supervisor.wait()

    def _start(self) -> str:
        port = free_port()
        address = f"http://{HOST}:{port}"
        environment = os.environ | QUIET | LOADING | ({} if self._served.cuda else ON_CPU) | {PARENT: str(os.getpid())}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(GUARD)]))
        if self._device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._device
        server = command(self._config, self._served, Path(self._config.python), port)
        with self._log.open("ab") as output:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "grpo_tasks.processes.server_supervisor", *server],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        try:
            _wait_until_up(address, self._supervisor, self._log, self._config.start_timeout_s)
        except BaseException:
            self.end()
            raise
        return address


@contextmanager
def serving(config: VllmConfig, served: ServedModel, folder: Path) -> Iterator[list[VllmServer]]:
    """Servers that are up, started here; they are ended when the block is left, however it is left. Logs go to `folder`.

    Raises:
        RolloutError: there is no vLLM environment, or a server does not come up.
    """
    if not Path(config.python).exists():
        raise RolloutError(f"there is no {config.python}", place="rollout.vllm.python", fix="make vllm, or rollout.engine: local")
    with ExitStack() as stack:
        servers: list[VllmServer] = []
        for number in range(config.replicas):
            log = folder / ("vllm.log" if config.replicas == 1 else f"vllm-{number}.log")
            server = OwnServer(config, served, log, config.devices[number] if config.devices else None)
            stack.callback(server.end)
            servers.append(server)
        yield servers


def existing_servers(config: VllmConfig, *, adapters: bool) -> list[VllmServer]:
    """The servers of `base_urls`, looked at.

    Args:
        config: with `base_urls`.
        adapters: whether adapters will be loaded; otherwise weights.

    Raises:
        RolloutError: one does not answer, or lacks an end point; the message names it and the server's version.
    """
    wanted = ["/v1/completions", *(ADAPTER_PATHS if adapters else WEIGHT_PATHS)]
    servers = []
    for url in config.base_urls:
        server = VllmServer(url)
        try:
            paths, version, models = (
                httpx.get(f"{server.address}{path}", headers=authorization(), timeout=10.0).raise_for_status().json()
                for path in ("/openapi.json", "/version", "/v1/models")
            )
        except (httpx.HTTPError, ValueError) as error:
            raise RolloutError(
                f"no vLLM server answers: {error}", place=url, fix="see rollout.vllm.base_urls; a key is taken from VLLM_API_KEY"
            ) from error
        missing = [path for path in wanted if path not in paths["paths"]]
        if missing:
            raise RolloutError(
                f"vLLM {version['version']} offers no {', '.join(missing)}",
                place=url,
                fix="start it with " + " ".join(f"{name}={value}" for name, value in LOADING.items()) + " and --enable-lora",
            )
        server.base = next(model["id"] for model in models["data"] if not model.get("parent"))
        servers.append(server)
    return servers


def swaps_merged_weights(config: VllmConfig, model: ModelConfig, *, cuda: bool) -> bool:
    """Whether a swap means whole weights and not the adapter: it must where there is none, and pays on a CPU.

    There decoding through an adapter takes 2 to 6 times as long, and a model that a CPU trains is quickly written. Servers that
    run elsewhere keep their base for others.
    """
    if model.lora is None or config.sync != "auto":
        return model.lora is None or config.sync == "merged"
    return not cuda and not config.base_urls and model.quantization == "none"


def command(config: VllmConfig, served: ServedModel, python: Path, port: int) -> list[str]:
    """The command line of the server."""
    flags: list[str] = ["--model", str(served.model), "--served-model-name", BASE, "--host", HOST, "--port", str(port)]
    flags += ["--middleware", "same_origin.SameOrigin"]
    # Sampling settings in a model's generation_config would be added to ours unasked.
    flags += ["--dtype", served.dtype, "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    flags += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)] if served.cuda else FLAGS_ON_CPU
    if config.sleep and served.cuda:
        flags.append("--enable-sleep-mode")
    if config.tensor_parallel_size > 1:
        flags += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    if config.max_model_len is not None:
        flags += ["--max-model-len", str(config.max_model_len)]
    if served.max_lora_rank is not None:
        rank = next(known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= served.max_lora_rank)
        flags += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "1", "--max-cpu-loras", "2"]
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", *flags, *config.extra_args]


def authorization() -> dict[str, str]:
    """Header for servers that ask for a key. Those started here read the same variable, and ask for it too."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _wait_until_up(address: str, supervisor: "subprocess.Popen[bytes]", log: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if supervisor.poll() is not None:
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
        fix="raise rollout.vllm.start_timeout_s",
    )


def tail(log: Path, lines: int = LOG_SHOWN) -> str:
    """The last lines of a log, indented."""
    text: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:] if log.exists() else []
    return "\n".join(f"    {line}" for line in text)

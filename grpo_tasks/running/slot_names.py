"""Which slots a run holds. Apart from slots.py, so that a machine without a GPU learns that it has none without Prefect."""

import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig, VllmConfig

SHARED = "shared"
AUTO = "auto"
RETRAINING = "retrain-"
"""Prefix of the slot that a retraining of a registered model holds."""
DRIVER = Path("/proc/driver/nvidia/gpus")
"""Has an entry for each GPU of this machine."""


def slots_of(
    resources: ResourcesConfig, rollout: RolloutConfig | None = None, *, trains: bool = False, has_cards: bool | None = None
) -> list[str]:
    """Names of the slots a run holds: those of its GPUs and of those of its vLLM servers, the one it names, or none (CPU, shared,
    a stage on a cluster).

    They are sorted, so that two runs that need the same GPUs acquire them in the same order and never wait for each other.

    Args:
        resources: settings of the machine.
        rollout: how the step samples, if it does.
        trains: the slots are for a stage, which computes where `resources.cluster` says.
        has_cards: whether this machine has GPUs; None: look.
    """
    # A cluster has its own accounting.
    if resources.gpu_slot == SHARED or (trains and resources.cluster.engine == "ray"):
        return []
    if resources.gpu_slot != AUTO:
        return [resources.gpu_slot]
    if has_cards is None:
        has_cards = DRIVER.exists()
    if resources.device == "cpu" or not has_cards:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = max(resources.num_processes, len(list(DRIVER.iterdir())) if DRIVER.exists() else 0)
    cards = visible.split(",") if visible else [str(card) for card in range(count)]
    held = {*cards[: resources.num_processes]}
    if rollout is not None and rollout.engine == "vllm":
        held |= _server_cards(rollout.vllm, cards)
    return sorted(f"gpu-{socket.gethostname()}-{card}" for card in held)


def _server_cards(vllm: VllmConfig, cards: Sequence[str]) -> set[str]:
    """The cards of the servers that a step starts, as rollout/vllm_server.py gives them out; that file needs torch."""
    if vllm.base_urls:
        return set()
    if vllm.devices:
        return {card.strip() for each in vllm.devices for card in each.split(",")}
    wanted = vllm.replicas * vllm.tensor_parallel_size
    return {*(cards[:wanted] if vllm.replicas == 1 else cards[-wanted:])}


def describe_slot(slot: str) -> str:
    """A slot in words: `card 0 of HOST`, `the retraining of NAME`, or its name."""
    if card := re.fullmatch(r"gpu-(.+)-([^-]+)", slot):
        return f"card {card[2]} of {card[1]}"
    if slot.startswith(RETRAINING):
        return f"the retraining of {slot.removeprefix(RETRAINING)}"
    return f"the slot {slot}"

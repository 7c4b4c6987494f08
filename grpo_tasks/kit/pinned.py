"""Copies of tensors from the host to a device, for which the host does not wait."""

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; the host does not wait for the copy.

    CUDA copies ordinary (pageable) memory in pieces through a pinned buffer of its own, and the host waits for work before it,
    whatever `non_blocking` says. So the memory is pinned first (CUDA programming guide, asynchronous concurrent execution).
    """
    if device.type not in ("cpu", "meta"):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

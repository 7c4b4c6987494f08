"""What an update cost the card: peak memory, and energy where NVML tells. Nothing on a CPU."""

import torch


class DeviceMeter:
    """Measures between two readings."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._counter = _energy_counter(device)
        self._before = self._counter() if self._counter else 0.0

    def read(self) -> dict[str, float]:
        """gpu_memory (GiB) and energy (J) since the reading before."""
        if self._device is None:
            return {}
        figures = {"gpu_memory": torch.cuda.max_memory_allocated(self._device) / 2**30}
        torch.cuda.reset_peak_memory_stats(self._device)
        if self._counter:
            now = self._counter()
            figures["energy"], self._before = now - self._before, now
        return figures


def _energy_counter(device: torch.device):  # type: ignore[no-untyped-def]
    """A function that gives the card's energy since the driver was loaded, in J; None where nobody counts."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        # By UUID: NVML does not know CUDA_VISIBLE_DEVICES.
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(card)
    except Exception:  # the driver, the card or the package may be too old in many ways; then it is not measured
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1000

"""CPU, memory, disk, network and GPUs of the machine while a stage is trained, under MLflow's own names (tab "System metrics").

MLflow's own thread is not used: it sends on its own, at its own times. Here a sample travels with the journal.
"""

import time
from dataclasses import dataclass, field

from mlflow.exceptions import MlflowException
from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

SYSTEM = "system/"
"""Prefix of these metrics. They are not steps of the journal."""
EVERY_S = 10.0


@dataclass(slots=True)
class Machine:
    """Samples the machine, at most once in `every_s` seconds; the first sample is taken that long after the start."""

    every_s: float = EVERY_S
    _sampled_s: float = field(default_factory=time.monotonic)
    _monitors: list[BaseMetricsMonitor] | None = None

    def sample(self) -> dict[str, float]:
        """The figures now; empty when the last sample is recent."""
        if time.monotonic() - self._sampled_s < self.every_s:
            return {}
        self._sampled_s = time.monotonic()
        if self._monitors is None:
            self._monitors = _monitors()
        figures: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            figures |= {f"{SYSTEM}{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        return figures


def _monitors() -> list[BaseMetricsMonitor]:
    monitors: list[BaseMetricsMonitor] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        monitors.append(GPUMonitor())
    except (ImportError, MlflowException, RuntimeError):
        # Without nvidia-ml-py, or without a card.
        return monitors
    return monitors

"""Ships a stage's journal to its child run: in batches, with the journal's own timestamps, no step ever twice.

The position is the last step that any metric of the run has in the store. All metrics of a step travel in one call, so it is
right even after a kill between a call and its reply. An unreachable store only causes delay: `ship` returns False.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import tenacity
from mlflow.entities import Metric, RunTag
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.metrics.base_metrics_monitor import BaseMetricsMonitor
from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

from grpo_tasks.stage.journal import JOURNAL_KEYS, JsonLinesTail, read_events
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking.handle import MAX_METRICS, RunHandle, batches
from grpo_tasks.tracking.report_to import Report
from grpo_tasks.tracking.store import FAULTS, Store, at_the_end, is_conflict, is_temporary
from schemas.errors import TrackingError
from schemas.secret import hide

FINAL, SYSTEM = "final/", "system/"
"""Prefixes of the figures of a finished stage and of the machine. They are not steps of the journal."""
_TAG_CHARS = 2_000

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Machine:
    """Samples the machine, at most once in `every_s` seconds; the first sample is taken that long after the start."""

    every_s: float = 10.0
    _sampled_s: float = field(default_factory=time.monotonic)
    _monitors: list[BaseMetricsMonitor] | None = None

    def sample(self) -> dict[str, float]:
        """The figures now; empty when the last sample is recent."""
        if time.monotonic() - self._sampled_s < self.every_s:
            return {}
        self._sampled_s = time.monotonic()
        if self._monitors is None:
            self._monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
            # Without nvidia-ml-py, or without a card.
            with suppress(ImportError, MlflowException, RuntimeError):
                self._monitors.append(GPUMonitor())
        figures: dict[str, float] = {}
        for monitor in self._monitors:
            monitor.collect_metrics()
            figures |= {f"{SYSTEM}{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        return figures


@dataclass(slots=True)
class JournalShipper:
    """Follows one stage directory. Any process can create a new one at any time."""

    store: Store
    stage_dir: Path
    open_child: Callable[[], RunHandle]
    """Finds or creates the child run. Called when there is something to send, so that a dead server stops no training."""
    check: Callable[[], None] = lambda: None
    """Raises `TrackingError` when the parent run was deleted; its children may live on."""
    machine: Machine = field(default_factory=Machine)
    reports: Sequence[Report] = ()
    """Other trackers that get the same lines."""
    _run: RunHandle | None = None
    _tail: JsonLinesTail = field(init=False)
    _last_step: int | None = None
    _waiting: dict[int, list[Metric]] = field(default_factory=dict)
    """By step. Of two lines of one step the first stays, as in the journal itself."""
    _sent_events: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tail = JsonLinesTail(StageDir(self.stage_dir).journal, JOURNAL_KEYS | {"timestamp_ms": int})

    def ship(self) -> bool:
        """Send the complete lines written since the last call; False when the store is away; an error if it refused."""
        for report in self.reports:
            report.ship()
        for line in self._tail.read():
            step, timestamp_ms, known = line["step"], line["timestamp_ms"], line["metrics"].items()
            metrics = [Metric(name, float(value), timestamp_ms, step) for name, value in known if value is not None]
            self._waiting.setdefault(step, metrics)
        try:
            with at_the_end():
                self.check()
                self._send()
        except (*FAULTS, TrackingError) as fault:
            cause = fault.__cause__ if isinstance(fault, TrackingError) else fault
            if cause is None:
                raise
            if not (is_temporary(cause) or is_conflict(cause)):
                raise self.store.error(fault) from fault
            _log.warning("MLflow at %s cannot be reached; %d journal lines wait", hide(self.store.uri), len(self._waiting))
            return False
        return True

    def finish(self, *, timeout_s: float | None = None) -> None:
        """Ship until every line is in the store. Raises `TrackingError` after `timeout_s` (default: the store's patience)."""
        timeout_s = self.store.patience_s if timeout_s is None else timeout_s
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda shipped: not shipped),
            stop=tenacity.stop_after_delay(timeout_s),
            wait=tenacity.wait_exponential(multiplier=0.5, max=5.0),
        )
        try:
            attempts(self.ship)
        except tenacity.RetryError as error:
            raise TrackingError(
                f"{len(self._waiting)} lines of the journal could not be shipped for {timeout_s:.0f} s",
                place=f"{self.store.uri}, journal {StageDir(self.stage_dir).journal}",
                fix="start the server, then run the same command: the stage is not trained again",
            ) from error

    def _send(self) -> None:
        lines = read_events(StageDir(self.stage_dir).events)
        latest = {f"grpo.event.{line['event']}": f"update {line['step']}: {line['detail']}"[:_TAG_CHARS] for line in lines}
        events = {name: text for name, text in latest.items() if self._sent_events.get(name) != text}
        if not self._waiting and not events:
            return
        run = self._run = self._run or self.open_child()
        # No `call` below: its retries would block the loop that follows the training, and the next `ship` comes soon.
        if events:
            run.mark_running()
            self.store.client.log_batch(run.run_id, tags=[RunTag(name, text) for name, text in events.items()])
            self._sent_events |= events
        if self._last_step is None:
            known = run.store.client.get_run(run.run_id).data.to_proto().metrics
            steps = (metric.step for metric in known if not metric.key.startswith((FINAL, SYSTEM)))
            self._last_step = max(steps, default=0)
        waiting = sorted((step, metrics) for step, metrics in self._waiting.items() if step > self._last_step)
        if waiting:
            run.mark_running()
        for batch in batches(waiting, lambda line: len(line[1]), MAX_METRICS):
            self.store.client.log_batch(run.run_id, metrics=[metric for _, metrics in batch for metric in metrics])
            # Set after each batch: if the next call fails, `ship` does not send this one again.
            self._last_step = batch[-1][0]
        self._waiting.clear()
        now = int(time.time() * 1000)
        sample = [Metric(name, value, now, self._last_step) for name, value in self.machine.sample().items()]
        if sample:
            run.mark_running()
            self.store.client.log_batch(run.run_id, metrics=sample)

"""Ships a stage's journal to its child run: in batches, with the journal's own times, no step ever twice.

    metrics.jsonl  {"step": 12, "timestamp_ms": 1789..., "metrics": {"reward": 1.2}}   ->   log_batch, at most 1,000 metrics

Where to go on is asked of the store, not kept on disk: the last step that any of the run's metrics has. A step travels whole
in one call, which the store commits or not, so that answer is always right, also after a kill between call and answer, and also
when a stage is trained again and its lines carry new times. A store that cannot be reached costs nothing but delay: `ship` says
False and the next call sends what has gathered. What it does not do: read anything but whole lines, or write to the journal.

    events.jsonl   {"step": 12, "event": "kl_blow_up", ...}   ->   tag grpo.event.kl_blow_up, the last of its kind
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import tenacity
from mlflow.entities import Metric, RunTag

from grpo_tasks.stage.journal import read_events
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.stage.tail import JsonLinesTail
from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.lines import JournalLine, journal_tail, read_new_lines
from grpo_tasks.tracking.store import FAULTS, Store, outrun, passes
from schemas.errors import TrackingError
from schemas.secret import hide

MAX_BATCH = 1_000
_TAG_CHARS = 2_000
FINAL = "final/"
"""Prefix of the figures of a finished stage, which are no steps of the journal."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class JournalShipper:
    """Follows one stage directory. Safe to be made anew at any time, by any process."""

    store: Store
    stage_dir: Path
    open_child: Callable[[], RunHandle]
    """Finds or makes the child run; called when there is something to send, so that a dead server stops no training."""
    flush_interval_s: float = 5.0
    """How often whoever follows the stage calls `ship`, in seconds."""
    _run: RunHandle | None = None
    _tail: JsonLinesTail = field(init=False)
    _last_step: int | None = None
    _waiting: list[JournalLine] = field(default_factory=list)
    _told: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tail = journal_tail(StageDir(self.stage_dir).journal)

    def ship(self) -> bool:
        """Send the whole lines written since; False when the store could not be reached (nothing is lost).

        Raises:
            TrackingError: the store answered, and refused.
        """
        self._waiting += read_new_lines(self._tail)
        try:
            self._send()
        except (*FAULTS, TrackingError) as fault:
            cause = fault.__cause__ if isinstance(fault, TrackingError) else fault
            if cause is None or not (passes(cause) or outrun(cause)):
                raise self.store.error(fault) from fault
            _log.warning("MLflow at %s cannot be reached; %d journal lines wait", hide(self.store.uri), len(self._waiting))
            return False
        return True

    @property
    def last_step(self) -> int:
        """Number of the last step that is known to be in the store; 0 before the first."""
        return self._last_step or 0

    def finish(self, *, timeout_s: float | None = None) -> None:
        """Ship until everything is there; `timeout_s` is the store's patience unless given.

        Raises:
            TrackingError: the store could not be reached for `timeout_s` seconds.
        """
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
        events = {name: text for name, text in _event_tags(self.stage_dir).items() if self._told.get(name) != text}
        if not self._waiting and not events:
            return
        run = self._run = self._run or self.open_child()
        if events:
            run.wake()
            self.store.client.log_batch(run.run_id, tags=[RunTag(name, text) for name, text in events.items()])
            self._told |= events
        if self._last_step is None:
            self._last_step = _find_last_step(run)
        self._waiting = [line for line in self._waiting if line.step > self._last_step]
        if self._waiting:
            run.wake()
        for batch in _batches(self._waiting):
            # Not `ask`: its patience would hold the loop that follows the training; the next call is soon.
            self.store.client.log_batch(run.run_id, metrics=[metric for line in batch for metric in _metrics(line)])
            self._last_step = batch[-1].step
        self._waiting = []


def _event_tags(stage_dir: Path) -> dict[str, str]:
    events = read_events(StageDir(stage_dir).events)
    return {f"grpo.event.{line['event']}": f"update {line['step']}: {line['detail']}"[:_TAG_CHARS] for line in events}


def _find_last_step(run: RunHandle) -> int:
    latest = run.store.client.get_run(run.run_id).data.to_proto().metrics
    return max((metric.step for metric in latest if not metric.key.startswith(FINAL)), default=0)


def _metrics(line: JournalLine) -> list[Metric]:
    return [Metric(name, value, line.timestamp_ms, line.step) for name, value in line.metrics.items()]


def _batches(lines: list[JournalLine]) -> Iterator[list[JournalLine]]:
    """As many whole lines a call as hold at most a thousand metrics; steps in order, each once."""
    batch: list[JournalLine] = []
    size = 0
    for line in sorted({line.step: line for line in reversed(lines)}.values(), key=lambda line: line.step):
        if batch and size + len(line.metrics) > MAX_BATCH:
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += len(line.metrics)
    if batch:
        yield batch

"""Shows the progress of a stage while it is trained: a bar in the terminal, lines in the Prefect log, events in the Prefect UI.

    trainer (child process) --writes--> journal, events --read here twice a second--> terminal, Prefect, live.html
                                                        --`ship`, every few seconds--> MLflow

The trainer knows none of these: everything comes from its journal.
"""

import json
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from uuid import NAMESPACE_URL, uuid5

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grpo_tasks.content.markdown import table
from grpo_tasks.running.live import LivePage, page_name
from grpo_tasks.running.orchestrator import run_logger, send_event
from grpo_tasks.stage.journal import EVENT_KEYS, JOURNAL_KEYS, Journal
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.stage.tail import JsonLinesTail
from schemas.config.stage import StageConfig
from schemas.metrics import PROGRESS, REWARD

ADVICE = "The loss starts near 0 and may rise while the model improves: watch the reward."
SUPERVISED_ADVICE = "The loss is the cross entropy of the trained tokens: it should fall, and more slowly with every pass."
POLL_S = 0.5
"""Metrics in the bar, the log lines and the summary, with the short names that they have there."""


class StageProgress:
    """Follows the journal of a stage; a context manager around its training.

    Args:
        stage: every `logging_steps`-th update and the last one get a log line.
        directory: where the journal and the events are written.
        key: content key of the stage.
        ship: sends new lines of the journal to the tracking server.
        ship_every_s: seconds between two calls of `ship`; it is also called at the end.
    """

    def __init__(
        self, stage: StageConfig, directory: StageDir, *, key: str, ship: Callable[[], object], ship_every_s: float
    ) -> None:
        self._stage, self._directory, self._ship, self._ship_every_s = stage, directory, ship, ship_every_s
        self._log = run_logger()
        self._journal, self._events = JsonLinesTail(directory.journal, JOURNAL_KEYS), JsonLinesTail(directory.events, EVENT_KEYS)
        self._polled = self._shipped = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bar.add_task(f"stage {stage.name}", total=stage.max_steps, figures="")
        # The updates before a resume were logged by the run that made them.
        earlier = self._journal.read()
        self._last = self._logged = earlier[-1] if earlier else None
        self._page = LivePage(stage, directory.live, page_name(key))
        self._page.add(earlier)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._poll(final=True)
        self._bar.stop()

    def tick(self) -> None:
        """Show what is new; reads the files at most twice a second, however often it is called."""
        if time.monotonic() - self._polled >= POLL_S:
            self._poll(final=False)

    def summary(self, journal: Journal) -> str:
        """A table of the first, the last and seven updates between them, in Markdown."""
        names = [name for name in PROGRESS if any(name in metrics for metrics in journal.steps.values()) or name == REWARD]
        steps = sorted({1, *(round(journal.last_step * eighth / 8) for eighth in range(1, 9))} & journal.steps.keys())
        rows = [[str(step), *(_number(_latest(journal, name, step)) for name in names)] for step in steps]
        updates = table(["update", *names], rows, right=["update", *names])
        supervised = "The loss is the cross entropy of the trained tokens: it should fall, and more slowly with every pass."
        advice = (
            supervised
            if self._stage.kind != "grpo"
            else "The loss starts near 0 and may rise while the model improves: watch the reward."
        )
        return "\n\n".join([f"# Stage {self._stage.name}", updates, advice])

    def _poll(self, *, final: bool) -> None:
        self._polled = time.monotonic()
        lines, events = self._journal.read(), self._events.read()
        for event in events:
            self._log.warning("stage %s, update %s: %s: %s", self._stage.name, event["step"], event["event"], event["detail"])
            self._emit(event)
        for line in lines:
            self._last = line
            if line["step"] % self._stage.logging_steps == 0:
                self._log_update(line)
        if lines:
            self._bar.update(self._task, completed=lines[-1]["step"], figures=_figures(lines[-1]))
        if final and self._last is not None and self._last is not self._logged:
            self._log_update(self._last)
        self._page.add(lines, final=final)
        if final or self._polled - self._shipped >= self._ship_every_s:
            self._shipped = self._polled
            self._ship()

    def _log_update(self, line: dict[str, Any]) -> None:
        self._logged = line
        self._log.info("stage %s, update %s%s: %s", self._stage.name, line["step"], self._of(), _figures(line))

    def _emit(self, event: dict[str, Any]) -> None:
        payload = {"stage": self._stage.name, "update": event["step"], "detail": event["detail"]}
        # Derived from the event: a stage that resumes repeats events, and Prefect ignores an id that it knows.
        event_id = uuid5(NAMESPACE_URL, f"{self._directory.root} {json.dumps(event, sort_keys=True)}")
        send_event(f"grpo.{event['event']}", f"grpo.stage.{self._directory.root.name}", payload, event_id=event_id)

    def _of(self) -> str:
        return f"/{self._stage.max_steps}" if self._stage.max_steps else ""


def _figures(line: dict[str, Any]) -> str:
    metrics = line["metrics"]
    return " ".join(f"{short} {_number(metrics[name])}" for name, short in PROGRESS.items() if name in metrics)


def _latest(journal: Journal, metric: str, step: int) -> float | None:
    """The value at an update, or the latest one before it, because some metrics are not measured at every update."""
    values = journal.window(metric, last=step, size=step)
    return values[-1] if values else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

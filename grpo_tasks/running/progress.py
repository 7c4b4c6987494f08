"""A stage's progress for people: a bar in the terminal, lines in the Prefect log; and the journal on its way to MLflow.

The trainer knows none of them; all is read from its journal.
"""

import json
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from uuid import NAMESPACE_URL, uuid5

from prefect import get_run_logger
from prefect.context import TaskRunContext
from prefect.events import emit_event
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from grpo_tasks.content.markdown import table
from grpo_tasks.stage.journal import EVENT_KEYS, JOURNAL_KEYS, Journal
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.stage.tail import JsonLinesTail
from schemas.config.stage import StageConfig

LOOK_S = 0.5
WATCHED = {"reward": "reward", "reward_std": "std", "kl": "kl", "completions/mean_length": "length"}


class StageProgress:
    """Follows the journal of a stage while it is trained.

    `ship` is called every `ship_every_s` seconds and at the end; every `logging_steps`-th update and the last one get a log line.
    """

    def __init__(self, stage: StageConfig, directory: StageDir, *, ship: Callable[[], object], ship_every_s: float) -> None:
        self._stage, self._directory, self._ship, self._ship_every_s = stage, directory, ship, ship_every_s
        self._log = get_run_logger()
        self._journal, self._events = JsonLinesTail(directory.journal, JOURNAL_KEYS), JsonLinesTail(directory.events, EVENT_KEYS)
        self._looked = self._shipped = time.monotonic()
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
        # A stage that resumes has logged these updates before.
        before = self._journal.read()
        self._last = self._logged = before[-1] if before else None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._look(final=True)
        self._bar.stop()

    def tick(self) -> None:
        """Look, at most twice a second."""
        if time.monotonic() - self._looked >= LOOK_S:
            self._look(final=False)

    def summary(self, journal: Journal) -> str:
        """The stage as Markdown: first, middle and last updates."""
        names = [name for name in WATCHED if any(name in metrics for metrics in journal.steps.values()) or name == "reward"]
        steps = sorted({1, *(round(journal.last_step * part / 8) for part in range(1, 9))} & journal.steps.keys())
        rows = [[str(step), *(_number(_latest(journal, name, step)) for name in names)] for step in steps]
        updates = table(["update", *names], rows, right=["update", *names])
        advice = "The loss starts near 0 and may rise while the model gets better: watch the reward."
        return "\n\n".join([f"# Stage {self._stage.name}", updates, advice])

    def _look(self, *, final: bool) -> None:
        self._looked = time.monotonic()
        lines, events = self._journal.read(), self._events.read()
        for event in events:
            self._log.warning("stage %s, update %s: %s: %s", self._stage.name, event["step"], event["event"], event["detail"])
            self._emit(event)
        for line in lines:
            self._last = line
            if line["step"] % self._stage.logging_steps == 0:
                self._tell(line)
        if lines:
            self._bar.update(self._task, completed=lines[-1]["step"], figures=_figures(lines[-1]))
        if final and self._last is not None and self._last is not self._logged:
            self._tell(self._last)
        if final or self._looked - self._shipped >= self._ship_every_s:
            self._shipped = self._looked
            self._ship()

    def _tell(self, line: dict[str, Any]) -> None:
        self._logged = line
        self._log.info("stage %s, update %s%s: %s", self._stage.name, line["step"], self._of(), _figures(line))

    def _emit(self, event: dict[str, Any]) -> None:
        """Into the feed of the Prefect UI, where an automation can wait for it."""
        resource = {"prefect.resource.id": f"grpo.stage.{self._directory.root.name}"}
        context = TaskRunContext.get()
        run = context.task_run.flow_run_id if context else None
        related = [{"prefect.resource.id": f"prefect.flow-run.{run}", "prefect.resource.role": "flow-run"}] if run else []
        payload = {"stage": self._stage.name, "update": event["step"], "detail": event["detail"]}
        # The same event has the same id, also when a stage that was killed tells it again.
        number = uuid5(NAMESPACE_URL, f"{self._directory.root} {json.dumps(event, sort_keys=True)}")
        emit_event(event=f"grpo.{event['event']}", resource=resource, related=related, payload=payload, id=number)

    def _of(self) -> str:
        return f"/{self._stage.max_steps}" if self._stage.max_steps else ""


def _figures(line: dict[str, Any]) -> str:
    metrics = line["metrics"]
    return " ".join(f"{short} {_number(metrics[name])}" for name, short in WATCHED.items() if name in metrics)


def _latest(journal: Journal, metric: str, step: int) -> float | None:
    """The value of an update, or the last one before it: some metrics are measured now and then."""
    values = journal.window(metric, last=step, size=step)
    return values[-1] if values else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

"""Shows how far a step has come: to who listens (a terminal, a notebook), in Prefect, in the log; and a stage update by update.

    rooms, child processes  --reports-->  StepProgress  -->  the listener around the step
                                                             the artifact progress-STEP in Prefect, every 10 s
                                                             log.txt of the step, and the log where nobody listens, every 30 s

The trainer knows none of these: its updates come from its journal, read here twice a second.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import NAMESPACE_URL, UUID, uuid5

from grpo_tasks.content.markdown import table
from grpo_tasks.kit.progress import Listener, Progress, listener, listening
from grpo_tasks.processes.child import LOG
from grpo_tasks.running.orchestrator import artifact_key, run_logger, send_event, show_artifact
from grpo_tasks.stage.journal import EVENT_KEYS, JOURNAL_KEYS, Journal, JsonLinesTail
from grpo_tasks.stage.stage_dir import StageDir
from schemas.config.stage import StageConfig
from schemas.metrics import EPOCH, PROGRESS, REWARD

POLL_S = 0.5
"""Shortest time between two readings of the files of a stage."""
FIRST_S, SHOW_S = 1.0, 10.0
"""Seconds before a step has an artifact, and between two versions of it: each is some requests to the Prefect server."""
LOG_S = 30.0
"""Seconds between two lines in the log."""
RECENT = 20
"""Updates whose mean duration gives the time left."""
SLOW_S = 2.0
"""What a stage does within an update is shown when the update takes longer."""


class StepProgress:
    """Follows what a step reports; a context manager around its work. A thread shows it, so also while the work is silent."""

    def __init__(self, label: str, directory: Path, *, number: int = 0, steps: int = 0) -> None:
        self._log, self._file, self._key = run_logger(), directory / LOG, f"progress-{artifact_key(label)}"
        self._outer, self._began = listener(), time.monotonic()
        self._step = Progress("", step=label, number=number, steps=steps)
        self._now = self._step
        self._artifacts: dict[str, UUID] = {}
        self._ended = threading.Event()
        # The thread has the context of the step: Prefect's artifacts belong to its task.
        self._thread = threading.Thread(target=copy_context().run, args=(self._beat,), name="progress", daemon=True)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(listening(self._hear))
        self._hear(self._now)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        self._ended.set()
        self._thread.join()
        if self._artifacts and error is None:
            self._show("done", 100.0)

    def _hear(self, progress: Progress) -> None:
        step = self._step
        self._now = replace(progress, step=step.step, number=step.number, steps=step.steps)
        if self._outer is not None:
            self._outer(self._now)

    def _beat(self) -> None:
        shown, logged = self._began + FIRST_S - SHOW_S, self._began
        while not self._ended.wait(POLL_S):
            now = time.monotonic()
            if now - shown >= SHOW_S:
                shown = now
                self._show(self._now.line(), self._now.percent)
            if now - logged >= LOG_S:
                logged = now
                line = f"{self._now.line()} ({now - self._began:.0f} s)"
                with suppress(OSError), self._file.open("a", encoding="utf-8") as file:
                    file.write(f"{time.strftime('%H:%M:%S')} {line}\n")
                if self._outer is None:
                    self._log.info("%s", line)

    def _show(self, line: str, percent: float) -> None:
        show_artifact(self._key, percent, line, self._artifacts)


class StageProgress:
    """Follows the journal of a stage; a context manager around its training.

    Every `logging_steps`-th update and the last one get a log line. `ship` sends new lines of the journal to the tracking server,
    every `ship_every_s` seconds and at the end.
    """

    def __init__(self, stage: StageConfig, directory: StageDir, *, ship: Callable[[], object], ship_every_s: float = 5.0) -> None:
        self._stage, self._directory, self._ship, self._ship_every_s = stage, directory, ship, ship_every_s
        self._log = run_logger()
        self._journal, self._events = JsonLinesTail(directory.journal, JOURNAL_KEYS), JsonLinesTail(directory.events, EVENT_KEYS)
        self._polled = self._shipped = time.monotonic()
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._figures: dict[str, float] = {}
        self._outer: Listener = listener() or (lambda _: None)
        self._updated = 0.0
        self._stack = ExitStack()
        # The updates before a resume were logged by the run that made them.
        earlier = self._journal.read()
        self._last = self._logged = earlier[-1] if earlier else None
        self._remember(earlier)

    def __enter__(self) -> Self:
        self._outer(self.now())
        self._stack.enter_context(listening(self._hear))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        self._poll(final=True)

    def tick(self) -> None:
        """Show what is new; reads the files at most twice a second, however often it is called."""
        if time.monotonic() - self._polled >= POLL_S:
            self._poll(final=False)

    def summary(self, journal: Journal) -> str:
        """A table of the first, the last and seven updates between them, in Markdown."""
        names = [name for name in PROGRESS if any(name in metrics for metrics in journal.steps.values()) or name == REWARD]
        steps = sorted({1, *(round(journal.last_step * eighth / 8) for eighth in range(1, 9))} & journal.steps.keys())
        # The value at an update, or the latest one before it: some metrics are not measured at every update.
        latest = [[next(reversed(journal.window(name, last=step, size=step)), None) for name in names] for step in steps]
        rows = [[str(step), *map(_number, values)] for step, values in zip(steps, latest, strict=True)]
        updates = table(["update", *names], rows, right=["update", *names])
        advice = (
            "The loss starts near 0 and may rise while the model improves: watch the reward."
            if self._stage.kind == "grpo"
            else "The loss is the cross entropy of the trained tokens: it should fall, and more slowly with every pass."
        )
        return "\n\n".join([f"# Stage {self._stage.name}", updates, advice])

    def percent(self) -> float:
        """How much of the stage is done, from 0 to 100; 0 before its first update."""
        if not self._recent:
            return 0.0
        last, stage = self._recent[-1], self._stage
        done = last["step"] / stage.max_steps if stage.max_steps else (last["metrics"].get(EPOCH) or 0.0) / stage.num_train_epochs
        return round(min(100.0, 100 * done), 1)

    def now(self) -> Progress:
        """`update 40/120, reward 1.234, kl 0.010, 3 min left`."""
        step, percent = self._recent[-1]["step"] if self._recent else 0, self.percent()
        figures, left_s = ", ".join(f"{short} {value:.3f}" for short, value in self._figures.items()), None
        # The time left is judged by the last updates.
        if len(self._recent) > 1 and percent not in (0.0, 100.0):
            first, last = self._recent[0], self._recent[-1]
            pace_s = (last["timestamp_ms"] - first["timestamp_ms"]) / 1000 / (last["step"] - first["step"])
            left_s = pace_s * last["step"] * (100 - percent) / percent
        total = self._stage.max_steps or 0
        return Progress("update", step, total, share=percent / 100, figures=figures, left_s=left_s)

    def _hear(self, within: Progress) -> None:
        """What the trainer does before its first update, and within one that takes long."""
        if not self._recent or time.monotonic() - self._updated >= SLOW_S:
            self._outer(replace(self.now(), figures=within.line()))

    def _remember(self, lines: list[dict[str, Any]]) -> None:
        self._recent.extend(lines)
        for line in lines:
            # The latest value of each: not every update measures the KL.
            self._figures |= {short: line["metrics"][name] for name, short in PROGRESS.items() if name in line["metrics"]}

    def _poll(self, *, final: bool) -> None:
        self._polled = time.monotonic()
        lines, events = self._journal.read(), self._events.read()
        for event in events:
            self._log.warning("stage %s, update %s: %s: %s", self._stage.name, event["step"], event["event"], event["detail"])
            payload = {"stage": self._stage.name, "update": event["step"], "detail": event["detail"]}
            # Derived from the event: a stage that resumes repeats events, and Prefect ignores an id that it knows.
            event_id = uuid5(NAMESPACE_URL, f"{self._directory.root} {json.dumps(event, sort_keys=True)}")
            send_event(f"grpo.{event['event']}", f"grpo.stage.{self._directory.root.name}", payload, event_id=event_id)
        for line in lines:
            self._last = line
            if line["step"] % self._stage.logging_steps == 0:
                self._log_update(line)
        if final and self._last is not None and self._last is not self._logged:
            self._log_update(self._last)
        self._remember(lines)
        if lines:
            self._updated = self._polled
            self._outer(self.now())
        if final or self._polled - self._shipped >= self._ship_every_s:
            self._shipped = self._polled
            self._ship()

    def _log_update(self, line: dict[str, Any]) -> None:
        self._logged = line
        self._log.info("stage %s, update %s%s: %s", self._stage.name, line["step"], self._of(), _figures(line))

    def _of(self) -> str:
        return f"/{self._stage.max_steps}" if self._stage.max_steps else ""


def _figures(line: dict[str, Any]) -> str:
    metrics = line["metrics"]
    return " ".join(f"{short} {_number(metrics[name])}" for name, short in PROGRESS.items() if name in metrics)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

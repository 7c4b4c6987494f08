"""How far the work has come. Rooms count it, whoever started the work listens: a command, a step, a notebook.

    with listening(lambda progress: print(progress.line())):
        evaluate(config, model, data, "work/evaluation")      in a room below: Count("sampling", 64, "completions")

A child process reports to the process that runs it (processes/child.py). Where nobody listens, nothing happens.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

STEADY_S = 2.0
"""Rate and time left are reported after this time: before it they say little."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a piece of work has come."""

    doing: str
    """For example `sampling`, `loading the model`."""
    done: int = 0
    total: int = 0
    """0: not known."""
    unit: str = ""
    share: float | None = None
    """How much is done, from 0 to 1; None: as `done` of `total` say."""
    figures: str = ""
    """For example `340 tokens/s`; several are separated by commas, the most important one first."""
    left_s: float | None = None
    step: str = ""
    """Label of the step; empty outside of one."""
    number: int = 0
    """Of the step in its run, from 1."""
    steps: int = 0
    """Steps of the run; 0: not known."""

    @property
    def percent(self) -> float:
        """From 0 to 100; 0 where the total is not known."""
        share = self.share if self.share is not None else self.done / self.total if self.total else 0.0
        return round(min(100.0, max(0.0, 100 * share)), 1)

    def line(self, width: int = 79) -> str:
        """One line: `3/14 probe_rewards: sampling 12/64 completions, 340 tokens/s, 2 min left`."""
        number = f"{self.number}/{self.steps}" if self.steps else ""
        head = " ".join(filter(None, [number, self.step]))
        count = f"{self.done:,}/{self.total:,}" if self.total else f"{self.done:,}" if self.done else ""
        left = "" if self.left_s is None else f"{duration(self.left_s)} left"
        figures = self.figures.split(", ") if self.figures else []
        for unit, kept in ((self.unit, len(figures)), *(("", kept) for kept in range(len(figures), -1, -1))):
            work = " ".join(filter(None, [self.doing, count, unit if count else ""]))
            text = ": ".join(filter(None, [head, ", ".join(filter(None, [work, *figures[:kept], left]))]))
            if len(text) <= width:
                return text
        return f"{text[: width - 3]}..."


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them: `40 s`, `12 min`, `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


Listener = Callable[[Progress], object]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within the block the listener gets every report, instead of the one around it."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def listener() -> Listener | None:
    """Who listens here; None: nobody."""
    return _listener.get()


def report(progress: Progress) -> None:
    """Tell the listener."""
    if (found := _listener.get()) is not None:
        found(progress)


class Count:
    """Counts one piece of work for the listener of the place where it began; threads may add to it."""

    def __init__(self, doing: str, total: int = 0, unit: str = "") -> None:
        self._progress, self._listener = Progress(doing, total=total, unit=unit), _listener.get()
        self._began, self._tokens = time.monotonic(), 0
        self._tell()

    def add(self, done: int = 1, *, tokens: int = 0, begun: float = 0.0) -> None:
        """Count what was done since the last call, and how much of the next ones is `begun`, in the same unit."""
        self._tokens += tokens
        done, total = self._progress.done + done, self._progress.total
        self._progress = replace(self._progress, done=done, share=(done + begun) / total if begun and total else None)
        self._tell()

    def _tell(self) -> None:
        if self._listener is None:
            return
        spent_s, share = time.monotonic() - self._began, self._progress.percent / 100
        steady = spent_s >= STEADY_S
        left_s = spent_s * (1 - share) / share if steady and 0 < share < 1 else None
        figures = f"{self._tokens / spent_s:.0f} tokens/s" if steady and self._tokens else ""
        self._listener(replace(self._progress, figures=figures, left_s=left_s))

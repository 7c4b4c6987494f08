"""Shows what a command does until it prints its result: the last line of the terminal, or a line now and then in a pipe."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TextIO

from grpo_tasks.kit.progress import Progress, duration, listening
from schemas.secret import hide_output

PAINT_S = 0.5
LINE_S = 25.0
"""Seconds between two lines in a pipe."""
HALF_LINE_S = 3.0
"""Seconds after which a line that somebody has left without an end gets one."""
SPINNER = "|/-\\"
_ERASE = "\r\x1b[2K"


@contextmanager
def shown_progress(doing: str) -> Iterator[None]:
    """Show on stderr how far the work of the block has come. A thread does it, so also while nothing is reported."""
    # Of the streams themselves: those that take their place are gone afterwards.
    hide_output()
    shown, ended = _Shown(doing), threading.Event()
    stderr, stdout = sys.stderr, sys.stdout
    in_terminal = stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show() -> None:
        while not ended.wait(PAINT_S if in_terminal else LINE_S):
            # The terminal may be gone, or nobody reads the pipe any more: that is no fault of the work.
            with suppress(OSError):
                if in_terminal:
                    line.paint(shown.line(line.width))
                else:
                    print(shown.line(), file=stderr, flush=True)

    line = _BottomLine(stderr)
    thread = threading.Thread(target=show, name="progress", daemon=True)
    if in_terminal:
        # Whoever prints meanwhile prints above the line, also log handlers, which take the stream once.
        sys.stderr = _Above(stderr, line)
        if stdout.isatty():
            sys.stdout = _Above(stdout, line)
    thread.start()
    try:
        with listening(shown.hear):
            yield
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            line.erase()
        sys.stderr, sys.stdout = stderr, stdout


class _Shown:
    """The latest progress, and when its work began."""

    def __init__(self, doing: str) -> None:
        self._progress, self._began, self._heard = Progress(doing), time.monotonic(), time.monotonic()

    def hear(self, progress: Progress) -> None:
        now = time.monotonic()
        if (progress.step, progress.doing) != (self._progress.step, self._progress.doing):
            self._began = now
        self._progress, self._heard = progress, now

    def line(self, width: int = 79) -> str:
        now, progress = time.monotonic(), self._progress
        if progress.left_s is None:
            return f"{progress.line(width - 9)}, {duration(now - self._began)}"
        # It goes down while the next report is awaited.
        return replace(progress, left_s=max(0.0, progress.left_s - (now - self._heard))).line(width)


class _BottomLine:
    """The last line of the terminal, below everything that is printed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock, self._painted, self._turn = stream, threading.RLock(), False, 0
        self._free, self._written = True, 0.0

    @property
    def width(self) -> int:
        """Columns without the spinner and the last one, in which some terminals break the line."""
        try:
            return max(20, os.get_terminal_size(self._stream.fileno()).columns - 3)
        except OSError:
            return 77

    def paint(self, text: str) -> None:
        """Show the line, unless somebody is in the middle of one."""
        with self._lock:
            if not self._free and time.monotonic() - self._written >= HALF_LINE_S:
                self.print(self._stream, "\n")
            if self._free:
                self._turn += 1
                self._stream.write(f"{_ERASE}{SPINNER[self._turn % len(SPINNER)]} {text}")
                self._stream.flush()
                self._painted = True

    def erase(self) -> None:
        with self._lock:
            if self._painted:
                self._stream.write(_ERASE)
                self._stream.flush()
                self._painted = False

    def print(self, stream: TextIO, text: str) -> int:
        with self._lock:
            self.erase()
            self._free, self._written = text.endswith("\n") if text else self._free, time.monotonic()
            return stream.write(text)


class _Above:
    """A stream of the terminal whose text comes above the line."""

    def __init__(self, stream: TextIO, line: _BottomLine) -> None:
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        return self._line.print(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

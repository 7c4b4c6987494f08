"""Signals that end a process: each becomes an exception, so that what the process holds is released and recorded.

SIGTERM, SIGHUP  Python would end at once, and MLflow would show the run as running for ever
SIGINT           the same exception; a command says a word first, because its end may take seconds
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

Handler = Callable[[int, FrameType | None], Any]
STOPPING = "stopping; what is finished stays"


class Signalled(KeyboardInterrupt):
    """A signal asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number

    def end_process(self) -> NoReturn:
        """End this process by the same signal: whoever started it sees by what it ended."""
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(self.number, signal.SIG_DFL)
        os.kill(os.getpid(), self.number)
        raise AssertionError


@contextmanager
def ended_by(*numbers: int, said: str = "") -> Iterator[None]:
    """Within the block these signals raise, unless they are ignored (`nohup`) or somebody else handles them.

    `said` goes to the standard error output at once, before anything is released.
    """

    def handle(number: int, _: FrameType | None) -> NoReturn:
        if said:
            # Not print: the signal may have interrupted one.
            os.write(2, f"{said}\n".encode())
        raise Signalled(number)

    free = [number for number in numbers if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)]
    with handled(dict.fromkeys(free, handle)):
        yield


@contextmanager
def handled(handlers: dict[int, Handler]) -> Iterator[None]:
    """Handle signals in this way within the block. Only the main thread can; in any other nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep signals that end the process until the block is over: it starts something and notes it, or does neither."""
    held: list[int] = []
    with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda number, _: held.append(number))):
        yield
    if held:
        os.kill(os.getpid(), held[0])

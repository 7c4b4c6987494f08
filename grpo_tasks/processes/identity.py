"""A process identified by its pid and its start time.

The kernel reuses the pid of a process that has ended. A pid that is written down to find the process later is therefore written
down together with the start time, which no other process with that pid shares.
"""

from dataclasses import dataclass
from typing import Self

import psutil

TOLERANCE_S = 1.0
"""Start times are computed from the time of the last boot, which moves a little when the clock is adjusted."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of this machine, past or present."""

    pid: int
    born: float
    """Start time in seconds since the epoch."""

    @classmethod
    def of(cls, pid: int | None = None) -> Self:
        """The identity of a running process, by default of this one.

        Raises:
            psutil.NoSuchProcess: there is none with this pid.
        """
        process = psutil.Process(pid)
        return cls(process.pid, process.create_time())

    def process(self) -> psutil.Process | None:
        """The process; None when it has ended, even if another one has its pid now or its parent has not collected it yet."""
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.born) < TOLERANCE_S
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process() is not None

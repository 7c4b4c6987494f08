"""The limits of a judge: requests at the same time, requests per minute, and cost, over all processes that share a cache folder.

    turn(cost)   a row of the table `sending` from before the request until its cost is recorded: the requests in flight
    pace()       the table `paced` says when the last request was sent

Each rank of a stage has a judge of its own, and so have the lab and parallel runs. They meet in verdicts.sqlite. Rows of a
process that has ended do not count. A folder belongs to one machine: where the ranks of a stage are on several, each machine gets
its share of the limits.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from grpo_tasks.judging.store import VerdictStore
from grpo_tasks.processes.lifetime import ProcessIdentity
from schemas.config.rewards import JudgeConfig
from schemas.errors import JudgeUnavailableError

POLL_S = 0.2
LOCAL_RANKS = "GRPO_LOCAL_RANKS"
"""Environment variable with the number of ranks on this machine; torchrun's is LOCAL_WORLD_SIZE."""
_TABLES = (
    "sending (number INTEGER PRIMARY KEY, cost REAL NOT NULL, pid INTEGER NOT NULL, born REAL NOT NULL)",
    "paced (sent REAL NOT NULL)",
)


def machine_share() -> float:
    """The share of the ranks of this stage that are on this machine; 1 outside a stage."""
    local = os.environ.get(LOCAL_RANKS) or os.environ.get("LOCAL_WORLD_SIZE")
    ranks = os.environ.get("WORLD_SIZE")
    try:
        return min(1.0, int(local) / int(ranks)) if local and ranks else 1.0
    except (ValueError, ZeroDivisionError):
        return 1.0


@dataclass(slots=True)
class JudgeLimits:
    """The limits of one judge; safe for threads and processes."""

    judge: JudgeConfig
    store: VerdictStore
    sleep: Callable[[float], None] = time.sleep
    _own: ProcessIdentity = field(init=False, default_factory=ProcessIdentity.of)
    _share: float = field(init=False, default_factory=machine_share)

    def __post_init__(self) -> None:
        with self.store.writing() as base:
            for table in _TABLES:
                base.execute(f"CREATE TABLE IF NOT EXISTS {table}")

    @property
    def concurrency(self) -> int:
        """Requests that may be in flight on this machine."""
        return max(1, int(self.judge.max_concurrency * self._share))

    @contextmanager
    def turn(self, cost: float) -> Iterator[None]:
        """Wait until one more request may be in flight; the block sends it and records what it cost.

        Args:
            cost: the most that it is expected to cost.

        Raises:
            JudgeUnavailableError: it could exceed `max_cost`, and nothing in flight can change that.
        """
        while (number := self._enter(cost)) is None:
            self.sleep(POLL_S)
        try:
            yield
        finally:
            with self.store.writing() as base:
                base.execute("DELETE FROM sending WHERE number = ?", (number,))

    def pace(self) -> None:
        """Wait until the limit of requests per minute allows another one."""
        limit = self.judge.max_requests_per_minute
        if limit is None:
            return
        while (wait := self._next_slot(60.0 / (limit * self._share))) > 0.0:
            self.sleep(wait)

    def _enter(self, cost: float) -> int | None:
        """The number of the row of a request; None while there is no room for it."""
        with self.store.writing() as base:
            # What a process had in flight that has ended counts no more.
            for pid, born in base.execute("SELECT DISTINCT pid, born FROM sending").fetchall():
                owner = ProcessIdentity(pid, born)
                if owner != self._own and not owner.is_running():
                    base.execute("DELETE FROM sending WHERE pid = ? AND born = ?", (pid, born))
            num, reserved = base.execute("SELECT COUNT(*), COALESCE(SUM(cost), 0.0) FROM sending").fetchone()
            if self.judge.max_cost is not None:
                limit, spent = self.judge.max_cost * self._share, self.store.spent()
                if spent + reserved + cost > limit:
                    if num == 0:
                        raise JudgeUnavailableError(
                            f"the judge {self.judge.model} may not be asked: {spent:.4g} is spent, the next request may cost "
                            f"{cost:.4g}, and judge.max_cost is {limit:g}" + " on this machine" * (self._share != 1.0),
                            place=str(self.judge.cache),
                            fix="raise judge.max_cost and start the same command again: the stage resumes, and verdicts so far "
                            "are kept",
                        )
                    # What is in flight may cost less than expected.
                    return None
            if num >= self.concurrency:
                return None
            row = (cost, self._own.pid, self._own.born)
            return base.execute("INSERT INTO sending (cost, pid, born) VALUES (?, ?, ?)", row).lastrowid

    def _next_slot(self, interval_s: float) -> float:
        """Take the next slot and return 0, or return the seconds until it."""
        with self.store.writing() as base:
            now, row = time.time(), base.execute("SELECT sent FROM paced").fetchone()
            # Judges with other limits may share the folder, so what counts is when the last request was sent. It was never
            # sent later than now, unless somebody has set the clock back.
            if row is not None and row[0] <= now < row[0] + interval_s:
                return float(row[0]) + interval_s - now
            base.execute("DELETE FROM paced")
            base.execute("INSERT INTO paced VALUES (?)", (now,))
            return 0.0

"""Every reply of a judge on disk, and the limits of all processes that share the folder: verdicts.sqlite.

`verdicts` has a row for each reply, with its prompt and cost: the cache, the record and the account. `sending` has one from
before a request until its cost is recorded, and `paced` when the last one was sent. A sound verdict is found again by its key
(frame.py). Malformed replies are kept as a record and never found. Each rank of a stage has a judge of its own, and so have the
lab and parallel runs; they meet here. Rows of a process that has ended do not count. A folder belongs to one machine: where the
ranks of a stage are on several, each machine gets its share of the limits.
"""

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grpo_tasks.processes.lifetime import ProcessIdentity
from schemas.config.rewards import JudgeConfig
from schemas.errors import JudgeUnavailableError, RewardError

FILE = "verdicts.sqlite"
_BUSY_S = 60.0
_TABLES = (
    "verdicts (number INTEGER PRIMARY KEY, key TEXT NOT NULL, created REAL NOT NULL, model TEXT NOT NULL, vote INTEGER NOT NULL,"
    " messages TEXT NOT NULL, reply TEXT NOT NULL, problem TEXT NOT NULL,"
    " prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, cost REAL NOT NULL)",
    "sending (number INTEGER PRIMARY KEY, cost REAL NOT NULL, pid INTEGER NOT NULL, born REAL NOT NULL)",
    "paced (sent REAL NOT NULL)",
)
POLL_S = 0.2
LOCAL_RANKS = "GRPO_LOCAL_RANKS"
"""Environment variable with the number of ranks on this machine; torchrun's is LOCAL_WORLD_SIZE."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One reply."""

    key: str
    model: str
    vote: int
    messages: list[dict[str, str]]
    reply: str
    problem: str
    """Why it is no verdict; empty for a sound one."""
    prompt_tokens: int
    completion_tokens: int
    cost: float


class VerdictStore:
    """The verdicts in a folder; safe for threads."""

    def __init__(self, folder: Path) -> None:
        # Entered again by what is called inside `writing`.
        self._lock = threading.RLock()
        self._spent, self._counted = 0.0, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(folder / FILE, timeout=_BUSY_S, check_same_thread=False, isolation_level=None)
            self._base.execute("PRAGMA journal_mode=WAL")
            # A power cut may cost the last verdicts, never the file; a killed process costs none.
            self._base.execute("PRAGMA synchronous=NORMAL")
            for table in _TABLES:
                self._base.execute(f"CREATE TABLE IF NOT EXISTS {table}")
            self._base.execute("CREATE INDEX IF NOT EXISTS by_key ON verdicts (key)")
        except (sqlite3.Error, OSError) as error:
            raise RewardError(
                f"the verdicts cannot be read: {error}",
                place=str(folder / FILE),
                fix="name another folder in judge.cache, or move the damaged file away: its verdicts are asked for again",
            ) from error

    def find(self, key: str) -> str | None:
        """The reply with a sound verdict, or None."""
        with self._lock:
            row = self._base.execute("SELECT reply FROM verdicts WHERE key = ? AND problem = '' LIMIT 1", (key,)).fetchone()
        return None if row is None else str(row[0])

    def add(self, entry: Entry) -> None:
        """Record a reply."""
        # SQLite takes no lone surrogates.
        reply = entry.reply.encode(errors="backslashreplace").decode()
        values = asdict(entry) | {"created": time.time(), "messages": json.dumps(entry.messages), "reply": reply}
        with self._lock:
            self._base.execute(
                f"INSERT INTO verdicts ({', '.join(values)}) VALUES ({', '.join(f':{name}' for name in values)})",  # noqa: S608
                values,
            )

    def spent(self) -> float:
        """The cost of everything in the folder. Only what is new since the last call is summed."""
        with self._lock:
            query = "SELECT COALESCE(SUM(cost), 0.0), MAX(number) FROM verdicts WHERE number > ?"
            cost, last = self._base.execute(query, (self._counted,)).fetchone()
            self._spent, self._counted = self._spent + cost, last or self._counted
            return self._spent

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other thread or process writes during."""
        with self._lock:
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield self._base
            except BaseException:
                self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._base.close()


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

    @property
    def concurrency(self) -> int:
        """Requests that may be in flight on this machine."""
        return max(1, int(self.judge.max_concurrency * self._share))

    @contextmanager
    def turn(self, cost: float) -> Iterator[None]:
        """Wait until one more request may be in flight; the block sends it and records what it cost.

        `JudgeUnavailableError` where `cost`, the most that it may cost, could exceed `max_cost`, whatever those in flight cost.
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
        interval_s = 60.0 / (limit * self._share)
        while True:
            with self.store.writing() as base:
                now, row = time.time(), base.execute("SELECT sent FROM paced").fetchone()
                # Judges with other limits may share the folder, so what counts is when the last request was sent. It was never
                # sent later than now, unless somebody has set the clock back.
                if row is None or not row[0] <= now < row[0] + interval_s:
                    base.execute("DELETE FROM paced")
                    base.execute("INSERT INTO paced VALUES (?)", (now,))
                    return
            self.sleep(row[0] + interval_s - now)

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

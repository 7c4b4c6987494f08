"""Every reply of a judge on disk, with its prompt and its cost: the cache, the record and the account in one file.

    verdicts.sqlite    key, created, model, vote, messages, reply, problem, prompt_tokens, completion_tokens, cost

A sound verdict is found again by its key (frame.py). Malformed replies are kept as a record and never found. Several processes
of one machine may use one folder; limits.py counts what they have in flight.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import RewardError

FILE = "verdicts.sqlite"
_BUSY_S = 60.0
_TABLE = """
CREATE TABLE IF NOT EXISTS verdicts (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, created REAL NOT NULL, model TEXT NOT NULL, vote INTEGER NOT NULL,
    messages TEXT NOT NULL, reply TEXT NOT NULL, problem TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, cost REAL NOT NULL
)"""


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
            self._base.execute(_TABLE)
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
        values = (entry.key, time.time(), entry.model, entry.vote, json.dumps(entry.messages), reply)
        counts = (entry.problem, entry.prompt_tokens, entry.completion_tokens, entry.cost)
        with self._lock:
            self._base.execute(
                "INSERT INTO verdicts (key, created, model, vote, messages, reply,"
                " problem, prompt_tokens, completion_tokens, cost) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, *counts),
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

"""The requests of one call of the pool: which wait, which run where, and the answers so far.

Every request has an index. The first answer of an index counts, and later ones are ignored. So a request that was given to a
second replica is answered exactly once.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from grpo_tasks.replicas.replica import ServerT

Job = TypeVar("Job")
Answer = TypeVar("Answer")


@dataclass(slots=True)
class RequestBatch(Generic[ServerT, Job, Answer]):
    """Requests that are being answered."""

    jobs: list[Job]
    ask: Callable[[ServerT, Job], Answer]
    """Asks a server; called from other threads."""
    tokens: Callable[[Answer], int]
    """Number of tokens of an answer."""
    waiting: deque[int] = field(init=False)
    """Indices that no replica has, in order."""
    answers: dict[int, Answer] = field(default_factory=dict)
    running: dict[int, dict[int, float]] = field(default_factory=dict)
    """For each index the numbers of the replicas that have it, with the times (s) at which they got it."""
    lagging: set[int] = field(default_factory=set)
    """Numbers of the replicas that had a request first and were beaten by another one."""
    slowest_s: float = 0.0
    """Longest time that an answered request took."""
    error: BaseException | None = None
    """A failure that no other replica can repair."""
    began: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    """Sum over the waiting requests of the time (s) that they waited."""
    _seen: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.waiting = deque(range(len(self.jobs)))

    @property
    def complete(self) -> bool:
        """True if every request has an answer."""
        return len(self.answers) == len(self.jobs)

    def start(self, index: int, replica: int) -> None:
        """A replica gets a request."""
        self.running.setdefault(index, {})[replica] = time.monotonic()

    def answered(self, index: int, replica: int, answer: Answer) -> bool:
        """A replica answers a request; True if it is the first answer."""
        holders = self.running.get(index, {})
        began = holders.pop(replica, None)
        if index in self.answers:
            return False
        if began is not None:
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.lagging |= {other for other, earlier in holders.items() if earlier < began}
        self.answers[index] = answer
        return True

    def give_back(self, index: int, replica: int) -> None:
        """A replica did not answer a request; it waits again, first in the queue, unless another replica has or answered it."""
        holders = self.running.get(index, {})
        held = holders.pop(replica, None) is not None
        if held and not holders and index not in self.answers:
            self.waiting.appendleft(index)

    def give_all_back(self, replica: int) -> None:
        """A replica was taken out: all of its requests wait again."""
        for index in sorted(self.running, reverse=True):
            self.give_back(index, replica)

    def measure(self) -> None:
        """Add the time since the last call to that of the waiting requests."""
        now = time.monotonic()
        self.waited += len(self.waiting) * (now - self._seen)
        self._seen = now

    def late(self, factor: float, least_s: float) -> list[int]:
        """Requests that one replica has for much longer than any answered request took."""
        if not self.answers:
            return []
        limit, now = max(least_s, factor * self.slowest_s), time.monotonic()
        return [
            index
            for index, holders in self.running.items()
            if len(holders) == 1 and index not in self.answers and now - next(iter(holders.values())) > limit
        ]

"""One replica as the pool sees it: its state, its limit of concurrent requests, and what it has delivered.

serving  --fails or lags-->  out  --healthy again or restarted-->  up  --admitted-->  serving
                              |
                              +--failed too often, or unreachable-->  gone   (an unreachable one is tried again)
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

from schemas.errors import RolloutError

MAX_BUSY = 3
"""Decreases of the limit without an answer in between after which a replica is left out."""


class Server(Protocol):
    """What the pool has to know of a server."""

    address: str
    own: bool
    """True if it was started here, and can be started again here."""

    def restart(self) -> None:
        """Start it again; raises RolloutError where that is not possible."""


ServerT = TypeVar("ServerT", bound=Server)


class State(Enum):
    """Whether a replica takes requests."""

    UP = "up"
    """It runs, and has to be admitted: it may serve another policy."""
    ADMITTING = "admitting"
    SERVING = "serving"
    OUT = "out"
    """It failed or lagged; a thread examines it and starts it again."""
    GONE = "gone"
    """It is not used any more, unless `retry_at` is set."""


@dataclass(slots=True)
class Concurrency:
    """How many requests a replica gets at once: additive increase, multiplicative decrease (as in TCP, RFC 5681).

    The limit starts at `most`. An overloaded replica (time limit exceeded, status 429 or 503) gets half of it. Every answer adds
    1 / limit, so the limit rises by one when all requests of a full load were answered.
    """

    most: int
    limit: float = field(init=False)
    busy: int = 0
    """Decreases since the last answer."""
    _decreased: float = -1.0

    def __post_init__(self) -> None:
        self.limit = float(self.most)

    def answered(self) -> None:
        """A request was answered."""
        self.limit, self.busy = min(self.most, self.limit + 1 / self.limit), 0

    def overloaded(self, began: float, now: float) -> None:
        """A request that began at `began` (s) found the replica overloaded."""
        # Requests that were sent before the last decrease say nothing about the limit of now.
        if began > self._decreased:
            self.limit, self._decreased, self.busy = max(1.0, self.limit / 2), now, self.busy + 1

    @property
    def exhausted(self) -> bool:
        """True if fewer requests did not help."""
        return self.busy >= MAX_BUSY


@dataclass(slots=True)
class Replica(Generic[ServerT]):
    """A server in a pool."""

    number: int
    server: ServerT
    concurrency: Concurrency
    state: State = State.UP
    in_flight: int = 0
    life: int = 0
    """Counts how often it was taken out. What a request of an earlier life reports about the replica is ignored."""
    failures: int = 0
    """Times it failed or lagged."""
    fault: RolloutError | None = None
    """Why it is not serving."""
    retry_at: float | None = None
    """When (s) a replica that is gone is tried again."""
    tokens: int = 0
    """Tokens delivered since the last report."""

    @property
    def has_room(self) -> bool:
        """True if it takes another request now."""
        return self.state is State.SERVING and self.in_flight < int(self.concurrency.limit)

    @property
    def load(self) -> float:
        """Requests in flight, as a share of its limit."""
        return self.in_flight / self.concurrency.limit

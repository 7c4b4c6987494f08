"""One queue of requests for several replicas.

    requests --queue--> the least loaded replica --answers--> in the order of the requests
                  ^                |
                  +--given back----+ fails or lags: taken out -> restarted -> admitted (loads the policy, probe) -> serving

A request carries its seed, so a replica that fails changes the time that a batch takes, and not its content. New weights are a
new admission. Threads, one for each request in flight and for each replica that restarts, only change state under the condition
`_changed`; they are daemons, because a server that hangs must not keep the process alive.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Generic, TypeVar

from grpo_tasks.replicas.replica import Concurrency, Replica, ServerT, State
from schemas.errors import RolloutError, ServerBusyError, ServerGoneError
from schemas.metrics import QUEUE_DEPTH, REPLICA_TOKENS_PER_S, REPLICAS_SERVING, member

Job = TypeVar("Job")
Answer = TypeVar("Answer")
TICK_S = 0.2
"""Longest wait between two looks at the clock; every answer and failure wakes the queue at once."""
log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """When the pool gives up on a replica."""

    concurrency: int
    """Most requests that a replica gets at once."""
    max_restarts: int
    """How often a replica that failed is admitted again."""
    lag_factor: float = 4.0
    """A request is late when it takes this many times as long as the slowest answered request of its batch ..."""
    lag_s: float = 10.0
    """... and longer than this (s). It is then given to an idle replica too."""
    drain_s: float = 60.0
    """Longest wait (s) for a request whose answer is not needed any more, before new weights are loaded."""
    retry_s: float = 10.0
    """Time between two attempts to reach a server that was not started here."""
    patience_s: float = 0.0
    """How long (s) to wait for a server to come back or to join when none is left; 0 gives up at once."""


class Pool(Generic[ServerT]):
    """Replicas that share a queue.

    Args:
        servers: the first replicas; `add` adds more.
        limits: when a replica is taken out.
        healthy: whether a server answers; called from other threads.
        admit: hand the present policy to a server and verify that it serves it; raises RolloutError if it does not.
    """

    def __init__(
        self,
        servers: Sequence[ServerT],
        limits: PoolLimits,
        *,
        healthy: Callable[[ServerT], bool],
        admit: Callable[[ServerT], None],
    ) -> None:
        self._limits, self._healthy, self._admit = limits, healthy, admit
        self._changed = Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._events: list[str] = []
        self._seconds = self._waited = 0.0
        self._fewest: int | None = None
        self._alone_since: float | None = None
        self._policy = 0
        """Counts the calls of `refresh`, each for another policy."""
        self.replicas: list[Replica[ServerT]] = []
        for server in servers:
            self.add(server)

    @property
    def serving(self) -> list[ServerT]:
        """The servers that serve the present policy."""
        with self._changed:
            return [replica.server for replica in self.replicas if replica.state is State.SERVING]

    @property
    def servers(self) -> list[ServerT]:
        """All servers, whatever their state."""
        with self._changed:
            return [replica.server for replica in self.replicas]

    def add(self, server: ServerT) -> None:
        """A server joins; it takes requests as soon as it was admitted, also of a batch that is being answered."""
        with self._changed:
            number = len(self.replicas)
            self.replicas.append(Replica(number, server, Concurrency(self._limits.concurrency)))
            self._changed.notify_all()

    def refresh(self) -> None:
        """Admit every replica again, because the policy has changed; those that are being restarted follow later.

        Raises:
            RolloutError: no replica is left.
        """
        with self._changed:
            # An admission in progress may load the policy before this one; it is repeated.
            self._policy += 1
            # A request that was given to a second replica may still be running on the first one, which must not change its
            # weights meanwhile.
            self._changed.wait_for(self._idle, self._limits.drain_s)
            self._leave_out_the_late(self.replicas)
            for replica in self.replicas:
                if replica.state is State.SERVING:
                    replica.state = State.UP
            while self._count(State.UP, State.ADMITTING) or not self._count(State.SERVING):
                self._tend(None)
                self._changed.wait(TICK_S)

    def run(
        self, jobs: Sequence[Job], ask: Callable[[ServerT, Job], Answer], tokens: Callable[[Answer], int] = lambda _: 0
    ) -> list[Answer]:
        """The answers to all requests, in order.

        Args:
            jobs: the requests.
            ask: asks a server; called from other threads. ServerGoneError and ServerBusyError concern the server, so the request
                is given to another one. Every other error ends the batch.
            tokens: number of tokens of an answer, for the metrics.

        Raises:
            RolloutError: a server refuses a request, or no replica is left.
        """
        batch = RequestBatch(list(jobs), ask, tokens)
        with self._changed:
            while not batch.complete and batch.error is None:
                self._tend(batch)
                self._dispatch(batch)
                self._changed.wait(TICK_S)
                batch.measure()
            if batch.error is None:
                self._leave_out_the_late(self.replicas[number] for number in batch.lagging)
            self._seconds += time.monotonic() - batch.began
            self._waited += batch.waited
        if batch.error is not None:
            raise batch.error
        return [batch.answers[index] for index in range(len(batch.jobs))]

    def take_figures(self) -> dict[str, float]:
        """Metrics since the last call, by the names of schemas/metrics.py."""
        with self._changed:
            if self._seconds == 0.0:
                return {}
            figures = {
                member(REPLICA_TOKENS_PER_S, str(replica.number)): replica.tokens / self._seconds for replica in self.replicas
            }
            figures[QUEUE_DEPTH] = self._waited / self._seconds
            figures[REPLICAS_SERVING] = float(self._count(State.SERVING) if self._fewest is None else self._fewest)
            self._seconds = self._waited = 0.0
            self._fewest = None
            for replica in self.replicas:
                replica.tokens = 0
        return figures

    def take_events(self) -> list[str]:
        """What happened to replicas since the last call, as sentences."""
        with self._changed:
            events, self._events = self._events, []
        return events

    def take_out(self, server: ServerT, fault: RolloutError) -> None:
        """A server failed outside of a batch."""
        with self._changed:
            for replica in self.replicas:
                if replica.server is server and replica.state in (State.UP, State.ADMITTING, State.SERVING):
                    self._take_out(replica, fault, None)

    def close(self) -> None:
        """Start and admit nothing any more."""
        with self._changed:
            self._closed = True

    def _idle(self) -> bool:
        return all(not replica.in_flight and replica.state is not State.ADMITTING for replica in self.replicas)

    def _count(self, *states: State) -> int:
        return sum(replica.state in states for replica in self.replicas)

    def _tend(self, batch: RequestBatch[ServerT, Job, Answer] | None) -> None:
        """Start what is due: admissions, and new attempts to reach servers; raise when nothing is left to wait for."""
        if self._error is not None:
            raise self._error
        now = time.monotonic()
        for replica in self.replicas:
            if replica.state is State.UP:
                replica.state = State.ADMITTING
                self._start(self._admission, replica, replica.life, self._policy)
            elif replica.state is State.GONE and replica.retry_at is not None and now >= replica.retry_at:
                self._revive(replica)
        serving = self._count(State.SERVING)
        if batch is not None and batch.running:
            self._fewest = serving if self._fewest is None else min(self._fewest, serving)
        if not self._only_retries():
            self._alone_since = None
            return
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since >= self._limits.patience_s:
            faults = [replica.fault for replica in self.replicas if replica.fault is not None]
            raise faults[-1] if faults else RolloutError("the pool has no servers", place="rollout.vllm")

    def _only_retries(self) -> bool:
        """True if every replica is gone or is a foreign one that was unreachable before and is tried again."""
        return all(
            replica.state is State.GONE or (replica.state is State.OUT and replica.retry_at is not None)
            for replica in self.replicas
        )

    def _dispatch(self, batch: RequestBatch[ServerT, Job, Answer]) -> None:
        """Hand out waiting requests; with none left, those of a replica that lags go to idle replicas too."""
        while batch.waiting and (free := [replica for replica in self.replicas if replica.has_room]):
            index = batch.waiting.popleft()
            if index not in batch.answers:
                self._send(_least_loaded(free), index, batch)
        if batch.waiting:
            return
        for index in batch.late(self._limits.lag_factor, self._limits.lag_s):
            free = [replica for replica in self.replicas if replica.has_room and replica.number not in batch.running[index]]
            if free:
                self._send(_least_loaded(free), index, batch)

    def _send(self, replica: Replica[ServerT], index: int, batch: RequestBatch[ServerT, Job, Answer]) -> None:
        batch.start(index, replica.number)
        replica.in_flight += 1
        self._start(self._ask, replica, replica.life, index, batch)

    def _ask(self, replica: Replica[ServerT], life: int, index: int, batch: RequestBatch[ServerT, Job, Answer]) -> None:
        """In a thread of its own: one request."""
        began = time.monotonic()
        try:
            answer = batch.ask(replica.server, batch.jobs[index])
            size = batch.tokens(answer)
        except ServerGoneError as fault:
            with self._changed:
                if self._returned(replica, life):
                    self._failed(replica, began, index, batch, fault)
        except BaseException as error:  # raised again by the thread that waits for the batch
            with self._changed:
                self._returned(replica, life)
                batch.error = error
        else:
            with self._changed:
                if self._returned(replica, life):
                    replica.concurrency.answered()
                # An answer that comes after its replica was taken out is as good as any: its seed decides what it is.
                if batch.answered(index, replica.number, answer):
                    replica.tokens += size

    def _returned(self, replica: Replica[ServerT], life: int) -> bool:
        """A request came back, with or without an answer; True if the replica was not taken out meanwhile."""
        self._changed.notify_all()
        if replica.life != life:
            return False
        replica.in_flight -= 1
        return True

    def _failed(
        self,
        replica: Replica[ServerT],
        began: float,
        index: int,
        batch: RequestBatch[ServerT, Job, Answer],
        fault: ServerGoneError,
    ) -> None:
        batch.give_back(index, replica.number)
        if isinstance(fault, ServerBusyError):
            replica.concurrency.overloaded(began, time.monotonic())
            if not replica.concurrency.exhausted:
                return
        self._take_out(replica, fault, batch)

    def _leave_out_the_late(self, replicas: Iterable[Replica[ServerT]]) -> None:
        for replica in replicas:
            if replica.state is State.SERVING and replica.in_flight:
                fault = ServerGoneError("its requests took much longer than those of the others", place=replica.server.address)
                self._take_out(replica, fault, None)

    def _take_out(self, replica: Replica[ServerT], fault: RolloutError, batch: RequestBatch[ServerT, Job, Answer] | None) -> None:
        """Leave a replica out, give its requests to others, and see what can be done about it."""
        replica.life, replica.in_flight, replica.fault = replica.life + 1, 0, fault
        replica.failures += 1
        if batch is not None:
            batch.give_all_back(replica.number)
        if replica.failures > self._limits.max_restarts:
            replica.state, replica.retry_at = State.GONE, self._next_try(replica)
            self._report(replica, f"is left out after {replica.failures} failures: {fault.message}")
        else:
            self._report(replica, f"is left out: {fault.message}")
            self._revive(replica)

    def _next_try(self, replica: Replica[ServerT]) -> float | None:
        # Somebody else looks after a foreign server, so it may well come back; one that keeps failing is tried less often.
        return None if replica.server.own else time.monotonic() + self._limits.retry_s * max(1, replica.failures)

    def _revive(self, replica: Replica[ServerT]) -> None:
        replica.state = State.OUT
        self._changed.notify_all()
        self._start(self._revival, replica)

    def _revival(self, replica: Replica[ServerT]) -> None:
        """In a thread of its own: make sure that the server runs."""
        fault: RolloutError | None = None
        try:
            if not self._healthy(replica.server):
                replica.server.restart()
        except RolloutError as error:
            fault = error
        except BaseException as error:  # raised again by the thread that waits for the pool
            self._broke(replica, error)
            return
        with self._changed:
            self._changed.notify_all()
            if fault is None:
                replica.state, replica.retry_at = State.UP, None
                replica.concurrency = Concurrency(self._limits.concurrency)
                return
            if replica.retry_at is None:
                self._report(replica, f"cannot be started again: {fault.message}")
            # The cause says why it failed in the first place.
            fault.__cause__ = replica.fault if replica.retry_at is None else fault.__cause__
            replica.fault, replica.state = fault, State.GONE
            replica.retry_at = self._next_try(replica)

    def _admission(self, replica: Replica[ServerT], life: int, policy: int) -> None:
        """In a thread of its own: hand over the present policy."""
        fault: RolloutError | None = None
        try:
            self._admit(replica.server)
        except RolloutError as error:
            fault = error
        except BaseException as error:  # raised again by the thread that waits for the pool
            self._broke(replica, error)
            return
        with self._changed:
            self._changed.notify_all()
            if replica.life != life:
                return
            if isinstance(fault, ServerGoneError):
                self._take_out(replica, fault, None)
            elif policy != self._policy:
                replica.state = State.UP
            elif fault is not None:
                replica.state, replica.fault, replica.retry_at = State.GONE, fault, None
                self._report(replica, f"is left out from now on: {fault.message}")
            else:
                replica.state = State.SERVING
                if replica.fault is not None:
                    self._report(replica, "serves again; the probe shows the present policy")
                    replica.fault = None

    def _broke(self, replica: Replica[ServerT], error: BaseException) -> None:
        with self._changed:
            self._error, replica.state = error, State.GONE
            self._changed.notify_all()

    def _report(self, replica: Replica[ServerT], detail: str) -> None:
        sentence = f"replica {replica.number} ({replica.server.address}) {detail}"
        self._events.append(sentence)
        log.warning("%s", sentence)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        if not self._closed:
            Thread(target=work, args=arguments, daemon=True, name="rollout-replica").start()


def _least_loaded(free: Sequence[Replica[ServerT]]) -> Replica[ServerT]:
    return min(free, key=lambda one: (one.load, one.number))

"""Requests over servers that all answer alike: the least loaded one gets the next, and what one does not answer goes to another.

    serving --busy--> rests, longer each time, then gets one request at a time until it answers
       ^    --gone--> out: examined and restarted --> up: admitted, when it has shown what it serves --+
       +-----------------------------------------------------------------------------------------------+

A completion has its seed, and so has a question to a judge. So it does not matter which server answers, nor how often a request
is sent: a failure changes the time that a batch takes, and not its content. Threads, one for each request in flight and for each
server that is examined or admitted, only change state under the condition `_changed`. They are daemons: a server that hangs must
not keep the process alive.
"""

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Condition, Thread
from typing import Generic, Protocol, TypeVar

from schemas.errors import RolloutError, ServerBusyError, ServerGoneError
from schemas.metrics import QUEUE_DEPTH, REPLICA_TOKENS_PER_S, REPLICAS_SERVING, member

TICK_S = 0.2
"""Longest wait between two readings of the clock; every answer and failure wakes those who wait at once."""
FIRST_COOLDOWN_S, LONGEST_COOLDOWN_S = 1.0, 30.0
"""How long a busy server rests: the first time, and at most. Each time in a row doubles it."""
MOST_BUSY = 3
"""Times in a row that a server is busy, after which it is examined as one that is gone."""
RETRY_S = 10.0
"""Time between two attempts to reach a server of somebody else, times the number of its failures."""
log = logging.getLogger(__name__)


class Server(Protocol):
    """What has to be known of a server."""

    address: str
    own: bool
    """It was started here. Somebody else's server may well come back; one of our own is left out for good."""


ServerT = TypeVar("ServerT", bound=Server)
Job = TypeVar("Job")
Answer = TypeVar("Answer")
State = Enum("State", "UP ADMITTING SERVING OUT GONE")
"""OUT: it failed, and is examined and restarted. GONE: it is not used any more, unless its `retry_at` comes."""


@dataclass(slots=True, eq=False)
class Replica(Generic[ServerT]):
    """A server in a pool."""

    number: int
    server: ServerT
    state: State
    in_flight: int = 0
    sent: int = 0
    busy: int = 0
    cooldown_until: float = 0.0
    failures: int = 0
    changed: float = 0.0
    """When it last failed or came back. How a request fails that was sent before says nothing about it now."""
    fault: RolloutError | None = None
    retry_at: float | None = None
    """When it is examined again; None: it has not been found unreachable."""
    tokens: int = 0
    """Tokens delivered since the last report."""


class Pool(Generic[ServerT]):
    """Servers that share their requests, at most `concurrency` each at once; `add` adds more.

    `admit` is called in a thread before a server gets requests, and after every `refresh`; it raises RolloutError if it must get
    none. None: all servers may be asked at once, and one that fails only rests. `repair` is called in a thread for a server that
    failed, and raises RolloutError if it cannot be brought back. `max_failures` is how often such a server is admitted again,
    `patience_s` how long to wait for one when none is left; 0 gives up at once.
    """

    def __init__(
        self,
        servers: Sequence[ServerT],
        *,
        concurrency: int,
        admit: Callable[[ServerT], None] | None = None,
        repair: Callable[[ServerT], None] = lambda _: None,
        max_failures: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        self.concurrency, self._patience_s = concurrency, patience_s
        self._admit, self._repair, self._max_failures = admit, repair, max_failures
        self._changed = Condition()
        self._error: BaseException | None = None
        self._events: list[str] = []
        self._seconds = self._waited = 0.0
        self._fewest = math.inf
        self._alone_since: float | None = None
        self.replicas: list[Replica[ServerT]] = []
        for server in servers:
            self.add(server)

    @property
    def serving(self) -> list[ServerT]:
        """The servers that take requests."""
        with self._changed:
            return [replica.server for replica in self.replicas if replica.state is State.SERVING]

    def running(self) -> list[ServerT]:
        """The servers that take requests, and those that wait to be admitted; waits for admissions in progress."""
        with self._changed:
            while self._count(State.ADMITTING):
                self._changed.wait(TICK_S)
            return [replica.server for replica in self.replicas if replica.state in (State.SERVING, State.UP)]

    def add(self, server: ServerT) -> None:
        """A server joins; it takes requests as soon as it was admitted, also of a batch that is being answered."""
        with self._changed:
            state = State.SERVING if self._admit is None else State.UP
            self.replicas.append(Replica(len(self.replicas), server, state))
            self._changed.notify_all()

    def refresh(self) -> None:
        """Admit every server again, as what it has to serve has changed, those in repair later; RolloutError if none is left."""
        with self._changed:
            # An admission in progress may be of what was to be served before; it is repeated.
            while self._count(State.ADMITTING):
                self._changed.wait(TICK_S)
            for replica in self.replicas:
                if replica.state is State.SERVING:
                    replica.state = State.UP
            while self._count(State.UP, State.ADMITTING) or not self._count(State.SERVING):
                self._check_replicas()
                self._changed.wait(TICK_S)

    def run(
        self, jobs: Sequence[Job], ask: Callable[[ServerT, Job], Answer], tokens: Callable[[Answer], int] = lambda _: 0
    ) -> list[Answer]:
        """The answers to all requests, in order; `tokens` counts those of an answer, for the metrics.

        `ask` is called from other threads. ServerGoneError and ServerBusyError concern the server, so the request is given to
        another one. Every other error ends the batch, as does RolloutError where no server is left.
        """
        waiting, held = deque(range(len(jobs))), dict[int, Replica[ServerT]]()
        answers, errors, began = dict[int, Answer](), list[BaseException](), time.monotonic()

        def work(index: int, replica: Replica[ServerT]) -> None:
            try:
                answer = self._ask(replica, lambda server: ask(server, jobs[index]))
                size = tokens(answer)
                with self._changed:
                    # An answer that comes after its server was left out is as good as any, and counts once.
                    if index not in answers:
                        answers[index] = answer
                        replica.tokens += size
            except ServerGoneError:
                pass  # another server gets it
            except BaseException as error:  # raised again by the thread that waits for the batch
                errors.append(error)
            with self._changed:
                if held.get(index) is replica:
                    del held[index]
                    if index not in answers:
                        waiting.appendleft(index)
                self._changed.notify_all()

        with self._changed:
            while len(answers) < len(jobs) and not errors:
                self._check_replicas()
                for index in [index for index, replica in held.items() if replica.state is not State.SERVING]:
                    # It may never fail by itself: whoever waits for a machine that is gone waits long.
                    del held[index]
                    waiting.appendleft(index)
                while waiting and (free := self._take()):
                    held[waiting[0]] = free
                    self._waited += time.monotonic() - began
                    Thread(target=work, args=(waiting.popleft(), free), daemon=True, name="request").start()
                self._fewest = min(self._fewest, self._count(State.SERVING)) if held else self._fewest
                self._changed.wait(TICK_S)
            self._seconds += time.monotonic() - began
        if errors:
            raise errors[0]
        return [answers[index] for index in range(len(jobs))]

    def answer(self, ask: Callable[[ServerT], Answer]) -> Answer:
        """The answer to one request, for any thread; `ask` as for `run`. RolloutError if none is left, or for `patience_s`."""
        while True:
            with self._changed:
                while (free := self._take()) is None:
                    self._check_replicas()
                    self._changed.wait(TICK_S)
            try:
                return self._ask(free, ask)
            except ServerGoneError:
                continue

    def take_report(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """Metrics since the last call, by the names of schemas/metrics.py, and what happened to servers, as sentences."""
        with self._changed:
            figures, events = dict[str, float](), tuple(self._events)
            if self._seconds:
                for replica in self.replicas:
                    figures[member(REPLICA_TOKENS_PER_S, str(replica.number))] = replica.tokens / self._seconds
                    replica.tokens = 0
                figures[QUEUE_DEPTH] = self._waited / self._seconds
                figures[REPLICAS_SERVING] = float(min(self._fewest, len(self.replicas)))
            self._seconds, self._waited, self._fewest, self._events = 0.0, 0.0, math.inf, []
        return figures, events

    def take_out(self, server: ServerT, fault: RolloutError) -> None:
        """A server failed outside of a request."""
        with self._changed:
            for replica in self.replicas:
                if replica.server is server and replica.state is State.SERVING:
                    self._leave_out(replica, fault)

    def _count(self, *states: State) -> int:
        return sum(replica.state in states for replica in self.replicas)

    def _take(self) -> Replica[ServerT] | None:
        """The least loaded server that has room for a request, which it now holds."""
        now = time.monotonic()
        free = [
            replica
            for replica in self.replicas
            if replica.state is State.SERVING and now >= replica.cooldown_until
            if replica.in_flight < (1 if replica.busy else self.concurrency)
        ]
        if not free:
            return None
        chosen = min(free, key=lambda one: (one.in_flight, one.sent))
        chosen.in_flight, chosen.sent = chosen.in_flight + 1, chosen.sent + 1
        return chosen

    def _ask(self, replica: Replica[ServerT], ask: Callable[[ServerT], Answer]) -> Answer:
        sent, fault = time.monotonic(), None
        try:
            return ask(replica.server)
        except ServerGoneError as error:
            fault = error
            raise
        finally:
            with self._changed:
                replica.in_flight -= 1
                if fault is None:
                    replica.busy, self._alone_since = 0, None
                elif replica.state is State.SERVING and sent >= replica.changed:
                    self._failed(replica, fault)
                self._changed.notify_all()

    def _failed(self, replica: Replica[ServerT], fault: ServerGoneError) -> None:
        replica.busy, replica.changed = replica.busy + 1, time.monotonic()
        if self._admit is not None and (replica.busy >= MOST_BUSY or not isinstance(fault, ServerBusyError)):
            self._leave_out(replica, fault)
            return
        # Jitter, so that many threads and processes do not come back at the same moment.
        cooldown_s = min(LONGEST_COOLDOWN_S, FIRST_COOLDOWN_S * 2.0 ** (replica.busy - 1)) * random.uniform(0.5, 1.0)
        replica.cooldown_until, replica.fault = replica.changed + max(cooldown_s, fault.pause_s), fault

    def _leave_out(self, replica: Replica[ServerT], fault: RolloutError) -> None:
        """See what can be done about a server; `run` gives its requests to others."""
        replica.fault, replica.failures, replica.changed = fault, replica.failures + 1, time.monotonic()
        if replica.failures > self._max_failures:
            self._give_up(replica)
            self._report(replica, f"is left out after {replica.failures} failures: {fault.message}")
        else:
            self._report(replica, f"is left out: {fault.message}")
            self._start(replica, State.OUT, self._repair, self._repaired)

    def _give_up(self, replica: Replica[ServerT]) -> None:
        replica.state = State.GONE
        replica.retry_at = math.inf if replica.server.own else time.monotonic() + RETRY_S * max(1, replica.failures)

    def _check_replicas(self) -> None:
        """Start what is due: admissions, and new attempts to reach servers; raise when nothing is left to wait for."""
        if self._error is not None:
            raise self._error
        now = time.monotonic()
        for replica in self.replicas:
            if replica.state is State.UP and self._admit is not None:
                self._start(replica, State.ADMITTING, self._admit, self._admitted)
            elif replica.state is State.GONE and now >= (replica.retry_at or 0.0):
                self._start(replica, State.OUT, self._repair, self._repaired)
        if not all(self._is_lost(replica) for replica in self.replicas):
            self._alone_since = None
            return
        self._alone_since = now if self._alone_since is None else self._alone_since
        if now - self._alone_since >= self._patience_s:
            faults = [replica.fault for replica in self.replicas if replica.fault is not None]
            raise faults[-1] if faults else RolloutError("the pool has no servers", place="rollout.vllm")

    def _is_lost(self, replica: Replica[ServerT]) -> bool:
        """Whether it is only tried again, so that nobody waits for it."""
        if self._admit is None:
            return replica.busy > 0
        return replica.state is State.GONE or (replica.state is State.OUT and replica.retry_at is not None)

    def _start(
        self,
        replica: Replica[ServerT],
        state: State,
        work: Callable[[ServerT], None],
        then: Callable[[Replica[ServerT], RolloutError | None], None],
    ) -> None:
        """Work on a server in a thread; `then` gets why it failed, or None."""

        def run() -> None:
            fault: RolloutError | None = None
            try:
                work(replica.server)
            except RolloutError as error:
                fault = error
            except BaseException as error:  # raised again by the thread that waits for the pool
                self._error = error
            with self._changed:
                if self._error is None:
                    then(replica, fault)
                self._changed.notify_all()

        replica.state = state
        Thread(target=run, daemon=True, name="replica").start()

    def _repaired(self, replica: Replica[ServerT], fault: RolloutError | None) -> None:
        if fault is None:
            replica.state, replica.retry_at = State.UP, None
            return
        if replica.retry_at is None:
            self._report(replica, f"cannot be started again: {fault.message}")
            # It says why it failed in the first place.
            fault.__cause__ = replica.fault
        replica.fault = fault
        self._give_up(replica)

    def _admitted(self, replica: Replica[ServerT], fault: RolloutError | None) -> None:
        if isinstance(fault, ServerGoneError):
            self._leave_out(replica, fault)
        elif fault is not None:
            replica.state, replica.fault, replica.retry_at = State.GONE, fault, math.inf
            self._report(replica, f"is left out from now on: {fault.message}")
        else:
            if replica.fault is not None:
                self._report(replica, "serves again; the probe shows the present policy")
            replica.state, replica.busy, replica.fault, replica.changed = State.SERVING, 0, None, time.monotonic()

    def _report(self, replica: Replica[ServerT], detail: str) -> None:
        sentence = f"replica {replica.number} ({replica.server.address}) {detail}"
        self._events.append(sentence)
        log.warning("%s", sentence)

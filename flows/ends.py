"""What Prefect shows for a run that did not come to its ordinary end, and what the run does when others have ended it.

watched            a run that others have cancelled, ended, suspended or deleted stops as by Ctrl-C; their state stays
require_wanted     asks the same once more, right before something is published; a paused run waits there
recorded_process   a run whose process was killed becomes Crashed when the next run starts in the same folder on the same machine
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort, ObjectNotFound
from prefect.runtime import deployment
from prefect.states import Cancelled, Crashed

from grpo_tasks.kit.files import replacing
from grpo_tasks.processes.lifetime import Handler, ProcessIdentity, ended_by, handled
from grpo_tasks.running.orchestrator import impatient_client, run_logger
from schemas.errors import EndedByOthers

POLL_S = 3.0
CLIENT_SETTINGS = {"timeout": 5.0}
_NOT_FOUND = "Flow run not found"
"""What a Prefect server answers, and a proxy in front of one that is away does not."""


class _LeftAsItIs(EndedByOthers, Abort):
    """The same for Prefect's engine, which sets no state after an `Abort`: it would be Crashed."""


@dataclass(slots=True)
class _Watch:
    """What the thread has found, and whether the main thread still wants to know."""

    of_worker: bool
    """Whether a worker runs it. Asked before: of a run that was deleted, Prefect's runtime knows nothing."""
    found: EndedByOthers | None = None
    over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def watched(flow_run_id: str) -> Iterator[None]:
    """Raise `EndedByOthers` in the block when others have ended the run, whose state Prefect's engine then leaves alone.

    A worker itself stops a run of its own that is being cancelled.
    """
    # Only the main thread can be interrupted; elsewhere the question before publishing has to do.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    run_id, watch, finished = UUID(flow_run_id), _Watch(deployment.id is not None), threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def interrupted(number: int, frame: FrameType | None) -> None:
        if watch.found is not None:
            found, watch.found = watch.found, None
            raise found
        if callable(before):
            before(number, frame)

    handlers: dict[int, Handler] = {signal.SIGINT: interrupted}
    with ended_by(signal.SIGHUP), handled(handlers):
        poll = partial(_poll, run_id, watch, finished)
        # With the context of this thread, so that what it says is in the log of the run.
        threading.Thread(target=partial(copy_context().run, poll), name="watch", daemon=True).start()
        try:
            try:
                yield
            finally:
                with watch.lock:
                    watch.over = True
                finished.set()
        except EndedByOthers as ended:
            last: Any = ended.state
            # Cancelling ends as Cancelled, and a run that was stopped is not Completed.
            if last.is_cancelling() or last.is_completed():
                said = "cancelled while it ran" if last.is_cancelling() else f"set to {last.name} while it ran: it was stopped"
                last = Cancelled(message=said)
                with suppress(Exception), impatient_client() as client:
                    client.set_flow_run_state(run_id, last, force=True)
            raise _LeftAsItIs(str(ended), last, failed=ended.failed) from None


def _poll(run_id: UUID, watch: _Watch, finished: threading.Event) -> None:
    with impatient_client() as client:
        while not finished.wait(POLL_S):
            # A server that is away, or that fails, has ended nothing.
            with suppress(Exception):
                ended = _ended(client, run_id)
                state: Any = ended and ended.state
                # A worker kills the processes of a run that is being cancelled, and sets its last state.
                if ended is None or (watch.of_worker and state.is_cancelling()):
                    continue
                with watch.lock:
                    if not watch.over:
                        run_logger().warning("%s: it stops", ended)
                        watch.found = ended
                        # A real signal: it also interrupts a request that waits for an answer.
                        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return


def _ended(client: SyncPrefectClient, run_id: UUID) -> EndedByOthers | None:
    """Who reads this is the run itself: a state of an ended run is the work of others."""
    try:
        state = client.read_flow_run(run_id).state
    except ObjectNotFound as error:
        answer = getattr(error.http_exc, "response", None)
        if answer is None or _NOT_FOUND not in answer.text:
            raise
        return EndedByOthers("the run was deleted in Prefect", Cancelled(message="deleted while it ran"))
    # A worker will start a suspended run again when it is resumed; a paused one is to wait in its process.
    suspended = state is not None and state.is_paused() and state.state_details.pause_reschedule
    if state is None or not (state.is_final() or state.is_cancelling() or suspended):
        return None
    said = f" ({state.message})" if state.message else ""
    return EndedByOthers(f"the run was set to {state.name} in Prefect while it ran{said}", state, failed=state.is_failed())


def require_wanted(flow_run_id: str) -> None:
    """Before something is published: wait while the run is paused; raises `EndedByOthers` when others have ended it.

    A server that is away is waited for as long as Prefect's client does: nothing is published that others may have ended.
    """
    run_id, said = UUID(flow_run_id), False
    with get_client(sync_client=True) as client:
        while True:
            ended = _ended(client, run_id)
            if ended is not None:
                raise ended
            state = client.read_flow_run(run_id).state
            if state is None or not state.is_paused():
                return
            if not said:
                run_logger().info("the run is paused: it publishes when it is resumed")
                said = True
            time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Where the process of a run is. A folder on a shared disk has those of several machines, or of several containers."""

    pid: int
    born: float
    """Start time of the process (see ProcessIdentity)."""
    host: str = field(default_factory=socket.gethostname)
    """A container has a name of its own, which it keeps when it is started again."""
    job: str = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID", ""))
    start: int = field(default_factory=lambda: int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    """How often Slurm has queued the job again."""

    @classmethod
    def of(cls) -> "ProcessRecord":
        """That of this process."""
        own = ProcessIdentity.of()
        return cls(own.pid, own.born)

    def has_ended(self) -> bool:
        """Whether the process is certainly gone: from this machine, or because Slurm has started its job again."""
        own = ProcessRecord.of()
        if self.job and self.job == own.job and self.start < own.start:
            return True
        return self.host == own.host and not ProcessIdentity(self.pid, self.born).is_running()


@contextmanager
def recorded_process(folder: Path, flow_run_id: str) -> Iterator[None]:
    """Record this process in `folder` while the block runs; runs of recorded processes that were killed become Crashed before."""
    record = folder / f"{flow_run_id}.json"
    for other in folder.glob("*.json"):
        # A run that is retried keeps its id: its own record is that of the attempt before.
        if other != record:
            _set_crashed_if_killed(other)
    folder.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: another machine that shares the folder may read it at any time.
    with replacing(record) as unfinished:
        unfinished.write_text(json.dumps(asdict(ProcessRecord.of())), encoding="utf-8")
    try:
        yield
    finally:
        record.unlink(missing_ok=True)


def _set_crashed_if_killed(record: Path) -> None:
    # A record that cannot be read was cut short by the failure of a machine.
    with suppress(ValueError, TypeError, OSError):
        if not ProcessRecord(**json.loads(record.read_text(encoding="utf-8"))).has_ended():
            return
    # The run may belong to another server than the current one, or the server may be away; the record is of no use then either.
    with suppress(Exception), get_client(CLIENT_SETTINGS, sync_client=True) as client:
        state = client.read_flow_run(UUID(record.stem)).state
        if state is not None and not state.is_final():
            crashed: State = Crashed(message="its process was killed; the next run continues with what it left")
            client.set_flow_run_state(UUID(record.stem), crashed, force=True)
    record.unlink(missing_ok=True)

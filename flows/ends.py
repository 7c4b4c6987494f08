"""The state that Prefect shows for a run that did not come to its ordinary end.

cancellable   a run started by hand can be cancelled in the UI or by `prefect flow-run cancel`, as a worker's run can: a thread
              polls the state of the run and interrupts the main thread as Ctrl-C would
noted         a run whose process was killed becomes Crashed when the next run starts in the same folder; without this it would be
              Running for ever. Runs on other machines and in other containers are left alone: nobody here sees whether they live
"""

import _thread
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.runtime import deployment
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Crashed

from grpo_tasks.processes.identity import ProcessIdentity

POLL_S = 3.0
END_LIMIT_S = 60.0
"""Longest wait for an interrupted run to end."""
CLIENT_SETTINGS = {"timeout": 5.0}


@contextmanager
def cancellable(flow_run_id: str | None) -> Iterator[None]:
    """Let the run be cancelled while the block runs; a run of a worker is left to the worker."""
    if flow_run_id is None or deployment.id is not None:
        yield
        return
    finished = threading.Event()
    # Not a daemon: the process must not end before the thread has set the state of a cancelled run.
    threading.Thread(target=_watch, args=(UUID(str(flow_run_id)), finished), name="cancel").start()
    try:
        yield
    finally:
        finished.set()


def _watch(flow_run_id: UUID, finished: threading.Event) -> None:
    # No retries: a server that is away must not delay the end of the run.
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(CLIENT_SETTINGS, sync_client=True) as client:
        while not finished.wait(POLL_S):
            if _is_cancelled(client, flow_run_id):
                _thread.interrupt_main()
                _replace_crashed_by_cancelled(client, flow_run_id)
                return


def _is_cancelled(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    # A server that is away, or that fails, has cancelled nothing.
    with suppress(Exception):
        state = client.read_flow_run(flow_run_id).state
        return state is not None and (state.is_cancelling() or state.is_cancelled())
    return False


def _replace_crashed_by_cancelled(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    """Wait until Prefect's engine has set the state to Crashed, as it does after Ctrl-C, and set it to Cancelled instead."""
    deadline = time.monotonic() + END_LIMIT_S
    with suppress(Exception):
        while time.monotonic() < deadline:
            state = client.read_flow_run(flow_run_id).state
            if state is not None and state.is_crashed():
                break
            time.sleep(0.2)
        client.set_flow_run_state(flow_run_id, Cancelled(message="cancelled while it ran"), force=True)


@dataclass(frozen=True, slots=True)
class Note:
    """Where the process of a run is. A folder on a shared disk has notes of several machines, or of several containers."""

    pid: int
    born: float
    """Start time of the process (see ProcessIdentity)."""
    host: str = field(default_factory=socket.gethostname)
    """A container has a name of its own, which it keeps when it is started again."""
    job: str = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID", ""))
    start: int = field(default_factory=lambda: int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    """How often Slurm has queued the job again."""

    @classmethod
    def of(cls) -> "Note":
        """That of this process."""
        own = ProcessIdentity.of()
        return cls(own.pid, own.born)

    def is_of_the_dead(self) -> bool:
        """Whether the process has certainly ended: it is gone from this machine, or Slurm has started its job again."""
        own = Note.of()
        if self.job and self.job == own.job and self.start < own.start:
            return True
        return self.host == own.host and not ProcessIdentity(self.pid, self.born).is_running()


@contextmanager
def noted(folder: Path, flow_run_id: str | None) -> Iterator[None]:
    """Record this process in `folder` while the block runs; before that, set the runs of recorded processes that were killed to
    Crashed.
    """
    if flow_run_id is None:
        yield
        return
    note = folder / f"{flow_run_id}.json"
    for other in folder.glob("*.json"):
        # A run that is retried keeps its id: its own note is that of the attempt before.
        if other != note:
            _set_crashed_if_killed(other)
    folder.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: another machine that shares the folder may read it at any time.
    unfinished = note.with_suffix(".part")
    unfinished.write_text(json.dumps(asdict(Note.of())), encoding="utf-8")
    unfinished.replace(note)
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def _set_crashed_if_killed(note: Path) -> None:
    # A note that cannot be read was cut short by the failure of a machine.
    with suppress(ValueError, TypeError, OSError):
        if not Note(**json.loads(note.read_text(encoding="utf-8"))).is_of_the_dead():
            return
    # The run may belong to another server than the current one, or the server may be away; the note is of no use then either.
    with suppress(Exception), get_client(CLIENT_SETTINGS, sync_client=True) as client:
        state = client.read_flow_run(UUID(note.stem)).state
        if state is not None and not state.is_final():
            crashed: State = Crashed(message="its process was killed; the next run continues with what it left")
            client.set_flow_run_state(UUID(note.stem), crashed, force=True)
    note.unlink(missing_ok=True)

"""What Prefect says of a run that ended before its time.

cancellable   a run started by hand can be cancelled in the UI or by `prefect flow-run cancel`, like one of a worker's: a thread
              looks at its state and interrupts the main thread as Ctrl-C does; everything ends on the way that has
noted         a run whose process was killed is Crashed, not Running for ever, as soon as another one begins in the same folder
"""

import _thread
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.runtime import deployment
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Crashed

from grpo_tasks.processes.identity import ProcessIdentity

LOOK_S = 3.0
END_LIMIT_S = 60.0
ANSWER_LIMIT = {"timeout": 5.0}


@contextmanager
def cancellable(flow_run_id: str | None) -> Iterator[None]:
    """Watch over the run while the block is at work."""
    if flow_run_id is None or deployment.id is not None:
        yield
        return
    over = threading.Event()
    # Not a daemon: it has the last word on a run that was cancelled.
    threading.Thread(target=_watch, args=(UUID(str(flow_run_id)), over), name="cancel").start()
    try:
        yield
    finally:
        over.set()


def _watch(flow_run_id: UUID, over: threading.Event) -> None:
    # Nobody shall wait at the end of a run for a server that is away.
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(ANSWER_LIMIT, sync_client=True) as client:
        while not over.wait(LOOK_S):
            if _asked(client, flow_run_id):
                _thread.interrupt_main()
                _settle(client, flow_run_id)
                return


def _asked(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    # A server that is away, or ill, has cancelled nothing.
    with suppress(Exception):
        state = client.read_flow_run(flow_run_id).state
        return state is not None and (state.is_cancelling() or state.is_cancelled())
    return False


def _settle(client: SyncPrefectClient, flow_run_id: UUID) -> None:
    """The engine calls it a crash, as it does after Ctrl-C; it was what somebody wanted."""
    deadline = time.monotonic() + END_LIMIT_S
    with suppress(Exception):
        while time.monotonic() < deadline:
            state = client.read_flow_run(flow_run_id).state
            if state is not None and state.is_crashed():
                break
            time.sleep(0.2)
        client.set_flow_run_state(flow_run_id, Cancelled(message="cancelled while it ran"), force=True)


@contextmanager
def noted(folder: Path, flow_run_id: str | None) -> Iterator[None]:
    """Leave a note of the process in `folder` while the block is at work; settle the notes of those that were killed."""
    if flow_run_id is None:
        yield
        return
    for note in folder.glob("*.json"):
        _settle_dead(note)
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / f"{flow_run_id}.json"
    note.write_text(json.dumps(asdict(ProcessIdentity.of())), encoding="utf-8")
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def _settle_dead(note: Path) -> None:
    # A note that cannot be read was cut short by the kill.
    with suppress(ValueError, TypeError, OSError):
        if ProcessIdentity(**json.loads(note.read_text(encoding="utf-8"))).is_running():
            return
    # The run may be known to another server than the one of now.
    with suppress(Exception), get_client(ANSWER_LIMIT, sync_client=True) as client:
        state = client.read_flow_run(UUID(note.stem)).state
        if state is not None and not state.is_final():
            crashed: State = Crashed(message="its process was killed; a later run goes on with what it left")
            client.set_flow_run_state(UUID(note.stem), crashed, force=True)
    note.unlink(missing_ok=True)

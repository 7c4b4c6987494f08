"""Slots: one run at a time on a GPU, or on a registered model. A slot is a global concurrency limit of Prefect's with limit 1.

The limit, the lease and the count in the UI are Prefect's. Waiting, renewal and the record of the holder (a variable) are ours:
with `prefect.concurrency.sync.concurrency` of 3.8 nobody learns the holder, a dead one keeps the slot for a minute or for ever, a
restarted server forgets leases and keeps the count, and a server that is away fails the run.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.runtime import flow_run
from prefect.variables import Variable

from grpo_tasks.processes.lifetime import ProcessIdentity
from grpo_tasks.running.orchestrator import show_running, show_waiting

LEASE_S = 60.0
"""Duration of a lease, the shortest that Prefect allows. The slot of a machine that vanishes is free after this."""
RENEWAL_INTERVAL_S = 15.0
RETRY_INTERVAL_S = 2.0
RETRAINING = "retrain-"
"""Prefix of the slot that a retraining of a registered model holds."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The run that holds a slot, as recorded in a Prefect variable."""

    run: str
    """Name of the run that was started: people know this one, not the subflow that holds the slot."""
    run_id: str
    lease_id: str
    host: str
    pid: int
    born: float
    """Start time of the process (see ProcessIdentity)."""

    def is_dead(self, client: SyncPrefectClient) -> bool:
        """Whether its process has ended (known for this machine only) or its flow run has."""
        if self.host == socket.gethostname() and not ProcessIdentity(self.pid, self.born).is_running():
            return True
        try:
            state = client.read_flow_run(UUID(self.run_id)).state
        except (ObjectNotFound, ValueError):
            return True
        return state is not None and state.is_final()


@contextmanager
def hold_all(slots: Iterable[str]) -> Iterator[None]:
    """Hold all these slots while the block runs."""
    with ExitStack() as stack:
        for slot in slots:
            stack.enter_context(hold(slot))
        yield


@contextmanager
def hold(slot: str) -> Iterator[None]:
    """Hold the slot while the block runs; wait for it as long as necessary."""
    with get_client(sync_client=True) as client:
        holder = _acquire(client, slot)
        finished = threading.Event()
        # In a copy of this context: a Prefect server set for this block only must be the renewal's server too.
        renewal = threading.Thread(target=copy_context().run, args=(_renew, UUID(holder.lease_id), finished), daemon=True)
        renewal.start()
        try:
            yield
        finally:
            finished.set()
            renewal.join()
            try:
                _release(client, slot, holder)
                get_run_logger().info("slot %s released", slot)
            except httpx.TransportError:
                # The result of the block, or its error, matters more than a slot that the next run frees.
                get_run_logger().warning("slot %s: the Prefect server is away; the next run that needs the slot frees it", slot)


def _acquire(client: SyncPrefectClient, slot: str) -> Holder:
    with suppress(ObjectAlreadyExists):
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=slot, limit=1, active=True))
    started, reported = flow_run.name or "", None
    with suppress(ObjectNotFound, ValueError):
        started = client.read_flow_run(UUID(str(flow_run.root_flow_run_id or flow_run.id))).name
    while (lease_id := _try_to_acquire(client, slot)) is None:
        other = _read_holder(slot)
        if other is not None and other.is_dead(client):
            get_run_logger().warning("slot %s: its holder, the run %s, is dead; the slot is freed", slot, other.run)
            _release(client, slot, other)
            continue
        if other is not None and reported != other.run_id:
            reported = other.run_id
            get_run_logger().info("waiting for the slot %s, held by the run %s on %s", slot, other.run, other.host)
            show_waiting(f"waiting for {describe_slot(slot)}, held by {other.run}")
        time.sleep(RETRY_INTERVAL_S)
    own = ProcessIdentity.of()
    holder = Holder(started, str(flow_run.id), lease_id, socket.gethostname(), own.pid, own.born)
    Variable.set(_variable(slot), json.dumps(asdict(holder)), overwrite=True)
    get_run_logger().info("slot %s acquired", slot)
    if reported is not None:
        show_running()
    return holder


def _try_to_acquire(client: SyncPrefectClient, slot: str) -> str | None:
    """Id of the lease; None when somebody holds the slot."""
    try:
        answer = client.increment_concurrency_slots_with_lease([slot], 1, "concurrency", lease_duration=LEASE_S)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.LOCKED:
            return None
        raise
    return str(answer.json()["lease_id"])


def _renew(lease_id: UUID, finished: threading.Event) -> None:
    with get_client(sync_client=True) as client:
        while not finished.wait(RENEWAL_INTERVAL_S):
            # A server that is away, or that lost the lease in a restart, is no reason to stop the training: try again.
            with suppress(httpx.HTTPError, ObjectNotFound):
                client.renew_concurrency_lease(lease_id, LEASE_S)


def _release(client: SyncPrefectClient, slot: str, holder: Holder) -> None:
    """Free the slot, unless another run holds it by now or is freeing it."""
    current = _read_holder(slot)
    if current is None or current.lease_id != holder.lease_id:
        return
    # The record is deleted before the slot is free: afterwards it could be the record of the next holder. Only one process can
    # delete it, so only one frees the slot. If that process is killed in between, the lease expires.
    if not Variable.unset(_variable(slot)):
        return
    lease_id = UUID(holder.lease_id)
    try:
        # Releasing a lease that the server does not know succeeds without any effect; renewing it fails.
        client.renew_concurrency_lease(lease_id, LEASE_S)
        client.release_concurrency_slots_with_lease(lease_id)
    except (httpx.HTTPStatusError, ObjectNotFound):
        # The server was restarted: it has forgotten the lease but still counts the slot as held.
        client.update_global_concurrency_limit(slot, GlobalConcurrencyLimitUpdate(active_slots=0))


def describe_slot(slot: str) -> str:
    """A slot in words: `card 0 of HOST`, `the retraining of NAME`, or its name."""
    if card := re.fullmatch(r"gpu-(.+)-([^-]+)", slot):
        return f"card {card[2]} of {card[1]}"
    if slot.startswith(RETRAINING):
        return f"the retraining of {slot.removeprefix(RETRAINING)}"
    return f"the slot {slot}"


def _read_holder(slot: str) -> Holder | None:
    found: Any = Variable.get(_variable(slot))
    return Holder(**(json.loads(found) if isinstance(found, str) else found)) if found else None


def _variable(slot: str) -> str:
    """Name of the Prefect variable that records the holder."""
    return "grpo_slot_" + re.sub(r"[^a-z0-9]+", "_", slot.lower())

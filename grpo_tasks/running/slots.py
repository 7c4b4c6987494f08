"""One run at a time, on a card or at a model: a global concurrency limit of Prefect's with a single slot.

The UI shows the limits under Concurrency.

    hold(slot)  ->  slot free: take it with a lease, renew the lease while the work lasts, give it back
                    slot taken: say by whom, look again every two seconds; a holder that is dead loses it

Prefect keeps no record of who holds a slot, so the holder writes itself into a Prefect variable.
"""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.runtime import flow_run
from prefect.variables import Variable

from grpo_tasks.processes.identity import ProcessIdentity
from schemas.config.operations import ResourcesConfig

LEASE_S = 60.0
"""The shortest Prefect allows; a machine that vanishes loses its slot after this."""
RENEW_S = 15.0
LOOK_S = 2.0
SHARED = "shared"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a slot."""

    run: str
    run_id: str
    lease_id: str
    host: str
    pid: int
    born: float
    """When the process began; a number that is used again belongs to another one."""

    def is_dead(self, client: SyncPrefectClient) -> bool:
        """Whether the process is gone (on this machine) or its flow run has ended."""
        if self.host == socket.gethostname() and not ProcessIdentity(self.pid, self.born).is_running():
            return True
        try:
            state = client.read_flow_run(UUID(self.run_id)).state
        except (ObjectNotFound, ValueError):
            return True
        return state is not None and state.is_final()


def slots_of(resources: ResourcesConfig, *, has_cards: bool | None = None) -> list[str]:
    """Names of the slots a run takes: those of its cards, the one it names, or none (CPU, shared).

    In one order for everybody, so that two runs never wait for each other.
    """
    if resources.gpu_slot == SHARED:
        return []
    if resources.gpu_slot != AUTO:
        return [resources.gpu_slot]
    if has_cards is None:
        has_cards = Path("/proc/driver/nvidia/gpus").exists()
    if resources.device == "cpu" or not has_cards:
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = named.split(",") if named else [str(card) for card in range(resources.num_processes)]
    return sorted(f"gpu-{socket.gethostname()}-{card}" for card in cards[: resources.num_processes])


@contextmanager
def hold_all(slots: Iterable[str]) -> Iterator[None]:
    """Have all these slots while the block runs."""
    with ExitStack() as stack:
        for slot in slots:
            stack.enter_context(hold(slot))
        yield


@contextmanager
def hold(slot: str) -> Iterator[None]:
    """Have the slot while the block runs; wait for it as long as it takes."""
    with get_client(sync_client=True) as client:
        holder = _take(client, slot)
        done = threading.Event()
        renewal = threading.Thread(target=_renew, args=(UUID(holder.lease_id), done), daemon=True)
        renewal.start()
        try:
            yield
        finally:
            done.set()
            renewal.join()
            get_run_logger().info("slot %s given back", slot)
            _give_back(client, slot, holder)


def _take(client: SyncPrefectClient, slot: str) -> Holder:
    with suppress(ObjectAlreadyExists):
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=slot, limit=1, active=True))
    told = None
    while (lease_id := _try(client, slot)) is None:
        other = _holder(slot)
        if other is not None and other.is_dead(client):
            get_run_logger().warning("slot %s: its holder %s is dead, the slot is freed", slot, other.run)
            _give_back(client, slot, other)
            continue
        if other is not None and told != other.run_id:
            told = other.run_id
            get_run_logger().info("waiting for the slot %s, held by the run %s on %s", slot, other.run, other.host)
        time.sleep(LOOK_S)
    own = ProcessIdentity.of()
    holder = Holder(flow_run.name or "", str(flow_run.id), lease_id, socket.gethostname(), own.pid, own.born)
    Variable.set(_variable(slot), json.dumps(asdict(holder)), overwrite=True)
    get_run_logger().info("slot %s taken", slot)
    return holder


def _try(client: SyncPrefectClient, slot: str) -> str | None:
    """Id of the lease, or None when the slot is taken."""
    try:
        answer = client.increment_concurrency_slots_with_lease([slot], 1, "concurrency", lease_duration=LEASE_S)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.LOCKED:
            return None
        raise
    return str(answer.json()["lease_id"])


def _renew(lease_id: UUID, done: threading.Event) -> None:
    with get_client(sync_client=True) as client:
        while not done.wait(RENEW_S):
            try:
                client.renew_concurrency_lease(lease_id, LEASE_S)
            except (httpx.HTTPError, ObjectNotFound):
                # A server that is away or was started anew is no reason to stop the training; the next turn tries again.
                continue


def _give_back(client: SyncPrefectClient, slot: str, holder: Holder) -> None:
    """Free the slot, unless somebody else has it by now or is at it."""
    current = _holder(slot)
    if current is None or current.lease_id != holder.lease_id:
        return
    # Before the slot is free, or the note of the next one would be taken away; and by whom of two that wait, the server decides.
    # Killed in between, the lease runs out.
    if not Variable.unset(_variable(slot)):
        return
    lease_id = UUID(holder.lease_id)
    try:
        client.renew_concurrency_lease(lease_id, LEASE_S)
        client.release_concurrency_slots_with_lease(lease_id)
    except (httpx.HTTPStatusError, ObjectNotFound):
        # A server keeps leases in memory: one that was started anew knows the taken slot but not the lease, and would keep it.
        client.update_global_concurrency_limit(slot, GlobalConcurrencyLimitUpdate(active_slots=0))


def _holder(slot: str) -> Holder | None:
    found: Any = Variable.get(_variable(slot))
    return Holder(**(json.loads(found) if isinstance(found, str) else found)) if found else None


def _variable(slot: str) -> str:
    return "grpo_slot_" + re.sub(r"[^a-z0-9]+", "_", slot.lower())

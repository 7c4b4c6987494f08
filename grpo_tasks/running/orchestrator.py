"""What a step tells Prefect, and what happens instead when no flow surrounds it.

Outside of a flow, the logger is the standard one `grpo`, and there are no artifacts, because nobody can look at them. A command
for one step runs so when no server is configured, because Prefect's import and its temporary server take longer than the step. So
nothing here imports Prefect before a flow has done so.
"""

import logging
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from grpo_tasks.kit.cards import cards_here
from grpo_tasks.kit.lock import file_lock
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

log = logging.getLogger("grpo")


def in_flow() -> bool:
    """Whether the caller runs inside a Prefect flow or task."""
    if "prefect" not in sys.modules:
        return False
    from prefect.context import FlowRunContext, TaskRunContext

    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


def run_logger() -> Any:
    """The logger of the flow run, whose lines the Prefect UI shows; the standard logger outside of a flow."""
    # A test may have switched the run logger off; Prefect then returns one outside of a flow too.
    if "prefect" not in sys.modules:
        return log
    from prefect import get_run_logger
    from prefect.exceptions import MissingContextError

    try:
        return get_run_logger()
    except MissingContextError:
        return log


def flow_run_id() -> str | None:
    """Id of the Prefect flow run; None outside of a flow."""
    if not in_flow():
        return None
    from prefect.runtime import flow_run

    return str(flow_run.id) if flow_run.id else None


def flow_run_name() -> str | None:
    """Name of the Prefect flow run, which the form can set; None outside of a flow."""
    if not in_flow():
        return None
    from prefect.runtime import flow_run

    return str(flow_run.name) if flow_run.name else None


def flow_run_url() -> str | None:
    """Address of the flow run in the Prefect UI; None outside of a flow and with a temporary server, which has no UI."""
    if not in_flow():
        return None
    from prefect.runtime import flow_run
    from prefect.settings import get_current_settings

    return flow_run.ui_url if get_current_settings().api.url else None


def artifact_key(name: str) -> str:
    """A name as the key of an artifact: Prefect allows lower-case letters, digits and dashes."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def show_artifact(
    key: str, data: str | float | Sequence[Mapping[str, object]], description: str, known: dict[str, UUID] | None = None
) -> None:
    """Show something in the Prefect UI under a stable key (`artifact_key`); outside of a flow nothing happens.

    `data` is a text in Markdown, the percent of a progress bar, or rows of a table that the UI can sort and filter. `known` are
    artifacts of a run that change while it runs: one that is there is updated, a new one is put in.
    """
    if not in_flow() or data == []:
        return
    from prefect import artifacts
    from prefect.client.schemas.actions import ArtifactUpdate

    create: Any = artifacts.create_progress_artifact if isinstance(data, float) else artifacts.create_table_artifact
    if isinstance(data, str):
        create = artifacts.create_markdown_artifact
    if known is None:
        create(data, key=key, description=description)
        return
    with suppress(Exception):  # see _set_running
        if key in known:
            with impatient_client() as client:
                client.update_artifact(known[key], ArtifactUpdate(data=data, description=description))
        else:
            known[key] = create(data, key=key, description=description)


def send_event(event: str, resource: str, payload: Mapping[str, object], *, event_id: UUID | None = None) -> None:
    """Send an event about a resource to Prefect, which ignores a known `event_id`; outside of a flow nothing happens."""
    run = flow_run_id()
    if run is None:
        return
    from prefect.events import emit_event

    related = [{"prefect.resource.id": f"prefect.flow-run.{run}", "prefect.resource.role": "flow-run"}]
    where = {"prefect.resource.id": resource}
    emit_event(event=event, resource=where, related=related, payload=dict(payload), id=event_id or uuid4())


@contextmanager
def locked(lock: Path, use: str, *, who: str, shared: bool = False) -> Iterator[None]:
    """Hold a lock (`kit.lock.file_lock`) while the block runs. Every list of runs says why a run waits for it.

    `use`, such as `uses the same folder F`, is what its holder does with it; `who` names this holder outside of a flow.
    """
    waited = []

    def waiting(holder: str) -> None:
        waited.append(f"waiting for {holder}, which {use}")
        run_logger().info(waited[-1])
        show_waiting(waited[-1])

    name = flow_run_name()
    with file_lock(lock, holder=who if name is None else f"the run {name}", shared=shared, on_wait=waiting):
        if waited:
            show_running()
        yield


def show_waiting(reason: str) -> None:
    """Let the state of the run, and of the run that a person started, say in every list why it waits: `waiting for ...`."""
    _set_running("Waiting", reason)


def show_running() -> None:
    """Take back what `show_waiting` said."""
    _set_running("Running", "")


def _set_running(name: str, message: str) -> None:
    if not in_flow():
        return
    from prefect.runtime import flow_run
    from prefect.states import Running

    # Only a text for people: a server that is away, or a run that is being cancelled, is no reason to stop or to wait.
    with suppress(Exception), impatient_client() as client:
        for run_id in {flow_run.id, flow_run.root_flow_run_id} - {None}:
            state = client.read_flow_run(UUID(str(run_id))).state
            if state is not None and state.is_running():
                client.set_flow_run_state(UUID(str(run_id)), Running(name=name, message=message))


@contextmanager
def impatient_client() -> "Iterator[SyncPrefectClient]":
    """A client of Prefect that gives up at once: a server that is away must not delay a run, or its end."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client({"timeout": 5.0}, sync_client=True) as client:
        yield client


def slots_of(
    resources: ResourcesConfig, rollout: RolloutConfig | None = None, *, trains: bool = False, has_cards: bool | None = None
) -> list[str]:
    """Names of the slots (slots.py) that a run holds: those of its GPUs and of its vLLM servers' GPUs, the one it names, or none.

    None on a CPU, shared, or for a stage (`trains`) on a cluster. They are sorted, so that two runs that need the same GPUs
    acquire them in the same order and never wait for each other. `has_cards` says whether this machine has GPUs; None: look.
    """
    # A cluster has its own accounting.
    if resources.gpu_slot == "shared" or (trains and resources.cluster.engine == "ray"):
        return []
    if resources.gpu_slot != "auto":
        return [resources.gpu_slot]
    if resources.device == "cpu":
        return []
    found = cards_here().count
    if not (found if has_cards is None else has_cards):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = max(resources.num_processes, found)
    cards = visible.split(",") if visible else [str(card) for card in range(count)]
    held = {*cards[: resources.num_processes]}
    if rollout is not None and rollout.engine == "vllm":
        vllm = rollout.vllm
        # As rollout/vllm_server.py gives them out; that file needs torch.
        if vllm.devices and not vllm.base_urls:
            held |= {card.strip() for each in vllm.devices for card in each.split(",")}
        elif not vllm.base_urls:
            wanted = vllm.replicas * vllm.tensor_parallel_size
            held |= {*(cards[:wanted] if vllm.replicas == 1 else cards[-wanted:])}
    return sorted(f"gpu-{socket.gethostname()}-{card}" for card in held)

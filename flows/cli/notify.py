"""Who hears of a command that changes the registry: automations and the suspended run in Prefect.

The registry has changed before these messages are sent. A server that is away is a line of output, not an error.
"""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from flows.cli.show import say
from schemas.errors import UserError

if TYPE_CHECKING:
    from schemas.config.operations import TrackingConfig
    from schemas.results.publication import Approval

_ADDRESS = "PREFECT_API_URL"
_MOST_NAME, _MOST_NOTE = 200, 2_000
"""Characters that the form of a suspended run takes (flows/approval.py)."""


def tell_prefect(event: str, resource: str, detail: str) -> None:
    """Send an event for automations to the Prefect server of the environment, or to the one that runs in this folder."""
    if not _has_prefect():
        return
    from prefect.events import emit_event

    emit_event(event, {"prefect.resource.id": resource}, payload={"detail": detail})


def resume_suspended(run_id: str, version: str, approval: "Approval", tracking: "TrackingConfig") -> None:
    """Let the flow run that waits for this decision continue. It finds the decision in the registry and asks nobody.

    Args:
        run_id: the MLflow run that made the version.
        version: number of the version.
        approval: the decision, which Prefect keeps as the answer to the form.
        tracking: the store.
    """
    if not run_id or not _has_prefect():
        return
    from prefect.client.orchestration import get_client

    from grpo_tasks.tracking.store import open_store, run_or_none

    run = open_store(tracking).ask(lambda client: run_or_none(client, run_id))
    known = run.data.tags.get("prefect.flow_run_id") if run is not None else None
    if not known:
        return
    form = {"decision": approval.decision, "approved_by": approval.by[:_MOST_NAME], "note": approval.note[:_MOST_NOTE]}
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(known)).state
            key = state.state_details.pause_key if state is not None and state.is_paused() else None
            # A run of the same name may wait for the decision about another version.
            if (key or "").startswith(f"approval-{version}-"):
                client.resume_flow_run(UUID(known), run_input=form)
                say(f"the suspended flow run {known} continues")
    except Exception as error:  # another server, a deleted run, no permission: the decision is recorded in any case
        said = f"the flow run {known} was not resumed ({type(error).__name__}); if it still waits, resume it in Prefect"
        say(said)


@cache
def _has_prefect() -> bool:
    """Whether there is a Prefect server and it answers. From then on this process uses it."""
    address = os.environ.get(_ADDRESS) or _of_stack()
    if not address:
        return False
    import httpx

    try:
        httpx.get(f"{address.rstrip('/')}/health", timeout=5.0)
    except httpx.HTTPError:
        # A server that is away must not delay the end of the command.
        say("the Prefect server is away: no automation hears of this")
        return False
    # Before Prefect is imported, because it reads its settings then.
    os.environ[_ADDRESS] = address
    return True


def _of_stack() -> str | None:
    """The address of the server that `grpo up` started in this folder, if it runs."""
    from grpo_tasks.operating.servers import PREFECT, Stack

    stack = Stack(Path.cwd())
    with suppress(UserError, OSError):  # a damaged record: grpo doctor and grpo up say so
        if PREFECT in stack.running():
            return stack.addresses().environment[_ADDRESS]
    return None

"""What a step tells Prefect, and what happens instead when no flow surrounds it.

    inside a flow      Prefect's run logger, artifacts, task states and retries
    outside of a flow  the standard logger `grpo`; nobody can look at an artifact, so there is none

A command for one step runs without a flow when no server is configured: Prefect's import and its temporary server take longer
than the step, and the folder of the step is the truth anyway. So nothing here imports Prefect before a flow has done so.
"""

import logging
import sys
from typing import Any

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


def show_artifact(key: str, markdown: str, *, description: str) -> None:
    """Show a report in the Prefect UI under a stable key; outside of a flow nothing happens."""
    if not in_flow():
        return
    from prefect.artifacts import create_markdown_artifact

    create_markdown_artifact(key=key, markdown=markdown, description=description)

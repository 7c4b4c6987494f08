"""Serve all deployments from one process on one machine, without a work pool."""

import os
from collections.abc import Mapping
from typing import Any

import prefect
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.deployments.runner import RunnerDeployment
from prefect.events import DeploymentEventTrigger
from prefect.flows import EntrypointType  # type: ignore[attr-defined]
from prefect.utilities.importtools import import_object

from flows.deployments import Deployment, deployments
from schemas.errors import UserError


def serve_all() -> None:
    """Create the deployments on the server at PREFECT_API_URL and execute the runs that are started there, until Ctrl-C.

    Raises:
        UserError: no server is configured, so nobody could start a run.
    """
    if not os.environ.get("PREFECT_API_URL"):
        raise UserError("no Prefect server is configured", fix="export PREFECT_API_URL=http://127.0.0.1:4200/api, or use grpo up")
    prefect.serve(*(_runner(deployment) for deployment in deployments()))


def _runner(deployment: Deployment) -> RunnerDeployment:
    flow = import_object(deployment.flow)
    entry = deployment.entry()
    return flow.to_deployment(
        f"{deployment.name}-served",
        description=entry["description"],
        tags=entry["tags"],
        version=entry["version"],
        parameters=entry["parameters"],
        schedules=[_schedule(given) for given in deployment.schedules],
        triggers=[DeploymentEventTrigger.model_validate(dict(given)) for given in deployment.triggers],
        entrypoint_type=EntrypointType.MODULE_PATH,
    )


def _schedule(given: Mapping[str, Any]) -> DeploymentScheduleCreate:
    """A schedule of prefect.yaml in the form that the client needs."""
    kept = {name: given[name] for name in ("slug", "active", "parameters") if name in given}
    if "cron" in given:
        return DeploymentScheduleCreate(schedule=CronSchedule(cron=given["cron"], timezone=given["timezone"]), **kept)
    return DeploymentScheduleCreate(schedule=IntervalSchedule(interval=given["interval"]), **kept)

"""`python -m grpo_tasks.operating.automations`: what the Prefect server does by itself when something happens to a run.

    a run fails or crashes, a guard fires, the champion changes,
    a version waits for approval, and still does after a day      ->  a notification, if there is a block `grpo-notify`
    a scheduled deployment fails three times within a week        ->  its schedules are paused
    a run sends no sign of life for ten minutes                   ->  it becomes Crashed

`grpo up` creates them after the deployments. Repeating the command updates them; what a user switched off stays switched off.
Without the block nothing leaves the server: the event feed alone shows what happened.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState, DoNothing, PauseDeployment, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

from schemas.config.guards import GuardsConfig

NOTIFY = "grpo-notify"
"""Name of the notification block (of any type: Slack, mail, webhook ...) that a user creates to be notified."""
FLOWS = (
    "grpo-pipeline",
    "grpo-preset",
    "grpo-validate",
    "grpo-rewards",
    "grpo-train",
    "grpo-merge",
    "grpo-publish",
    "grpo-evaluate",
    "grpo-sweep",
    "grpo-retrain",
    "grpo-watch-data",
)
"""Flows whose failure people want to know about: those of all deployments. A sweep itself reports which of its runs failed."""
OURS = "grpo-*"
"""Every flow of this project, also those without a deployment: any of them can vanish."""
SCHEDULED = ("retrain", "watch-data")
"""Deployments with schedules."""
FAILURES = 3
FAILURES_WITHIN = timedelta(days=7)
SILENCE = timedelta(minutes=10)
"""A run sends a sign of life every three minutes (PREFECT_FLOWS_HEARTBEAT_FREQUENCY); a machine may stall for a while."""
REMINDER = timedelta(days=1)
ALARMS = (*GuardsConfig.model_fields, "rolled_back", "reward_error")
"""Events of a stage that a person wants to know about, without the prefix `grpo.`."""
SUSPENDED = "grpo.run.suspended"
"""Sent several times by a run that waits for approval: a lost event would make it Crashed."""
PRUNED = "Pruned"
"""State in which a run of a sweep ends when the others do better."""
_ENDS = ("Completed", "Failed", "Crashed", "Cancelled", "Cancelling", "Suspended", "Paused", "AwaitingRetry", PRUNED)


# The client sends only the fields that were given. Without its type, the server takes an action for the first one that fits.


def automations(notify: ActionTypes) -> list[AutomationCore]:
    """Every automation, with the action that notifies."""
    deployed = {"prefect.resource.role": "flow", "prefect.resource.name": list(FLOWS)}
    return [
        AutomationCore(
            name="grpo: a run has failed",
            description="A run of the pipeline, or of one step, failed or crashed.",
            trigger=EventTrigger(
                expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
                match_related=deployed,
                posture=Posture.Reactive,
                threshold=1,
            ),
            actions=[notify],
        ),
        AutomationCore(
            name="grpo: a guard has fired",
            description="A guard of a stage that trains, a rollback, or an error of a reward function.",
            trigger=EventTrigger(expect={f"grpo.{name}" for name in ALARMS}, posture=Posture.Reactive, threshold=1),
            actions=[notify],
        ),
        AutomationCore(
            name="grpo: the champion has changed",
            description="A new version carries the alias champion.",
            trigger=EventTrigger(expect={"grpo.champion.changed"}, posture=Posture.Reactive, threshold=1),
            actions=[notify],
        ),
        *_about_approvals(notify),
        *(_paused_after_failures(name) for name in SCHEDULED),
        AutomationCore(
            name="grpo: a run has vanished",
            description="A run sends no sign of life any more: its worker or its machine has gone. It becomes Crashed.",
            trigger=EventTrigger(
                after={"prefect.flow-run.heartbeat"},
                expect={"prefect.flow-run.heartbeat", SUSPENDED, *(f"prefect.flow-run.{state}" for state in _ENDS)},
                match_related={"prefect.resource.role": "flow", "prefect.resource.name": OURS},
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=SILENCE,
            ),
            actions=[
                ChangeFlowRunState(type="change-flow-run-state", state=StateType.CRASHED, name="Crashed", message=_VANISHED)
            ],
        ),
    ]


_VANISHED = "no sign of life: its worker or its machine has gone; the same run started again continues with what is left"


def _about_approvals(notify: ActionTypes) -> list[AutomationCore]:
    return [
        AutomationCore(
            name="grpo: a version waits for approval",
            description="A version passed its tests, and a person has to decide about it.",
            trigger=EventTrigger(expect={"grpo.approval.requested"}, posture=Posture.Reactive, threshold=1),
            actions=[notify],
        ),
        AutomationCore(
            name="grpo: a version has waited a day for approval",
            description="A version passed its tests, and nobody has decided about it for a day.",
            trigger=EventTrigger(
                after={"grpo.approval.requested"},
                expect={"grpo.approval.decided"},
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=REMINDER,
            ),
            actions=[notify],
        ),
    ]


def _paused_after_failures(deployment: str) -> AutomationCore:
    return AutomationCore(
        name=f"grpo: {deployment} keeps failing",
        description=f"Pauses the schedules of {deployment} after {FAILURES} failures within {FAILURES_WITHIN.days} days.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
            match_related={"prefect.resource.role": "deployment", "prefect.resource.name": [deployment, f"{deployment}-served"]},
            posture=Posture.Reactive,
            threshold=FAILURES,
            within=FAILURES_WITHIN,
        ),
        actions=[PauseDeployment(type="pause-deployment", source="inferred")],
    )


def create_automations(client: SyncPrefectClient) -> list[str]:
    """Create or update every automation; returns their names."""
    made = automations(_notification(client))
    for wanted in made:
        found = client.read_automations_by_name(wanted.name)
        if found:
            client.update_automation(found[0].id, wanted.model_copy(update={"enabled": found[0].enabled}))
        else:
            client.create_automation(wanted)
    return [each.name for each in made]


def _notification(client: SyncPrefectClient) -> ActionTypes:
    answer: Any = client.request("POST", "/block_documents/filter", json={"block_documents": {"name": {"any_": [NOTIFY]}}})
    blocks = answer.json()
    if not blocks:
        return DoNothing(type="do-nothing")
    body = "{{ automation.description }}\n{{ event.event }}: {{ event.resource.id }}\n" + _facts(("detail", "stage", "update"))
    return SendNotification(
        type="send-notification",
        block_document_id=blocks[0]["id"],
        subject="{{ automation.name }}",
        body=body + "{{ flow_run.name }} {{ flow_run|ui_url }}",
    )


def _facts(names: Iterable[str]) -> str:
    return "".join(f"{{% if event.payload.{name} %}}{name}: {{{{ event.payload.{name} }}}}\n{{% endif %}}" for name in names)


def main() -> None:
    """Create the automations on the server that PREFECT_API_URL names."""
    with get_client(sync_client=True) as client:
        for name in create_automations(client):
            print(name)


if __name__ == "__main__":
    main()

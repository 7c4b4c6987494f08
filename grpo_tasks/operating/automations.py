"""`python -m grpo_tasks.operating.automations`: what the Prefect server does by itself when something happens to a run.

`grpo up` creates them after the deployments. Repeating the command updates them; what a user switched off stays switched off.
Without a block `grpo-notify` nobody is notified and nothing leaves the server: the event feed alone shows what happened.
"""

from datetime import timedelta
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState, DoNothing, PauseDeployment, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

from schemas.config.guards import GuardsConfig

NOTIFY = "grpo-notify"
"""Name of the notification block (of any type: Slack, mail, webhook ...) that a user creates to be notified."""
_STEPS = ("validate", "rewards", "train", "merge", "publish", "evaluate")
FLOWS = tuple(f"grpo-{name}" for name in ("pipeline", "preset", *_STEPS, "sweep", "retrain", "watch-data"))
"""Flows whose failure people want to know about: those of all deployments. A sweep itself reports which of its runs failed."""
OURS = "grpo-*"
"""Every flow of this project, also those without a deployment: any of them can vanish."""
SCHEDULED = ("retrain", "watch-data")
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
_FAILED = {"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}
_FACTS = ("detail", "stage", "update")
_VANISHED = "no sign of life: its worker or its machine has gone; the same run started again continues with what is left"
_ENDS = ("Completed", "Failed", "Crashed", "Cancelled", "Cancelling", "Suspended", "Paused", "AwaitingRetry", PRUNED)


def automations(notify: ActionTypes) -> list[AutomationCore]:
    """Every automation, with the action that notifies."""
    flows = {"prefect.resource.role": "flow", "prefect.resource.name": list(FLOWS)}
    return [
        _reaction(
            "grpo: a run has failed",
            "A run of the pipeline, or of one step, failed or crashed.",
            {"expect": _FAILED, "match_related": flows},
            notify,
        ),
        _reaction(
            "grpo: a guard has fired",
            "A guard of a stage that trains, a rollback, or an error of a reward function.",
            {"expect": {f"grpo.{name}" for name in ALARMS}},
            notify,
        ),
        _reaction(
            "grpo: the champion has changed",
            "A new version carries the alias champion.",
            {"expect": {"grpo.champion.changed"}},
            notify,
        ),
        _reaction(
            "grpo: a version waits for approval",
            "A version passed its tests, and a person has to decide about it.",
            {"expect": {"grpo.approval.requested"}},
            notify,
        ),
        _reaction(
            "grpo: a version has waited a day for approval",
            "A version passed its tests, and nobody has decided about it for a day.",
            {"after": {"grpo.approval.requested"}, "expect": {"grpo.approval.decided"}} | _silence(REMINDER),
            notify,
        ),
        *(_pause_after_failures(name) for name in SCHEDULED),
        _reaction(
            "grpo: a run has vanished",
            "A run sends no sign of life any more: its worker or its machine has gone. It becomes Crashed.",
            {
                "after": {"prefect.flow-run.heartbeat"},
                "expect": {"prefect.flow-run.heartbeat", SUSPENDED, *(f"prefect.flow-run.{state}" for state in _ENDS)},
                "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": OURS},
            }
            | _silence(SILENCE),
            ChangeFlowRunState(type="change-flow-run-state", state=StateType.CRASHED, name="Crashed", message=_VANISHED),
        ),
    ]


def _pause_after_failures(deployment: str) -> AutomationCore:
    related = {"prefect.resource.role": "deployment", "prefect.resource.name": [deployment, f"{deployment}-served"]}
    return _reaction(
        f"grpo: {deployment} keeps failing",
        f"Pauses the schedules of {deployment} after {FAILURES} failures within {FAILURES_WITHIN.days} days.",
        {"expect": _FAILED, "match_related": related, "threshold": FAILURES, "within": FAILURES_WITHIN},
        PauseDeployment(type="pause-deployment", source="inferred"),
    )


def _reaction(name: str, description: str, trigger: dict[str, Any], action: ActionTypes) -> AutomationCore:
    # The client sends only the fields that were given. Without its type, the server takes an action for the first one that fits.
    event = EventTrigger(**{"posture": Posture.Reactive, "threshold": 1} | trigger)
    return AutomationCore(name=name, description=description, trigger=event, actions=[action])


def _silence(within: timedelta) -> dict[str, Any]:
    """The rest of a trigger that waits for what does not happen."""
    return {"for_each": {"prefect.resource.id"}, "posture": Posture.Proactive, "within": within}


def create_automations(client: SyncPrefectClient) -> list[str]:
    """Create or update every automation; returns their names."""
    answer: Any = client.request("POST", "/block_documents/filter", json={"block_documents": {"name": {"any_": [NOTIFY]}}})
    notify: ActionTypes = DoNothing(type="do-nothing")
    if blocks := answer.json():
        facts = [f"{{% if event.payload.{name} %}}{name}: {{{{ event.payload.{name} }}}}\n{{% endif %}}" for name in _FACTS]
        body = "{{ automation.description }}\n{{ event.event }}: {{ event.resource.id }}\n" + "".join(facts)
        notify = SendNotification(
            type="send-notification",
            block_document_id=blocks[0]["id"],
            subject="{{ automation.name }}",
            body=body + "{{ flow_run.name }} {{ flow_run|ui_url }}",
        )
    made = automations(notify)
    for wanted in made:
        found = client.read_automations_by_name(wanted.name)
        if found:
            client.update_automation(found[0].id, wanted.model_copy(update={"enabled": found[0].enabled}))
        else:
            client.create_automation(wanted)
    return [each.name for each in made]


if __name__ == "__main__":
    with get_client(sync_client=True) as prefect:
        print(*create_automations(prefect), sep="\n")

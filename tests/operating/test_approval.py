"""promotion.approval: manual, in a worker: the run suspends, a person decides in the form, and nothing is computed twice."""

import shutil
import time
from pathlib import Path

import pytest
import yaml

from schemas.config.run import RunConfig
from schemas.config.section import form_values
from schemas.paths import resolve
from tests.flows.place import SMALL
from tests.processes.waiting import until

pytestmark = [pytest.mark.xdist_group("operated"), pytest.mark.long, pytest.mark.timeout(1800)]

# Forty updates are enough to keep to the format far more often than the base does.
PROMOTED = {
    "stages": [SMALL["stages"][0] | {"max_steps": 40}],
    "data": SMALL["data"] | {"eval": [{"path": "embedded:arithmetic_eval.jsonl", "max_rows": 100}]},
    "evaluation": SMALL["evaluation"] | {"max_prompts": 40},
    "promotion": {"metric": "format_rate", "approval": "manual", "approval_hours": 1.0},
}


@pytest.fixture(scope="module")
def asked(operated):
    """Makes the config of a run that comes to its question at once: its steps until then are those of one run."""
    source = operated.config("trained", **PROMOTED)
    operated.wait(operated.trigger("preset", source=source, overrides=["promotion.approval=none"])["id"], "COMPLETED")
    runs = operated.root / "runs"

    def config(name, **changes):
        for step in ("prepare_data", "validate_data", "probe_rewards", "evaluate_model", "train_stage", "merge_adapter"):
            shutil.copytree(runs / "trained" / step, runs / name / step)
        return operated.config(name, **PROMOTED | changes)

    return config


def suspended(operated, run):
    def is_paused():
        state = operated.ask(f"/flow_runs/{run['id']}")["state_type"]
        assert state not in ("COMPLETED", "FAILED", "CRASHED"), operated.log_of(run["id"])
        return state == "PAUSED"

    until(is_paused)
    time.sleep(2)  # the message follows the state
    return operated.ask(f"/flow_runs/{run['id']}")


def resume(operated, run, **form):
    operated.ask(f"/flow_runs/{run['id']}/resume", {"run_input": form})
    return operated.wait(run["id"], "COMPLETED")


def test_a_suspended_run_promotes_only_when_a_person_agrees(operated, asked):
    name = "asked"
    run = operated.trigger("preset", source=asked(name))
    waiting = suspended(operated, run)
    assert waiting["state"]["message"].startswith("v1 waits for approval: format rate ")
    [described] = operated.ask(f"/flow_runs/{run['id']}/input/filter", {"prefix": "suspended-approval-1--description"})
    assert "| merged |" in described["value"], "the form shows the comparison"
    assert operated.aliases(name) == {"challenger": "1"}
    [parent] = operated.parents(name)
    assert parent.info.status == "FINISHED", "nothing runs while the run waits"
    assert parent.data.tags["prefect.flow_run_url"].endswith(run["id"])
    artifacts = operated.ask("/artifacts/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}, "sort": "ID_DESC"})
    links = "".join(artifact["data"] for artifact in artifacts if artifact["key"] == "links")
    assert f"{operated.mlflow}/#/models/{name}/versions/1" in links

    ended = resume(operated, run, decision="promote", approved_by="ann", note="")
    assert ended["state"]["message"].startswith("promoted v1: format rate ")
    assert operated.aliases(name) == {"champion": "1"}
    assert operated.tasks_of(run, step="train_stage") == ["Cached"], "nothing is computed twice"
    assert operated.versions(name) == 1


def test_a_retraining_that_waits_for_approval_can_be_rejected(operated, asked):
    source = asked("refused")
    run = operated.trigger("retrain", source=source)
    suspended(operated, run)
    again = operated.wait(operated.trigger("retrain", source=source)["id"], "COMPLETED")
    assert again["state"]["message"].startswith("nothing to do: version 1 of refused")
    ended = resume(operated, run, decision="reject", approved_by="bob", note="too long")
    assert ended["state"]["message"].startswith("v1 not promoted: format rate ")
    assert operated.aliases("refused") == {"challenger": "1"}
    assert "rejected by bob (too long)" in operated.client.get_model_version("refused", "1").tags["grpo.decision"]


def test_a_resumed_wait_uses_what_it_was_asked_about(operated):
    """Meanwhile its file names other settings, its data has fewer rows, and another version is the champion to start from."""
    quick = ["promotion.approval=none", "stages.0.max_steps=2"]
    rows = Path(resolve("embedded:arithmetic_train.jsonl")).read_text(encoding="utf-8").splitlines(keepends=True)
    operated.write("moved.jsonl", "".join(rows[:200]))
    settings = PROMOTED | {"data": PROMOTED["data"] | {"train": [{"path": "moved.jsonl"}]}}
    source = operated.config("moved", **settings)
    operated.wait(operated.trigger("preset", source=source, overrides=quick)["id"], "COMPLETED")
    operated.client.set_registered_model_alias("moved", "champion", "1")
    run = operated.trigger("retrain", source=source, start_from="champion")
    assert suspended(operated, run)["state"]["message"].startswith("v2 waits for approval")

    operated.config("moved", **settings, seed=9)
    operated.write("moved.jsonl", "".join(rows[:150]))
    operated.wait(operated.trigger("preset", source=source, overrides=quick)["id"], "COMPLETED")
    operated.client.set_registered_model_alias("moved", "champion", "3")
    operated.ask(f"/flow_runs/{run['id']}/resume", {"run_input": {"decision": "promote", "approved_by": "ann", "note": ""}})
    # The comparison with another champion is another question.
    until(lambda: len(operated.ask(f"/flow_runs/{run['id']}")["empirical_policy"]["pause_keys"]) == 2)
    suspended(operated, run)
    resume(operated, run, decision="promote", approved_by="ann", note="")
    assert operated.aliases("moved")["champion"] == "2"
    assert operated.versions("moved") == 3, "nothing was trained again"
    assert operated.tasks_of(run, step="train_stage") == ["Completed"]
    assert len(operated.parents("moved")) == 3, "it has continued its run in MLflow"


def test_an_unanswered_question_is_asked_again_without_training(operated):
    """A fresh run too, which computes every step again when it begins."""
    source = operated.config("late", **PROMOTED | {"promotion": PROMOTED["promotion"] | {"approval_hours": 0.02}})
    run = operated.trigger("preset", source=source, fresh=True)
    suspended(operated, run)
    operated.wait(run["id"], "FAILED")
    retry = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
    operated.ask(f"/flow_runs/{run['id']}/set_state", {"state": retry, "force": True})
    suspended(operated, run)
    ended = resume(operated, run, decision="promote", approved_by="ann", note="")
    assert ended["state"]["message"].startswith("promoted v1: format rate ")
    assert operated.aliases("late") == {"champion": "1"}
    artifacts = operated.ask("/artifacts/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    assert {"progress-train-stage-format", "validation-rows", "evaluation-merged-figures"} <= {each["key"] for each in artifacts}
    assert operated.versions("late") == 1
    assert operated.tasks_of(run, step="train_stage") == ["Completed"]


def test_a_published_single_adapter_waits_and_is_not_merged_again(operated, asked):
    source = asked("single")
    [adapter] = operated.root.glob("runs/single/train_stage/format-*/final")
    tree = yaml.safe_load((operated.root / source).read_text()) | {"name": "waited"}
    run = operated.trigger("publish", adapter=str(adapter), config=form_values(tree, RunConfig))
    assert suspended(operated, run)["state"]["message"].startswith("v1 waits for approval: ")
    assert operated.aliases("waited") == {"challenger": "1"}

    resume(operated, run, decision="promote", approved_by="ann", note="")
    assert operated.aliases("waited") == {"champion": "1"}
    assert operated.versions("waited") == 1
    assert len(operated.tasks_of(run, step="merge_adapter")) == 1
    assert len(operated.parents("waited")) == 1, "it has continued its run in MLflow"


def test_a_decision_in_the_terminal_lets_the_suspended_run_continue(operated, asked):
    source = asked("in-terminal")
    run = operated.trigger("preset", source=source)
    suspended(operated, run)
    # The command knows no address of a Prefect server: its folder is that of `grpo up`.
    assert "PREFECT_API_URL" not in operated.environment
    output = operated.grpo("promote", "in-terminal@challenger", "--by", "ann", "--tracking-uri", operated.mlflow)
    assert f"the suspended flow run {run['id']} continues" in output
    ended = operated.wait(run["id"], "COMPLETED")
    assert ended["state"]["message"].startswith("promoted v1: format rate ")
    assert operated.aliases("in-terminal") == {"champion": "1"}
    wanted = {"filter": {"resource": {"id": ["grpo.model.in-terminal.1"]}, "event": {"name": ["grpo.approval.decided"]}}}
    [decided] = operated.ask("/events/filter", wanted)["events"]
    assert "approved by ann" in decided["payload"]["detail"]

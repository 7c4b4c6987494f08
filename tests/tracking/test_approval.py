"""promotion.approval: manual. A version that passed its tests waits for a person, and `grpo promote` records the decision."""

import hashlib
import json

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.approval import SuspendedRun, continued_flow_run, read_asked, write_asked
from flows.cli.main import app
from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.models import Champion, current_champion
from grpo_tasks.tracking.publishing import Decision, publish, with_approval
from grpo_tasks.tracking.registry import decide_pending, is_overtaken
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.served.proof import prove_served
from grpo_tasks.tracking.shown.headline import NOTE
from grpo_tasks.tracking.store import open_store
from schemas.config.evaluation import PromotionConfig
from schemas.errors import DamagedError, ModelError, TrackingError
from schemas.results.publication import Approval, Publication, Trained

from .test_publishing import result_of

PASSED = Decision("3", "mine", True, "better than the base")
OLD, NEWER = (Champion(version=version, sha256=version, run_id="r") for version in ("1", "2"))


def approval(decision, champion="1"):
    return Approval(decision=decision, champion=champion, by="ann")


@pytest.mark.parametrize(
    ("given", "current", "champion", "awaits", "words"),
    [
        (None, OLD, False, True, "waits for approval; better than the base"),
        (approval("pending"), OLD, False, True, "waits for approval"),
        (approval("promote"), OLD, True, False, "approved by ann; better"),
        (approval("reject"), OLD, False, False, "rejected by ann; better"),
        (approval("promote"), NEWER, False, True, "waits for approval"),
        (approval("promote", ""), None, True, False, "approved by ann"),
    ],
    ids=["not asked", "asked", "approved", "rejected", "approved against another champion", "no champion"],
)
def test_an_approval_counts_for_the_champion_that_it_was_given_against(given, current, champion, awaits, words):
    made = with_approval(PASSED, given, current)
    assert (made.champion, made.awaits_approval) == (champion, awaits)
    assert made.reason.startswith(words)


def test_no_approval_promotes_a_version_that_fails_its_tests():
    failed = Decision("3", "mine", False, "not better than the base")
    assert with_approval(failed, approval("promote"), OLD) == failed


@pytest.fixture
def waiting(database, make_config, make_merge, make_evaluation, tmp_path):
    """A store where version 1 is the champion and version 2 waits for approval; publishes version 2 again when called."""
    config = make_config(database)
    asks = config.model_copy(update={"promotion": PromotionConfig(approval="manual")})
    evaluation, merges = make_evaluation("merged", 0.9), [make_merge("1"), make_merge("2")]
    with open_run(config, key="one") as run:
        publish(
            run,
            merges[0],
            tests=[result_of("base", better=True)],
            champion=None,
            evaluation=evaluation,
            log=log_model,
            prove=prove_served,
        )
    first = current_champion(open_store(config.tracking), config.registered_model)

    def again():
        tests = [result_of("base", better=True), result_of("champion", better=True)]
        with open_run(asks, key="two") as run:
            decision = publish(
                run, merges[1], tests=tests, champion=first, evaluation=evaluation, log=log_model, prove=prove_served
            )
            known = {"model_name": config.registered_model, "model_version": decision.version, "reason": decision.reason}
            known |= {"champion": decision.champion, "awaits_approval": decision.awaits_approval}
            run.record(Publication(key="p", directory=tmp_path, seconds=0.1, run_id=run.run_id, tests=tests, **known))
        return decision

    assert again().awaits_approval
    assert current_champion(open_store(config.tracking), config.registered_model) == first
    return config, again


def aliases(config):
    found = MlflowClient(config.tracking.tracking_uri).get_registered_model(config.registered_model).aliases
    return {name: str(version) for name, version in found.items()}


def assert_says(config, word, reason):
    """The card of version 2, its tag and the run that made it say the same, as the list of runs shows it."""
    client = MlflowClient(config.tracking.tracking_uri)
    version = client.get_model_version(config.registered_model, "2")
    assert version.tags["grpo.decision"].startswith(reason)
    assert f"and merged. {word}: {reason}" in version.description
    assert "waits for approval" not in version.description
    tags = client.get_run(version.run_id).data.tags
    assert tags["promoted"] == ("yes" if word == "Promoted" else "no")
    assert tags["grpo.decision"] == version.tags["grpo.decision"]
    assert tags[NOTE].startswith(f"**{word}**: {reason}")
    assert f"Model: [{config.registered_model} version 2](" in tags[NOTE]
    assert tags[NOTE].endswith("Stages: format, correctness.")


@pytest.mark.slow
def test_a_version_that_passed_is_the_challenger_until_a_person_promotes_it(waiting):
    config, again = waiting
    assert aliases(config) == {"champion": "1", "challenger": "2"}
    said = decide_pending(f"{config.registered_model}/2", Approval(decision="promote", by="ann", note="fine"), config.tracking)
    assert "approved by ann (fine); it is the champion now" in said
    assert aliases(config) == {"champion": "2", "previous": "1"}
    assert_says(config, "Promoted", "approved by ann (fine); better than the champion, version 1")
    decision = again()
    assert (decision.champion, decision.awaits_approval) == (True, False)
    assert decision.reason.startswith("approved by ann (fine); better than the champion, version 1")
    assert aliases(config) == {"champion": "2", "previous": "1"}
    with pytest.raises(ModelError, match="does not wait for approval: it was approved by ann"):
        decide_pending(f"{config.registered_model}/2", Approval(decision="reject"), config.tracking)


@pytest.mark.slow
def test_a_waiting_version_is_compared_again_after_another_promotion(waiting, publish_one):
    config, again = waiting
    name = config.registered_model
    assert not is_overtaken(name, "2", config.tracking)
    publish_one(config.tracking.tracking_uri, "3", config=config)
    assert is_overtaken(name, "2", config.tracking), "it waits, and `grpo promote` refuses it"
    assert "became champion meanwhile" in again().reason
    assert is_overtaken(name, "2", config.tracking)
    assert not is_overtaken(name, "3", config.tracking)


@pytest.mark.slow
def test_a_rejected_version_stays_behind_and_says_who_rejected_it(waiting):
    config, again = waiting
    command = [
        "promote",
        f"{config.registered_model}/2",
        "--reject",
        "--by",
        "bob",
        "--tracking-uri",
        config.tracking.tracking_uri,
    ]
    shown = CliRunner().invoke(app, command)
    assert "rejected by bob; the champion has not changed" in " ".join(shown.output.split()), shown.output
    assert aliases(config) == {"champion": "1", "challenger": "2"}
    assert_says(config, "Not promoted", "rejected by bob; better than the champion, version 1")
    made = again()
    assert made.reason.startswith("rejected by bob; better than the champion")
    assert made.obstacle == "rejected by bob"
    assert aliases(config) == {"champion": "1", "challenger": "2"}


@pytest.mark.slow
def test_an_approval_is_refused_when_another_version_became_champion_meanwhile(waiting):
    config, _ = waiting
    client, name = MlflowClient(config.tracking.tracking_uri), config.registered_model
    client.create_model_version(name, "elsewhere")
    client.set_registered_model_alias(name, "champion", "3")
    with pytest.raises(ModelError, match=r"version 3 is the champion now, and version 2 was compared with version 1"):
        decide_pending(f"{name}/2", Approval(decision="promote"), config.tracking)


@pytest.mark.slow
def test_a_person_promotes_the_model_that_was_shown_and_no_other(waiting):
    config, _ = waiting
    client, name = MlflowClient(config.tracking.tracking_uri), config.registered_model
    shown = client.get_model_version(name, "2").tags["grpo.sha256"]
    client.set_model_version_tag(name, "2", "grpo.sha256", "0" * 64)
    with pytest.raises(DamagedError, match=r"version 2 of .* is no longer the model that a person was asked about"):
        decide_pending(f"{name}/2", Approval(decision="promote"), config.tracking, sha256=shown)
    assert aliases(config) == {"champion": "1", "challenger": "2"}
    client.set_model_version_tag(name, "2", "grpo.sha256", shown)
    decide_pending(f"{name}/2", Approval(decision="promote"), config.tracking, sha256=shown)
    assert aliases(config) == {"champion": "2", "previous": "1"}


def test_a_run_continues_in_the_store_in_which_it_was_recorded(asked, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    recorded = asked.model_copy(update={"store": f"sqlite:///{tmp_path / 'mlflow.db'}"})
    said = r"was recorded in sqlite:.*mlflow\.db, and the MLflow server is .*elsewhere\.db now"
    with pytest.raises(TrackingError, match=said), continued_flow_run(recorded, flow="pipeline"):
        pass


@pytest.fixture
def asked(make_config, make_merge, make_evaluation, data_report):
    """What a run is suspended with: results that their steps have sealed."""
    evaluations = [make_evaluation(label, accuracy).sealed(()) for label, accuracy in (("base", 0.2), ("merged", 0.34))]
    trained = Trained(data=data_report.sealed(()), merged=make_merge().sealed(()), evaluations=evaluations, guards=[])
    return SuspendedRun(config=make_config(None), run_key="k", trained=trained, tags={"grpo.retrain_key": "1"})


def _figure(tree):
    tree["trained"]["evaluations"][1]["metrics"]["accuracy"]["value"] = 0.99


def _unsealed_figure(tree):
    _figure(tree)
    tree["trained"]["evaluations"][1]["seal"] = ""


def _weights(tree):
    tree["trained"]["merged"]["sha256"] = "0" * 64


def _alpha(tree):
    tree["config"]["promotion"]["alpha"] = 0.5


def _tags(tree):
    tree["tags"] = {}


@pytest.mark.parametrize("edit", [_figure, _unsealed_figure, _weights, _alpha, _tags])
def test_a_suspended_run_continues_with_what_it_asked(asked, tmp_path, edit):
    file = write_asked(asked, tmp_path / ".asked")
    assert read_asked(file) == asked
    assert write_asked(asked, tmp_path / ".asked") == file, "a retry asks with the same file"
    tree = json.loads(file.read_text())
    edit(tree)
    file.write_text(json.dumps(tree))
    with pytest.raises(DamagedError, match="changed since a person was asked"):
        read_asked(file)


def test_a_run_that_was_suspended_before_an_upgrade_can_be_decided_about(asked, tmp_path):
    tree = json.loads(asked.model_dump_json())
    tree["config"]["tracking"] |= {"webhook": {"url": None, "secret_variable": "S", "limit_s": 30.0}, "flush_interval_s": 5.0}
    content = json.dumps(tree).encode()
    file = tmp_path / f"{hashlib.sha256(content).hexdigest()}.json"
    file.write_bytes(content)
    assert read_asked(file) == asked


@pytest.mark.parametrize("edit", [_figure, _weights])
def test_a_sealed_result_within_another_one_is_checked_when_it_is_read(asked, tmp_path, edit):
    asked.save(tmp_path / "asked.json")
    assert SuspendedRun.load(tmp_path / "asked.json") == asked
    tree = json.loads((tmp_path / "asked.json").read_text())
    edit(tree)
    (tmp_path / "asked.json").write_text(json.dumps(tree))
    with pytest.raises(DamagedError, match="the seal differs"):
        SuspendedRun.load(tmp_path / "asked.json")

"""promotion.approval: manual. An approval counts for what the person was asked about, also when the run was suspended."""

import hashlib
import json
from functools import reduce
from operator import getitem

import pytest

from flows.approval import SuspendedRun, continued_flow_run, read_asked, write_asked
from grpo_tasks.tracking.models import Champion
from grpo_tasks.tracking.publishing import Decision, with_approval
from schemas.errors import DamagedError, TrackingError
from schemas.results.publication import Approval, Trained

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


MERGED = ("trained", "evaluations", 1)


def edited(file, *changes):
    """Write other values to places in a JSON file."""
    tree = json.loads(file.read_text())
    for *path, name, value in changes:
        reduce(getitem, path, tree)[name] = value
    file.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    "changes",
    [
        [(*MERGED, "metrics", "accuracy", "value", 0.99)],
        [(*MERGED, "metrics", "accuracy", "value", 0.99), (*MERGED, "seal", "")],
        [("trained", "merged", "sha256", "0" * 64)],
        [("config", "promotion", "alpha", 0.5)],
        [("tags", {})],
    ],
    ids=["figure", "unsealed figure", "weights", "alpha", "tags"],
)
def test_a_suspended_run_continues_with_what_it_asked(asked, tmp_path, changes):
    file = write_asked(asked, tmp_path / ".asked")
    assert read_asked(file) == asked
    assert write_asked(asked, tmp_path / ".asked") == file, "a retry asks with the same file"
    edited(file, *changes)
    with pytest.raises(DamagedError, match="changed since a person was asked"):
        read_asked(file)


def test_a_run_that_was_suspended_before_an_upgrade_can_be_decided_about(asked, tmp_path):
    tree = json.loads(asked.model_dump_json())
    tree["config"]["tracking"] |= {"webhook": {"url": None, "secret_variable": "S", "limit_s": 30.0}, "flush_interval_s": 5.0}
    content = json.dumps(tree).encode()
    file = tmp_path / f"{hashlib.sha256(content).hexdigest()}.json"
    file.write_bytes(content)
    assert read_asked(file) == asked


@pytest.mark.parametrize(
    "change",
    [(*MERGED, "metrics", "accuracy", "value", 0.99), ("trained", "merged", "sha256", "0" * 64)],
    ids=["figure", "weights"],
)
def test_a_sealed_result_within_another_one_is_checked_when_it_is_read(asked, tmp_path, change):
    asked.save(tmp_path / "asked.json")
    assert SuspendedRun.load(tmp_path / "asked.json") == asked
    edited(tmp_path / "asked.json", change)
    with pytest.raises(DamagedError, match="the seal differs"):
        SuspendedRun.load(tmp_path / "asked.json")

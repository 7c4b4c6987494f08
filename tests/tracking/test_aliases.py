"""Aliases move one decision at a time, and what they leave says who decided. On versions without files: nothing is trained."""

import logging
import threading
import time

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_tasks.tracking.registry import (
    APPROVAL_TAG,
    ROLLED_BACK_TAG,
    approval_of,
    decide_pending,
    find_version,
    publish_lock,
    rollback,
)
from grpo_tasks.tracking.served.card import write_card
from grpo_tasks.tracking.shown.headline import DECISION_TAG
from grpo_tasks.tracking.store import open_store
from schemas.config.operations import TrackingConfig
from schemas.errors import ModelError
from schemas.results.publication import Approval

CARD = "Base model `b`, trained with GRPO (reinforcement learning from rewards) and merged. Not promoted: {}.\n\n## Trained for\n"


@pytest.fixture
def tracking(database):
    """A store with three versions: 1 was the champion before 2, and 3 waits for a person."""
    client = MlflowClient(database)
    client.create_registered_model("m")
    for _ in range(3):
        client.create_model_version("m", "elsewhere")
    client.set_registered_model_alias("m", "champion", "2")
    client.set_registered_model_alias("m", "previous", "1")
    client.set_registered_model_alias("m", "challenger", "3")
    client.set_model_version_tag("m", "3", APPROVAL_TAG, Approval(decision="pending", champion="2").model_dump_json())
    client.set_model_version_tag("m", "3", DECISION_TAG, "waits for approval; better than the champion")
    write_card(client, "m", "3", CARD.format("waits for approval; better than the champion"))
    return TrackingConfig(tracking_uri=database)


@pytest.fixture
def client(tracking):
    return MlflowClient(tracking.tracking_uri)


def aliases(client):
    return {alias: str(version) for alias, version in client.get_registered_model("m").aliases.items()}


def while_another_decides(tracking, caplog, call, change):
    """Start `call` while another process holds the lock, let that one `change` the store, and return how the call ended."""
    ended = []

    def run():
        try:
            ended.append(call())
        except ModelError as refused:
            ended.append(refused)

    thread = threading.Thread(target=run)
    with caplog.at_level(logging.WARNING), open_store(tracking).lock(publish_lock("m"), who="another decision"):
        thread.start()
        deadline = time.monotonic() + 60
        while "waiting for the lock publish-m" not in caplog.text:
            assert thread.is_alive(), "it did not wait for the other decision"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        change()
    thread.join(60)
    return ended[0]


def test_of_two_people_the_second_one_is_refused(tracking, client, caplog):
    def another_promotes():
        client.set_registered_model_alias("m", "champion", "3")
        client.set_model_version_tag("m", "3", APPROVAL_TAG, Approval(decision="promote", by="ann").model_dump_json())

    def reject():
        return decide_pending("m/3", Approval(decision="reject", by="bob"), tracking)

    refused = while_another_decides(tracking, caplog, reject, another_promotes)
    assert isinstance(refused, ModelError)
    assert "it was approved by ann" in str(refused)
    assert approval_of(find_version("m/3", tracking)).by == "ann"


def test_a_rollback_waits_for_a_promotion_and_rolls_that_back(tracking, client, caplog):
    def another_promotes():
        client.set_registered_model_alias("m", "previous", "2")
        client.set_registered_model_alias("m", "champion", "3")

    moved = while_another_decides(
        tracking, caplog, lambda: rollback("m", to=None, reason="", tracking=tracking), another_promotes
    )
    assert moved == ("3", "2")
    assert aliases(client) == {"champion": "2", "previous": "3", "challenger": "3"}


def test_a_version_that_is_restored_is_not_called_rolled_back_any_more(tracking, client):
    rollback("m", to=None, reason="", tracking=tracking)
    assert ROLLED_BACK_TAG in client.get_model_version("m", "2").tags
    rollback("m", to="2", reason="", tracking=tracking)
    assert ROLLED_BACK_TAG not in client.get_model_version("m", "2").tags
    assert ROLLED_BACK_TAG in client.get_model_version("m", "1").tags


@pytest.mark.slow
def test_a_version_that_was_never_promoted_says_how_it_became_the_champion(tracking, client):
    client.set_model_version_tag("m", "1", DECISION_TAG, "not better")
    write_card(client, "m", "1", CARD.format("not better"))
    for _ in range(2):
        rollback("m", to="1", reason="2 is rude", tracking=tracking)
        found = client.get_model_version("m", "1")
        assert found.tags[DECISION_TAG] == "restored instead of version 2 (2 is rude); not better"
        assert "Promoted: restored instead of version 2 (2 is rude); not better.\n\n" in found.description
        rollback("m", to="2", reason="", tracking=tracking)


def test_a_promotion_killed_after_its_alias_moved_can_be_repeated(tracking, client, monkeypatch):
    set_tag, promote = MlflowClient.set_model_version_tag, Approval(decision="promote", by="ann")

    def killed_at_the_last(self, name, version, key, value):
        if key == APPROVAL_TAG:
            raise KeyboardInterrupt
        set_tag(self, name, version, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_model_version_tag", killed_at_the_last)
        with pytest.raises(KeyboardInterrupt):
            decide_pending("m@challenger", promote, tracking)
    with pytest.raises(ModelError, match="version 3 of m is the champion already"):
        decide_pending("m/3", Approval(decision="reject"), tracking)
    decide_pending("models:/m/3", promote, tracking)
    assert aliases(client) == {"champion": "3", "previous": "2"}
    found = client.get_model_version("m", "3")
    assert found.tags[DECISION_TAG] == "approved by ann; better than the champion"
    assert "and merged. Promoted: approved by ann; better than the champion.\n\n" in found.description
    assert approval_of(found).decision == "promote"


def test_a_version_is_decided_by_alias_and_named_by_number(tracking, client, monkeypatch):
    told = []
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr("flows.cli.models.tell_prefect", lambda event, resource, _: told.append((event, resource)))
    shown = CliRunner().invoke(app, ["promote", "m@challenger", "--by", "ann", "--tracking-uri", tracking.tracking_uri])
    assert shown.exit_code == 0, shown.output
    assert aliases(client) == {"champion": "3", "previous": "2"}
    assert told == [("grpo.approval.decided", "grpo.model.m.3"), ("grpo.champion.changed", "grpo.model.m")]

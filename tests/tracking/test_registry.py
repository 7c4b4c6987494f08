"""Versions in the registry: aliases, rollback, a person's decision, limits of a promotion, lineage, references."""

import json
import logging
import threading
import time

import numpy as np
import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_tasks.evaluation.guards import find_regressions
from grpo_tasks.evaluation.statistics import paired_test
from grpo_tasks.tracking.models import Champion, current_champion
from grpo_tasks.tracking.publishing import decide
from grpo_tasks.tracking.registry import (
    APPROVAL_TAG,
    ROLLED_BACK_TAG,
    approval_of,
    decide_pending,
    find_tagged,
    find_version,
    is_overtaken,
    lineage_of,
    parse_reference,
    publish_lock,
    recorded_config,
    rollback,
)
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.store import open_store
from grpo_tasks.tracking.texts import DECISION_TAG, NOTE, write_card
from schemas.config.evaluation import PromotionConfig
from schemas.config.operations import TrackingConfig
from schemas.errors import DamagedError, ModelError
from schemas.results.evaluation import Regression
from schemas.results.publication import Approval, Publication

from .conftest import aliases_of, killed_at, verdict


@pytest.mark.slow
def test_a_kill_between_two_aliases_loses_no_version(config, publish_one):
    publish_one(config, "1")
    with killed_at("set_registered_model_alias", lambda _, alias, __: alias == "champion"):
        publish_one(config, "2")
    assert aliases_of(config) == {"champion": "1", "previous": "1"}
    publish_one(config, "2")
    assert aliases_of(config) == {"champion": "2", "previous": "1"}


@pytest.mark.slow
def test_rollback_restores_the_previous_champion_until_a_person_wants_another(config, publish_one):
    publish_one(config, "1")
    name, tracking = config.registered_model, config.tracking
    with pytest.raises(ModelError, match="no such model"):
        rollback(name, to=None, reason="", tracking=tracking)
    publish_one(config, "2")
    assert rollback(name, to=None, reason="answers in French", tracking=tracking) == ("2", "1")
    assert json.loads(find_version(f"{name}/2", tracking).tags[ROLLED_BACK_TAG])["reason"] == "answers in French"
    with pytest.raises(ModelError, match="the champion already"):
        rollback(name, to="1", reason="", tracking=tracking)
    # Neither the same run nor another one with the same bytes restores it.
    publish_one(config, "2")
    publish_one(config, "2", key="another")
    assert aliases_of(config) == {"champion": "1", "previous": "2"}
    third = find_version(f"{name}/3", tracking)
    assert third.tags[DECISION_TAG] == "version 2, which has the same bytes, was rolled back before"
    assert "version 2, which has the same bytes, was rolled back before" in third.description
    rollback(name, to="3", reason="the customers are French", tracking=tracking)
    assert ROLLED_BACK_TAG not in find_version(f"{name}/2", tracking).tags
    publish_one(config, "4")
    publish_one(config, "2")
    assert aliases_of(config)["champion"] == "2", "the bytes are wanted again, and beat the champion"
    publish_one(config, "5", better=False)
    assert aliases_of(config)["challenger"] == "5"
    rollback(name, to="5", reason="", tracking=tracking)
    assert aliases_of(config) == {"champion": "5", "previous": "2"}, "it is no challenger any more"


CARD = "Base model `b`, trained with GRPO (reinforcement learning from rewards) and merged. Not promoted: {}.\n\n## Trained for\n"


@pytest.fixture
def tracking(database):
    """A store with three versions without files: 1 was the champion before 2, and 3 waits for a person."""
    client = MlflowClient(database)
    client.create_registered_model("m")
    for number, alias in (("1", "previous"), ("2", "champion"), ("3", "challenger")):
        client.create_model_version("m", "elsewhere")
        client.set_registered_model_alias("m", alias, number)
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


def test_a_restored_version_says_how_it_became_the_champion(tracking, client):
    client.set_model_version_tag("m", "1", DECISION_TAG, "not better")
    write_card(client, "m", "1", CARD.format("not better"))
    for _ in range(2):
        rollback("m", to="1", reason="2 is rude", tracking=tracking)
        assert ROLLED_BACK_TAG in client.get_model_version("m", "2").tags
        found = client.get_model_version("m", "1")
        assert found.tags[DECISION_TAG] == "restored instead of version 2 (2 is rude); not better"
        assert "Promoted: restored instead of version 2 (2 is rude); not better.\n\n" in found.description
        rollback("m", to="2", reason="", tracking=tracking)
        assert ROLLED_BACK_TAG not in client.get_model_version("m", "2").tags
        assert ROLLED_BACK_TAG in client.get_model_version("m", "1").tags


def test_a_promotion_killed_after_its_alias_moved_can_be_repeated(tracking, client):
    promote = Approval(decision="promote", by="ann")
    with killed_at("set_model_version_tag", lambda _, __, tag, ___: tag == APPROVAL_TAG):
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
    events = []
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr("flows.cli.models.tell_prefect", lambda event, resource, _: events.append((event, resource)))
    shown = CliRunner().invoke(app, ["promote", "m@challenger", "--by", "ann", "--tracking-uri", tracking.tracking_uri])
    assert shown.exit_code == 0, shown.output
    assert aliases(client) == {"champion": "3", "previous": "2"}
    assert events == [("grpo.approval.decided", "grpo.model.m.3"), ("grpo.champion.changed", "grpo.model.m")]


def test_an_approval_is_refused_for_another_champion_or_another_model(tracking, client):
    client.set_model_version_tag("m", "3", "grpo.sha256", "0" * 64)
    with pytest.raises(DamagedError, match="version 3 of m is no longer the model that a person was asked about"):
        decide_pending("m/3", Approval(decision="promote"), tracking, sha256="1" * 64)
    client.create_model_version("m", "elsewhere")
    client.set_registered_model_alias("m", "champion", "4")
    with pytest.raises(ModelError, match="version 4 is the champion now, and version 3 was compared with version 2"):
        decide_pending("m/3", Approval(decision="promote"), tracking, sha256="0" * 64)
    assert aliases(client) == {"champion": "4", "previous": "1", "challenger": "3"}


@pytest.fixture
def waiting(config, publish_one, make_merge, offer, tmp_path):
    """A config whose version 1 is the champion and version 2 waits for approval; publishes version 2 again when called."""
    publish_one(config, "1")
    asks = config.model_copy(update={"promotion": PromotionConfig(approval="manual")})
    first = current_champion(open_store(config.tracking), config.registered_model)

    def again():
        with open_run(asks, key="two") as run:
            made = offer(run, make_merge("2"), champion=first)
            known = {"model_name": config.registered_model, "model_version": made.version, "reason": made.reason, "tests": []}
            known |= {"champion": made.champion, "awaits_approval": made.awaits_approval, "run_id": run.run_id}
            run.record(Publication(key="p", directory=tmp_path, seconds=0.1, **known))
        return made

    assert again().awaits_approval
    assert aliases_of(config) == {"champion": "1", "challenger": "2"}
    return config, again


def assert_says(config, word, reason):
    """The card of version 2, its tag and the run that made it say the same, as the list of runs shows it."""
    client = MlflowClient(config.tracking.tracking_uri)
    version = client.get_model_version(config.registered_model, "2")
    assert version.tags[DECISION_TAG].startswith(reason)
    assert f"and merged. {word}: {reason}" in version.description
    assert "waits for approval" not in version.description
    tags = client.get_run(version.run_id).data.tags
    assert tags["promoted"] == ("yes" if word == "Promoted" else "no")
    assert tags[DECISION_TAG] == version.tags[DECISION_TAG]
    assert tags[NOTE].startswith(f"**{word}**: {reason}")
    assert f"Model: [{config.registered_model} version 2](" in tags[NOTE]
    assert tags[NOTE].endswith("Stages: format, correctness.")


@pytest.mark.slow
def test_a_version_that_passed_is_the_challenger_until_a_person_promotes_it(waiting):
    config, again = waiting
    said = decide_pending(f"{config.registered_model}/2", Approval(decision="promote", by="ann", note="fine"), config.tracking)
    assert "approved by ann (fine); it is the champion now" in said
    assert aliases_of(config) == {"champion": "2", "previous": "1"}
    assert_says(config, "Promoted", "approved by ann (fine); better than the champion, version 1")
    decision = again()
    assert (decision.champion, decision.awaits_approval) == (True, False)
    assert decision.reason.startswith("approved by ann (fine); better than the champion, version 1")
    with pytest.raises(ModelError, match="does not wait for approval: it was approved by ann"):
        decide_pending(f"{config.registered_model}/2", Approval(decision="reject"), config.tracking)


@pytest.mark.slow
def test_a_rejected_version_stays_behind_and_says_who_rejected_it(waiting):
    config, again = waiting
    command = ["promote", f"{config.registered_model}/2", "--reject", "--by", "bob"]
    shown = CliRunner().invoke(app, [*command, "--tracking-uri", config.tracking.tracking_uri])
    assert "rejected by bob; the champion has not changed" in " ".join(shown.output.split()), shown.output
    assert_says(config, "Not promoted", "rejected by bob; better than the champion, version 1")
    made = again()
    assert made.reason.startswith("rejected by bob; better than the champion")
    assert made.obstacle == "rejected by bob"
    assert aliases_of(config) == {"champion": "1", "challenger": "2"}


@pytest.mark.slow
def test_a_waiting_version_is_compared_again_after_another_promotion(waiting, publish_one):
    config, again = waiting
    name = config.registered_model
    assert not is_overtaken(name, "2", config.tracking)
    publish_one(config, "3")
    assert is_overtaken(name, "2", config.tracking), "it waits, and `grpo promote` refuses it"
    assert "became champion meanwhile" in again().reason
    assert is_overtaken(name, "2", config.tracking)
    assert not is_overtaken(name, "3", config.tracking)


@pytest.mark.parametrize(("figure", "value"), [("format_rate", 0.85), ("truncated_rate", 0.2), ("mean_length", 100.0)])
def test_a_model_with_a_regression_is_not_promoted(make_evaluation, figure, value):
    champion = with_figures(make_evaluation("champion"), format_rate=0.95, truncated_rate=0.01, mean_length=40.0)
    ours = with_figures(make_evaluation("merged"), format_rate=0.95, truncated_rate=0.01, mean_length=45.0)
    promotion = PromotionConfig()
    assert all(check.passed for check in find_regressions(ours, champion, promotion))
    worse = find_regressions(with_figures(ours, **{figure: value}), champion, promotion)
    assert [check.metric for check in worse if not check.passed] == [figure]
    old = Champion("1", "old", "run")
    tests = [verdict("base", True), verdict("champion", True)]
    decision = decide("2", "new", tests=tests, compared=old, current=old, regressions=worse)
    assert not decision.champion
    assert figure in decision.reason


@pytest.mark.parametrize("better", [True, False])
def test_a_merge_that_made_it_worse_is_not_promoted(better):
    lost = Regression(metric="accuracy", against="correctness", ours=0.5, theirs=0.97, limit=0.97, passed=False, p_value=0.001)
    decision = decide("1", "new", tests=[verdict("base", better)], compared=None, current=None, regressions=[lost])
    assert not decision.champion
    assert "the merge lost accuracy: 0.5 against 0.97 of correctness before it, p = 0.001" in decision.reason


def test_longer_completions_than_the_base_are_no_regression(make_evaluation):
    base = with_figures(make_evaluation("base"), format_rate=0.1, truncated_rate=0.0, mean_length=10.0)
    ours = with_figures(make_evaluation("merged"), format_rate=0.9, truncated_rate=0.0, mean_length=90.0)
    assert all(check.passed for check in find_regressions(ours, base, PromotionConfig()))


def with_figures(report, **values):
    figures = dict(report.metrics)
    for name, value in values.items():
        figures[name] = next(iter(figures.values())).model_copy(update={"value": value, "low": value, "high": value})
    return report.model_copy(update={"metrics": figures})


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize(("base_is_behind", "has_champion"), [(True, True), (False, True), (False, False)])
def test_of_a_thousand_equal_candidates_at_most_about_alpha_are_promoted(num_samples, base_is_behind, has_champion):
    rng, alpha, simulations, prompts = np.random.default_rng(0), 0.05, 1_000, 64
    old, promoted = Champion("1", "old", "run") if has_champion else None, 0
    for _ in range(simulations):
        difficulty = rng.beta(0.8, 0.8, prompts)
        champion, ours = (rng.binomial(num_samples, difficulty) / num_samples for _ in range(2))
        # If the base is far behind, only the test against the champion can refuse: the hardest case.
        base = rng.binomial(num_samples, difficulty * (0.3 if base_is_behind else 1.0)) / num_samples
        rivals = [(base, "base"), (champion, "champion")] if has_champion else [(base, "base")]
        tests = [paired_test(ours, theirs, alpha=alpha, metric="accuracy", against=against) for theirs, against in rivals]
        promoted += decide("2", "new", tests=tests, compared=old, current=old).champion
    # 3.1 standard deviations of a binomial with p = alpha: a sound test fails here once in a thousand seeds.
    assert promoted <= simulations * alpha + 3.1 * (simulations * alpha * (1 - alpha)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "server"], indirect=True)
def test_lineage_leads_from_a_version_to_run_data_config_and_environment(config, publish_one):
    rollout = config.rollout.model_copy(update={"stop": ["</answer>", "\n\n"], "include_stop_str_in_output": False})
    config = config.model_copy(update={"rollout": rollout})
    publish_one(config, "1")
    name, client = config.registered_model, MlflowClient(config.tracking.tracking_uri)
    found = lineage_of(f"models:/{name}@champion", config.tracking)
    assert (found.version, found.adapter_sha256, found.data_digest) == ("1", "1" * 64, "d" * 64)
    assert found.system_prompt == "Answer in tags."
    assert (found.stop, found.include_stop_str_in_output) == (["</answer>", "\n\n"], False)
    assert found.packages["torch"]
    assert "name: " + config.name in recorded_config(found, config.tracking)
    assert [find_tagged(name, {"grpo.key": key}, config.tracking) for key in ("1", "2")] == ["1", None]
    # The hashes of the origin are one tag; what the registry is searched by keeps a tag of its own.
    tags = client.get_model_version(name, "1").tags
    assert json.loads(tags["grpo.hashes"]) == {"adapter_sha256": "1" * 64, "data_digest": "d" * 64}
    assert {tag for tag, value in tags.items() if len(value) == 64} == {"grpo.sha256"}
    # Versions of earlier releases have a tag for each.
    client.delete_model_version_tag(name, "1", "grpo.hashes")
    for old in ("adapter_sha256", "code_sha256"):
        client.set_model_version_tag(name, "1", f"grpo.{old}", old[0] * 64)
    old = lineage_of(f"{name}/1", config.tracking)
    assert (old.adapter_sha256, old.code_sha256, old.config_sha256) == ("a" * 64, "c" * 64, "")


def test_the_error_for_an_unknown_model_or_alias_lists_the_existing_ones(tracking):
    with pytest.raises(ModelError) as caught:
        find_version("m@champoin", tracking)
    assert "versions of m: 1, 2, 3; aliases: challenger, champion, previous" in caught.value.fix
    with pytest.raises(ModelError) as caught:
        lineage_of("nobody", tracking)
    assert "registered models: m;" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("m@challenger", ("m", "challenger", "")),
        ("models:/m/3", ("m", "", "3")),
        ("m", ("m", "champion", "")),
        ("models:/m@champion", ("m", "champion", "")),
    ],
)
def test_references_are_read_in_every_spelling(text, parts):
    assert parse_reference(text) == parts

"""Versions in the registry: aliases, limits of a promotion, rollback, lineage, references."""

import json

import numpy as np
import pytest
from mlflow import MlflowClient

from grpo_tasks.evaluation.guards import find_regressions
from grpo_tasks.evaluation.statistics import paired_test
from grpo_tasks.tracking.models import Champion
from grpo_tasks.tracking.publishing import decide
from grpo_tasks.tracking.registry import find_tagged, find_version, lineage_of, parse_reference, recorded_config, rollback
from schemas.config.evaluation import PromotionConfig
from schemas.errors import ModelError
from schemas.results.evaluation import Regression

from .conftest import verdict


def aliases(config):
    found = MlflowClient(config.tracking.tracking_uri).get_registered_model(config.registered_model).aliases
    return {alias: str(version) for alias, version in found.items()}


@pytest.mark.slow
def test_aliases_name_the_champion_the_previous_one_and_the_challenger(any_store, publish_one):
    config = publish_one(any_store, "1")
    assert aliases(config) == {"champion": "1"}
    publish_one(any_store, "2", better=False)
    assert aliases(config) == {"champion": "1", "challenger": "2"}
    publish_one(any_store, "3")
    assert aliases(config) == {"champion": "3", "previous": "1", "challenger": "2"}


@pytest.mark.slow
def test_a_kill_between_two_aliases_loses_no_version(database, publish_one, monkeypatch):
    config = publish_one(database, "1")
    set_alias = MlflowClient.set_registered_model_alias

    def die_at_the_second(client, name, alias, version):
        if alias == "champion":
            raise KeyboardInterrupt
        set_alias(client, name, alias, version)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_registered_model_alias", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            publish_one(database, "2")
    assert aliases(config) == {"champion": "1", "previous": "1"}
    publish_one(database, "2")
    assert aliases(config) == {"champion": "2", "previous": "1"}


@pytest.mark.slow
def test_rollback_restores_the_previous_champion_for_good(any_store, publish_one):
    config = publish_one(any_store, "1")
    name = config.registered_model
    with pytest.raises(ModelError, match="no such model"):
        rollback(name, to=None, reason="", tracking=config.tracking)
    publish_one(any_store, "2")
    assert rollback(name, to=None, reason="answers in French", tracking=config.tracking) == ("2", "1")
    assert aliases(config)["champion"] == "1"
    assert aliases(config)["previous"] == "2"
    said = json.loads(find_version(f"{name}/2", config.tracking).tags["grpo.rolled_back"])
    assert said["reason"] == "answers in French"
    publish_one(any_store, "2")
    assert aliases(config)["champion"] == "1"
    with pytest.raises(ModelError, match="the champion already"):
        rollback(name, to="1", reason="", tracking=config.tracking)


@pytest.mark.slow
def test_rolled_back_bytes_are_not_promoted_until_restored(database, publish_one):
    config = publish_one(database, "1")
    name, tracking = config.registered_model, config.tracking
    publish_one(database, "2")
    rollback(name, to=None, reason="answers in French", tracking=tracking)
    publish_one(database, "2", key="another")
    assert aliases(config) == {"champion": "1", "previous": "2"}
    third = find_version(f"{name}/3", tracking)
    assert third.tags["grpo.decision"] == "version 2, which has the same bytes, was rolled back before"
    assert "version 2, which has the same bytes, was rolled back before" in third.description
    rollback(name, to="3", reason="the customers are French", tracking=tracking)
    assert "grpo.rolled_back" not in find_version(f"{name}/2", tracking).tags
    publish_one(database, "4")
    publish_one(database, "2")
    assert aliases(config)["champion"] == "2", "the bytes are wanted again, and beat the champion"


@pytest.mark.slow
def test_a_challenger_that_becomes_champion_by_rollback_is_no_longer_a_challenger(database, publish_one):
    config = publish_one(database, "1")
    publish_one(database, "2", better=False)
    rollback(config.registered_model, to="2", reason="", tracking=config.tracking)
    assert aliases(config) == {"champion": "2", "previous": "1"}


@pytest.mark.parametrize(
    ("figure", "value", "fails"),
    [("format_rate", 0.85, "format_rate"), ("truncated_rate", 0.2, "truncated_rate"), ("mean_length", 100.0, "mean_length")],
)
def test_a_model_with_a_regression_is_not_promoted(make_evaluation, figure, value, fails):
    champion = with_figures(make_evaluation("champion"), format_rate=0.95, truncated_rate=0.01, mean_length=40.0)
    ours = with_figures(make_evaluation("merged"), format_rate=0.95, truncated_rate=0.01, mean_length=45.0)
    promotion = PromotionConfig()
    assert all(check.passed for check in find_regressions(ours, champion, promotion))
    worse = find_regressions(with_figures(ours, **{figure: value}), champion, promotion)
    assert [check.metric for check in worse if not check.passed] == [fails]
    old = Champion("1", "old", "run")
    tests = [verdict("base", True), verdict("champion", True)]
    decision = decide("2", "new", tests=tests, compared=old, current=old, regressions=worse)
    assert not decision.champion
    assert fails in decision.reason


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
def test_lineage_leads_from_a_version_to_run_data_config_and_environment(any_store, publish_one):
    config = publish_one(any_store, "1")
    found = lineage_of(f"models:/{config.registered_model}@champion", config.tracking)
    assert found.version == "1"
    assert found.adapter_sha256 == "1" * 64
    assert found.data_digest == "d" * 64
    assert found.system_prompt == "Answer in tags."
    assert found.packages["torch"]
    assert "name: " + config.name in recorded_config(found, config.tracking)
    assert find_tagged(config.registered_model, {"grpo.key": "1"}, config.tracking) == "1"
    assert find_tagged(config.registered_model, {"grpo.key": "2"}, config.tracking) is None


def test_a_versions_origin_is_one_tag_and_older_are_read(database, publish_one):
    config = publish_one(database, "1")
    name, client = config.registered_model, MlflowClient(database)
    tags = client.get_model_version(name, "1").tags
    assert json.loads(tags["grpo.hashes"]) == {"adapter_sha256": "1" * 64, "data_digest": "d" * 64}
    # What the registry is searched by keeps a tag of its own.
    assert {tag for tag, value in tags.items() if len(value) == 64} == {"grpo.sha256"}
    client.delete_model_version_tag(name, "1", "grpo.hashes")
    client.set_model_version_tag(name, "1", "grpo.adapter_sha256", "a" * 64)
    client.set_model_version_tag(name, "1", "grpo.code_sha256", "c" * 64)
    old = lineage_of(f"{name}/1", config.tracking)
    assert (old.adapter_sha256, old.code_sha256, old.config_sha256) == ("a" * 64, "c" * 64, "")


@pytest.mark.slow
def test_the_error_for_an_unknown_model_or_alias_lists_the_existing_ones(database, publish_one):
    config = publish_one(database, "1")
    with pytest.raises(ModelError) as caught:
        find_version(f"{config.registered_model}@champoin", config.tracking)
    assert "aliases: champion" in caught.value.fix
    with pytest.raises(ModelError) as caught:
        lineage_of("nobody", config.tracking)
    assert config.registered_model in caught.value.fix


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

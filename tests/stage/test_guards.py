"""Guards on journals written here; tests/grpo/test_guards.py has stages that train."""

import math
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flows.cli.inspection import show_fields
from grpo_tasks.stage.guards import GUARDS, Guards, kl_guard_off
from grpo_tasks.stage.journal import Journal
from grpo_tasks.tracking.description import flatten
from schemas.config.guards import GuardsConfig
from schemas.config.stage import StageConfig

HEALTHY = {
    "reward": 1.0,
    "reward_std": 0.3,
    "kl": 0.02,
    "frac_reward_zero_std": 0.2,
    "completions/clipped_ratio": 0.0,
    "completions/mean_length": 30.0,
    "entropy": 0.8,
    "rewards/format/success": 0.95,
    "rewards/correctness/success": 0.5,
    "sampling/sampling_logp_difference/mean": 0.004,
}
FAULTS = {
    "reward_std_collapse": {"reward_std": 0.001},
    "kl_blow_up": {"kl": 0.9},
    "dead_groups": {"frac_reward_zero_std": 0.97},
    "truncation": {"completions/clipped_ratio": 0.7},
    "entropy_collapse": {"entropy": 0.05},
    "length_explosion": {"completions/mean_length": 80.0},
    "format_regression": {"rewards/format/success": 0.6},
    "sampler_mismatch": {"sampling/sampling_logp_difference/mean": 0.3},
}


def written(tmp_path, metrics_of, steps=120, guards=None, kl_every=1):
    """Which guard fires at which update."""
    journal, noise = Journal(tmp_path / "metrics.jsonl"), np.random.default_rng(3)
    guards = Guards(GuardsConfig(**guards or {}), kl_every=kl_every)
    fired = {}
    for step in range(1, steps + 1):
        metrics = metrics_of(step)
        journal.append(step, {name: value * noise.normal(1.0, 0.02) for name, value in metrics.items()})
        fired |= {(firing.event, step): firing for firing in guards.check(journal, step)}
    return fired


def learning(step):
    return HEALTHY | {"reward": 1.0 + 0.01 * step, "entropy": 0.8 / (1 + 0.1 * step), "completions/mean_length": 30.0 + step}


@pytest.mark.parametrize("event", FAULTS)
def test_a_fault_fires_once_soon_after_it_begins_with_numbers_and_advice(tmp_path, event):
    fired = written(tmp_path, lambda step: HEALTHY | (FAULTS[event] if step > 25 else {}), steps=45)
    [(found, step)] = fired
    assert found == event
    assert 25 < step <= 35
    [firing] = fired.values()
    assert firing.action == "warn"
    assert any(character.isdigit() for character in firing.detail)
    assert next(guard.advice for guard in GUARDS if guard.event == event) in firing.detail


def test_a_flat_reward_fires_unless_everything_is_learnt(tmp_path):
    fired = written(tmp_path, lambda _: HEALTHY)
    assert {event for event, _ in fired} == {"flat_reward"}
    (tmp_path / "learnt").mkdir()
    assert not written(tmp_path / "learnt", lambda _: HEALTHY | {"rewards/correctness/success": 0.96})


def test_a_policy_that_learns_may_become_certain_and_write_more(tmp_path):
    assert not written(tmp_path, learning)


def test_every_guard_has_its_setting():
    assert {guard.event for guard in GUARDS} | {"not_finite"} == set(GuardsConfig.model_fields) - {
        "max_rollbacks",
        "rollback_learning_rate",
    }


def test_a_reward_that_rises_less_than_the_threshold_is_flat():
    rising = lambda step: HEALTHY | {"reward": 1.0 + 0.004 * step}  # noqa: E731
    assert not firings(rising)
    assert {event for event, _ in firings(rising, flat_reward={"threshold": 0.9})} == {"flat_reward"}


@pytest.mark.parametrize("every", [2, 10, 25])
def test_a_kl_that_few_updates_measure_is_judged_by_three_measurements(tmp_path, every):
    def sparse(step):
        metrics = HEALTHY | {"kl": 0.9 if step > 2 * every else 0.02}
        return metrics if step % every == 1 else {name: value for name, value in metrics.items() if name != "kl"}

    fired = written(tmp_path, sparse, steps=8 * every, guards={"flat_reward": "off"}, kl_every=every)
    [(event, step)] = fired
    assert event == "kl_blow_up"
    assert 2 * every < step <= max(10, 5 * every)
    [firing] = fired.values()
    assert f"over the last {max(10, 3 * every)} updates" in firing.detail


def test_the_kl_guard_says_when_it_cannot_fire():
    def why_off(measurable=True, **stage):
        return kl_guard_off(StageConfig(name="s", rewards=["format"], **stage), measurable=measurable)

    assert why_off() is None
    assert why_off(beta=0.1, measurable=False, kl_every_steps=0) is None
    assert why_off(kl_every_steps=0, guards={"kl_blow_up": "off"}) is None
    assert "kl_every_steps is 0" in why_off(kl_every_steps=0)
    assert "no reference policy" in why_off(measurable=False)


@pytest.mark.parametrize("name", [guard.event for guard in GUARDS])
@pytest.mark.parametrize("threshold", [-0.1, math.nan, math.inf, "much", None])
def test_a_senseless_threshold_is_refused(name, threshold):
    with pytest.raises(ValidationError, match="threshold"):
        GuardsConfig(**{name: {"threshold": threshold}})


@pytest.mark.parametrize(
    ("name", "threshold"),
    [("kl_blow_up", 0), ("truncation", 1.0), ("dead_groups", 1.5), ("length_explosion", 1.0), ("entropy_collapse", 1.0)],
)
def test_a_threshold_that_always_or_never_fires_is_refused(name, threshold):
    with pytest.raises(ValidationError, match=f"{name}.threshold"):
        GuardsConfig(**{name: {"threshold": threshold}})


def test_an_action_alone_or_with_threshold_is_written_back():
    config = GuardsConfig(kl_blow_up="stop", truncation={"threshold": 0.3}, dead_groups=False)
    assert (config.kl_blow_up.action, config.kl_blow_up.threshold) == ("stop", 0.5)
    assert (config.truncation.action, config.truncation.threshold) == ("warn", 0.3)
    assert config.dead_groups.action == "off"
    assert GuardsConfig.model_validate_json(config.model_dump_json()) == config
    assert not config.rolls_back
    assert GuardsConfig(kl_blow_up={"action": "rollback", "threshold": 0.3}).rolls_back
    assert GuardsConfig(not_finite="rollback").rolls_back


@pytest.mark.parametrize("given", ["stop", {"action": "stop"}, {"threshold": 0.3}, {"action": "stop", "threshold": 0.3}])
def test_prefects_check_of_parameters_takes_what_the_config_takes(given):
    # Prefect checks a deployment's parameters against the schema by this library.
    jsonschema.validate({"kl_blow_up": given}, GuardsConfig.model_json_schema())
    assert GuardsConfig(kl_blow_up=given).kl_blow_up.action in ("stop", "warn")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"kl_blow_up": {"treshold": 0.3}}, GuardsConfig.model_json_schema())


def test_a_form_offers_a_guard_as_box_or_action():
    # The choice is in the field itself and refers to a definition with fields: Prefect's form shows anything else as raw JSON.
    schema = GuardsConfig.model_json_schema()
    for guard in GUARDS:
        box, alone = schema["properties"][guard.event]["anyOf"]
        definition = schema["$defs"][box["$ref"].rpartition("/")[2]]
        assert [field["type"] for field in definition["properties"].values()] == ["string", "number"]
        assert alone["enum"] == ["off", "warn", "stop", "rollback"]


def test_thresholds_are_parameters_and_fields_of_their_own(capsys, monkeypatch):
    params = flatten(GuardsConfig(kl_blow_up={"action": "stop", "threshold": 0.3}))
    assert (params["kl_blow_up.action"], params["kl_blow_up.threshold"], params["truncation.threshold"]) == ("stop", "0.3", "0.5")
    monkeypatch.setenv("COLUMNS", "200")
    show_fields()
    assert re.search(r"stages\[\]\.guards\.kl_blow_up\.threshold\W+0\.5\W+Highest KL in nats per token", capsys.readouterr().out)


def firings(metrics_of, *, steps=120, since=0, skips_dead=False, **guards):
    """(event, update) of every firing on a journal without noise."""
    journal = Journal(Path("unwritten.jsonl"), writes=False)
    checked = Guards(GuardsConfig(**guards), since=since, skips_dead=skips_dead)
    found = []
    for step in range(1, steps + 1):
        journal.append(step, metrics_of(step))
        found += [(firing.event, step) for firing in checked.check(journal, step)] if step > since else []
    return found


def from_update(first, event, healthy=HEALTHY):
    return lambda step: healthy | (FAULTS[event] if step >= first else {})


@pytest.mark.parametrize("since", [0, 7])
@pytest.mark.parametrize("event", ["reward_std_collapse", "kl_blow_up", "dead_groups", "truncation", "sampler_mismatch"])
def test_a_fault_from_the_first_update_fires_after_ten(event, since):
    assert firings(from_update(1, event), steps=40, since=since) == [(event, since + 10)]


@pytest.mark.parametrize("event", ["entropy_collapse", "length_explosion", "format_regression"])
def test_the_last_ten_updates_are_compared_with_ten_that_do_not_overlap(event):
    assert firings(from_update(11, event), steps=40) == [(event, 20)]
    assert firings(from_update(12, event), steps=40) == [(event, 20)]
    assert firings(from_update(30, event), steps=40) == [(event, 35)]


def test_a_reward_has_fifty_updates_to_rise():
    assert firings(lambda _: HEALTHY, steps=60) == [("flat_reward", 50)]
    assert firings(lambda _: HEALTHY, steps=60, since=7) == [("flat_reward", 57)]
    assert not firings(lambda step: HEALTHY | {"reward": 2.0 if step > 25 else 1.0}, steps=50)


@pytest.mark.parametrize(("again", "steps"), [(70, [10, 75]), (69, [10])])
def test_a_guard_fires_again_after_fifty_updates_without_its_fault(again, steps):
    # The fault is there in updates 1 to 24 (the median of ten updates) and again five updates after `again`.
    kl = lambda step: HEALTHY | {"kl": 0.9 if step <= 20 or step >= again else 0.02}  # noqa: E731
    assert firings(kl, steps=100, flat_reward="off") == [("kl_blow_up", step) for step in steps]


@pytest.mark.parametrize(("success", "fires"), [(0.9, False), (0.89, True)])
def test_what_succeeds_nine_times_in_ten_is_learnt(success, fires):
    metrics = HEALTHY | FAULTS["dead_groups"] | {"rewards/correctness/success": success}
    assert bool(firings(lambda _: metrics, steps=60)) == fires


LIMITS = {
    "reward_std_collapse": ("reward_std", 0.2, 0.2, 0.199),
    "kl_blow_up": ("kl", None, 0.5, 0.501),
    "dead_groups": ("frac_reward_zero_std", 0.6, 0.6, 0.601),
    "truncation": ("completions/clipped_ratio", 0.2, 0.2, 0.201),
    "sampler_mismatch": ("sampling/sampling_logp_difference/mean", None, 0.1, 0.101),
    "entropy_collapse": ("entropy", 0.5, 0.5, 0.499),
    "length_explosion": ("completions/mean_length", None, 60.0, 60.1),
    "format_regression": ("rewards/format/success", 0.3, 0.65, 0.649),
}
"""For each guard its metric, a threshold (None: the default), the value that just reaches it, and one just beyond."""


@pytest.mark.parametrize("event", LIMITS)
def test_a_guard_fires_beyond_its_threshold_and_not_at_it(event):
    metric, threshold, at, beyond = LIMITS[event]
    healthy, given = HEALTHY | {"entropy": 1.0}, {} if threshold is None else {event: {"threshold": threshold}}
    for value, wanted in [(at, []), (beyond, [(event, 20)])]:
        found = firings(lambda step, value=value: healthy | ({metric: value} if step > 10 else {}), steps=20, **given)
        assert [(name, 20) for name, _ in found] == wanted


def swinging(rise, *, size, metric=None):
    """A reward that swings by 1 around its mean, which is higher by `rise` after `size` updates; then maybe a fault."""
    swing = [1.0, -1.0] * (size // 2) + [0.0] * (size % 2)

    def metrics(step):
        reward = 3.0 + swing[(step - 1) % size] + (rise if step > size else 0.0)
        return HEALTHY | {"reward": reward} | (metric or {} if step > size else {})

    return metrics


@pytest.mark.parametrize(("rise", "fires"), [(0.88, True), (0.91, False)])
def test_a_reward_rises_when_two_standard_errors_are_exceeded(rise, fires):
    # Ten updates with the variance 1 on either side: 2 sqrt(1 / 10 + 1 / 10) = 0.894.
    found = firings(swinging(rise, size=10, metric=FAULTS["entropy_collapse"]), steps=20)
    assert bool(found) == fires


@pytest.mark.parametrize(("rise", "fires"), [(0.54, True), (0.57, False)])
def test_a_reward_is_flat_within_two_standard_errors(rise, fires):
    # 25 updates with the variance 24 / 25 on either side: 2 sqrt(2 * 24 / 625) = 0.554.
    assert bool(firings(swinging(rise, size=25), steps=50)) == fires


@pytest.mark.parametrize(("every", "fires"), [(2, True), (3, False), (50, False)])
def test_a_metric_is_judged_when_half_of_the_updates_have_it(every, fires):
    # An update whose groups are all dead has no KL.
    kl = lambda step: {name: value for name, value in (HEALTHY | {"kl": 0.9}).items() if name != "kl" or step % every == 0}  # noqa: E731
    assert bool(firings(kl, steps=20)) == fires


def test_a_reward_function_may_have_no_success_for_a_while():
    silent = {name: value for name, value in HEALTHY.items() if not name.endswith("success")}
    assert firings(lambda step: silent if 12 < step <= 24 else HEALTHY, steps=45) == []


ALWAYS = {"reward", "reward_std", "frac_reward_zero_std", "completions/clipped_ratio", "completions/mean_length"}


@pytest.mark.slow
@given(
    st.lists(st.sets(st.sampled_from(sorted(HEALTHY.keys() - ALWAYS))), min_size=2, max_size=6), st.sampled_from(sorted(FAULTS))
)
def test_guards_accept_metrics_that_are_missing_for_a_while(missing, event):
    faulty = HEALTHY | FAULTS[event]

    def metrics(step):
        return {name: value for name, value in faulty.items() if name not in missing[(step - 1) // 12]}

    assert {found for found, _ in firings(metrics, steps=12 * len(missing))} <= {event, "flat_reward"}


@pytest.mark.parametrize(("kl", "dead", "fires"), [(0.784, 0.875, False), (0.784, 0.3, True), (4.1, 0.875, True)])
def test_skipped_dead_groups_count_in_the_kl_as_zero(kl, dead, fires):
    # The first pair is a stage of the demo that has learnt its format: over all completions its exact KL is 0.19.
    measured = HEALTHY | {"kl": kl, "frac_reward_zero_std": dead, "rewards/correctness/success": 0.95}
    assert bool(firings(lambda _: measured, steps=20, skips_dead=True)) == fires
    assert firings(lambda _: measured, steps=20) == [("kl_blow_up", 10)], "a stage that computes all groups measures all"


def test_a_single_outlier_is_no_blow_up():
    assert not firings(lambda step: HEALTHY | ({"kl": 5.0} if step == 41 else {}), flat_reward="off")

"""Guards on journals written here; on stages that really train, see tests/grpo/test_guards.py and tests/benchmarks/guards.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.stage.guards import GUARDS, Guards
from grpo_tasks.stage.journal import Journal
from schemas.config import GuardsConfig

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


def written(tmp_path, metrics_of, steps=120):
    """What fires at which update."""
    journal, guards, noise = Journal(tmp_path / "metrics.jsonl"), Guards(GuardsConfig()), np.random.default_rng(3)
    fired = {}
    for step in range(1, steps + 1):
        metrics = metrics_of(step)
        journal.append(step, {name: value * noise.normal(1.0, 0.02) for name, value in metrics.items()})
        fired |= {(firing.event, step): firing for firing in guards.look(journal, step)}
    return fired


def learning(step):
    return HEALTHY | {"reward": 1.0 + 0.01 * step, "entropy": 0.8 / (1 + 0.1 * step), "completions/mean_length": 30.0 + step}


@pytest.mark.parametrize("event", FAULTS)
def test_a_fault_is_told_once_soon_after_it_began_with_numbers_and_advice(tmp_path, event):
    fired = written(tmp_path, lambda step: HEALTHY | (FAULTS[event] if step > 25 else {}), steps=45)
    [(found, step)] = fired
    assert found == event
    assert 25 < step <= 35
    [firing] = fired.values()
    assert firing.action == "warn"
    assert any(character.isdigit() for character in firing.detail)
    assert next(guard.advice for guard in GUARDS if guard.event == event) in firing.detail


def test_a_reward_that_stays_flat_is_told_unless_all_is_learnt(tmp_path):
    fired = written(tmp_path, lambda _: HEALTHY)
    assert {event for event, _ in fired} == {"flat_reward"}
    (tmp_path / "learnt").mkdir()
    assert not written(tmp_path / "learnt", lambda _: HEALTHY | {"rewards/correctness/success": 0.96})


def test_a_policy_that_learns_may_get_sure_of_itself_and_longer(tmp_path):
    assert not written(tmp_path, learning)


def test_what_was_before_a_roll_back_counts_no_more(tmp_path):
    journal, guards = Journal(tmp_path / "metrics.jsonl"), Guards(GuardsConfig())
    for step in range(1, 31):
        journal.append(step, HEALTHY | {"kl": 0.9})
        assert bool(guards.look(journal, step)) == (step == 10)
        if step == 10:
            guards.since = 10
            guards.config = GuardsConfig(kl_blow_up="off")
    guards.config = GuardsConfig()
    assert [firing.event for firing in guards.look(journal, 20)] == ["kl_blow_up"]


def test_every_guard_has_its_setting():
    assert {guard.event for guard in GUARDS} | {"not_finite"} == set(GuardsConfig.model_fields) - {
        "max_rollbacks",
        "rollback_learning_rate",
    }


ALWAYS = {"reward", "reward_std", "frac_reward_zero_std", "completions/mean_length"}


@given(st.lists(st.sets(st.sampled_from(sorted(HEALTHY.keys() - ALWAYS))), min_size=2, max_size=8), st.integers(0, 3))
def test_metrics_that_are_missing_for_a_while_are_no_trouble_of_the_guards(tmp_path_factory, missing, bad):
    """An update whose groups are all dead has no KL and no entropy; a reward that is not asked has no success."""
    path = tmp_path_factory.mktemp("guards") / "metrics.jsonl"
    journal, guards = Journal(path, writes=False), Guards(GuardsConfig())
    trouble = list(FAULTS.values())[bad]
    for step in range(1, 12 * len(missing) + 1):
        absent = missing[(step - 1) // 12]
        journal.append(step, {name: value for name, value in (HEALTHY | trouble).items() if name not in absent})
        guards.look(journal, step)

"""What happens after an update: continue, stop, fail or roll back, decided by the journal."""

import pytest

from grpo_tasks.stage.guards import Guards
from grpo_tasks.stage.journal import Events, Journal, read_events
from grpo_tasks.stage.stage_dir import StageSpec
from grpo_tasks.stage.watch import Continue, Fail, RollBack, Stop, Watch
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rewards import RewardsConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.stage import StageConfig
from schemas.errors import NotFiniteError, PrunedError
from schemas.results.model import ModelRef
from schemas.results.sweep import Curve, Pruning

NOT_FINITE = NotFiniteError("loss nan")


def watch(folder, *, updates=100, max_hours=None, agree=lambda late: late, pruning=None, **stage):
    """A watch over the journal of a hundred updates without any figures."""
    spec = StageSpec(
        key="k",
        stage=StageConfig(name="s", rewards=["format"], **stage),
        seed=1,
        model=ModelConfig(),
        start=ModelRef(path="embedded:base"),
        rewards=RewardsConfig(),
        rollout=RolloutConfig(),
        resources=ResourcesConfig(max_hours=max_hours),
        train=folder / "train.parquet",
        pruning=pruning,
    )
    journal, events = Journal(folder / "metrics.jsonl", writes=False), Events(folder / "events.jsonl")
    journal.steps = {step: {} for step in range(1, 101)}
    return Watch(spec, updates, journal, events, Guards(spec.stage.guards), agree)


def write(watched, metric, values):
    for step, value in enumerate(values, start=1):
        watched.journal.steps[step][metric] = value


def verdicts(watched, steps):
    return [watched.decide(step) for step in range(1, steps + 1)]


def test_a_stage_continues_up_to_its_last_update(tmp_path):
    assert verdicts(watch(tmp_path, updates=3), 3) == [Continue(), Continue(), Stop("max_steps")]


@pytest.mark.parametrize(
    ("metric", "target", "values", "reached"),
    [("reward", 1.0, [0.0, 2.0, 2.0, 0.0], 3), ("kl", 0.1, [0.4, 0.1, 0.1, 0.4], 3), ("reward", 0.5, [9.0, 9.0, 9.0, 9.0], 3)],
)
def test_the_target_is_a_window_mean_in_the_better_direction(tmp_path, metric, target, values, reached):
    watched = watch(
        tmp_path, early_stop={"metric": metric, "target": target, "window": 2, "min_steps": 3}, guards={"kl_blow_up": "off"}
    )
    write(watched, metric, values)
    found = verdicts(watched, 4)
    assert found[: reached - 1] == [Continue()] * (reached - 1)
    assert found[reached - 1] == Stop("target")


def test_a_window_that_is_not_full_reaches_no_target(tmp_path):
    watched = watch(tmp_path, early_stop={"metric": "reward", "target": 0.0, "window": 3})
    write(watched, "reward", [1.0, 1.0, 1.0])
    assert verdicts(watched, 3) == [Continue(), Continue(), Stop("target")]


def test_a_plateau_is_so_many_evaluations_without_a_higher_reward(tmp_path):
    watched = watch(tmp_path, eval_steps=1, early_stopping_patience=2)
    write(watched, "eval_reward", [0.1, 0.3, 0.2, 0.3, 0.5])
    assert verdicts(watched, 4) == [Continue()] * 3 + [Stop("plateau")]
    assert [watched.journal.best_step(step) for step in range(1, 6)] == [1, 2, 2, 2, 5]
    assert isinstance(watch(tmp_path, eval_steps=1).goal(4), Continue)


def test_a_not_finite_update_fails_or_rolls_back(tmp_path):
    assert watch(tmp_path).decide(30, NOT_FINITE) == Fail(NOT_FINITE, save=False)
    assert not read_events(tmp_path / "events.jsonl")
    watched = watch(tmp_path, guards={"not_finite": "rollback"})
    assert watched.decide(30, NOT_FINITE) == RollBack(to=20, why="not_finite")
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["not_finite"]


@pytest.mark.parametrize("action", ["warn", "stop", "rollback"])
def test_a_guard_reports_and_does_what_its_action_says(tmp_path, action):
    watched = watch(tmp_path, guards={"kl_blow_up": action})
    write(watched, "kl", [0.9] * 10)
    *before, verdict = verdicts(watched, 10)
    assert before == [Continue()] * 9
    [event] = read_events(watched.events.path)
    assert (event["step"], event["event"]) == (10, "kl_blow_up")
    if action == "warn":
        assert verdict == Continue()
    elif action == "rollback":
        assert verdict == RollBack(to=0, why="kl_blow_up")
    else:
        assert not verdict.save
        assert "lower the learning rate" in verdict.error.message
        assert "stages.N.guards.kl_blow_up: warn" in verdict.error.fix


def test_trouble_outweighs_a_target_and_a_target_the_last_update(tmp_path):
    watched = watch(tmp_path, updates=10, early_stop={"metric": "kl", "target": 9.0}, guards={"kl_blow_up": "stop"})
    write(watched, "kl", [0.9] * 10)
    assert isinstance(watched.decide(10), Fail)
    assert watched.goal(10) == Stop("target")


def test_a_stage_fails_after_its_last_roll_back(tmp_path):
    watched = watch(tmp_path, guards={"not_finite": "rollback", "max_rollbacks": 1})
    assert isinstance(watched.decide(5, NOT_FINITE), RollBack)
    watched.guards.rollbacks = 1
    verdict = watched.decide(6, NOT_FINITE)
    assert (verdict.save, verdict.error.message) == (False, "not_finite, after 1 roll backs")


def test_a_stage_out_of_time_fails_with_a_checkpoint(tmp_path):
    watched = watch(tmp_path, updates=3, max_hours=1e-9)
    assert watched.decide(1, resumable=False) == Continue()
    verdict = watched.decide(1)
    assert verdict.save
    assert "stopped at update 1 of 3" in verdict.error.message
    # A complete stage is not late.
    assert watched.decide(3) == Stop("max_steps")


def test_the_first_ranks_clock_decides_for_all_ranks(tmp_path):
    asked = []
    patient = watch(tmp_path, max_hours=1e-9, agree=asked.append)
    assert patient.decide(1) == Continue()
    assert asked == [True]
    late = watch(tmp_path, max_hours=1000, agree=lambda _: True)
    assert isinstance(late.decide(1), Fail)


def in_a_sweep(folder, *, min_siblings=2):
    """Two other runs whose held-out reward is 0.5 at update 10."""
    for name in ("002", "003"):
        (folder / name / "curves").mkdir(parents=True)
        Curve(key=name, seed=1, family="f", values={10: 0.5}).save(folder / name / "curves" / "s.json")
    (folder / "001").mkdir()
    return Pruning(folder=folder / "001", family="f", min_siblings=min_siblings, same_seed=True)


def test_a_run_that_lags_behind_its_sweep_is_pruned_with_a_checkpoint(tmp_path):
    watched = watch(tmp_path, pruning=in_a_sweep(tmp_path))
    watched.journal.steps[10]["eval_reward"] = 0.4
    assert set(map(type, verdicts(watched, 9))) == {Continue}
    verdict = watched.decide(10)
    assert isinstance(verdict, Fail)
    assert verdict.save
    assert isinstance(verdict.error, PrunedError)
    assert "update 10 of 100" in verdict.error.message
    assert "--no-prune" in verdict.error.fix


def test_pruning_waits_for_an_update_that_can_be_resumed_from(tmp_path):
    watched = watch(tmp_path, pruning=in_a_sweep(tmp_path))
    watched.journal.steps[10]["eval_reward"] = 0.4
    assert watched.decide(10, resumable=False) == Continue()
    assert isinstance(watched.decide(11), Fail)


def test_a_run_that_keeps_up_publishes_its_curve_and_continues(tmp_path):
    watched = watch(tmp_path, pruning=in_a_sweep(tmp_path))
    watched.journal.writes = True
    watched.journal.steps[10]["eval_reward"] = 0.5
    assert verdicts(watched, 12) == [Continue()] * 12
    assert Curve.load(tmp_path / "001" / "curves" / "s.json").values == {10: 0.5}


def test_a_complete_stage_is_not_pruned_and_without_pruning_none_is(tmp_path):
    watched = watch(tmp_path, updates=10, pruning=in_a_sweep(tmp_path))
    watched.journal.steps[10]["eval_reward"] = 0.1
    assert watched.decide(10) == Stop("max_steps")
    (tmp_path / "other").mkdir()
    never = watch(tmp_path / "other", pruning=in_a_sweep(tmp_path / "other", min_siblings=None))
    never.journal.steps[10]["eval_reward"] = 0.1
    assert never.decide(10) == Continue()


def test_all_ranks_prune_when_the_first_one_does(tmp_path):
    asked = []
    watched = watch(tmp_path, pruning=in_a_sweep(tmp_path), agree=lambda lags: asked.append(lags) or True)
    watched.journal.steps[10]["eval_reward"] = 9.0
    assert isinstance(watched.decide(10), Fail)
    assert asked == [False]

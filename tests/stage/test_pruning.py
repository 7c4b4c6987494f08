"""The median rule: which runs of a sweep end early, and that the best never does."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.stage.watch import find_lag, other_curves, publish_curve
from schemas.results.sweep import Curve, Pruning

REWARDS = st.floats(-5, 5, allow_nan=False)


def curve(key, value, *, seed=1, family="f", step=10):
    return Curve(key=key, seed=seed, family=family, values={step: value})


@given(ours=REWARDS, others=st.lists(REWARDS, max_size=9), least=st.integers(1, 5))
def test_a_run_is_pruned_exactly_when_enough_others_have_a_higher_median(ours, others, least):
    siblings = [curve(f"k{index}", value) for index, value in enumerate(others)]
    lag = find_lag(curve("own", ours), siblings, 10, min_siblings=least, same_seed=True)
    assert (lag is not None) == (len(others) >= least and ours < median(others))


@given(
    values=st.lists(REWARDS, min_size=2, max_size=9),
    seeds=st.lists(st.integers(1, 3), min_size=9, max_size=9),
    same_seed=st.booleans(),
)
def test_at_every_update_the_best_run_continues(values, seeds, same_seed):
    curves = [curve(f"k{index}", value, seed=seeds[index]) for index, value in enumerate(values)]
    best = max(curves, key=lambda one: one.values[10])
    assert find_lag(best, [one for one in curves if one is not best], 10, min_siblings=1, same_seed=same_seed) is None


def test_what_counts_is_the_best_so_far_at_the_same_update():
    own = Curve(key="own", seed=1, family="f", values={10: 0.5, 20: 0.2})
    late = [Curve(key=f"k{index}", seed=1, family="f", values={10: 0.1, 20: 0.4, 30: 2.0}) for index in range(2)]
    assert find_lag(own, late, 20, min_siblings=2, same_seed=False) is None, (
        "0.5 so far against 0.4; what comes at 30 does not count"
    )
    early = [Curve(key=f"k{index}", seed=1, family="f", values={10: 9.0}) for index in range(2)]
    assert find_lag(own, early, 20, min_siblings=2, same_seed=False) is None, "the others have not come that far"
    assert find_lag(own, early, 10, min_siblings=2, same_seed=False) is not None


def test_another_seed_counts_only_where_all_runs_are_compared():
    own, bad = curve("own", 0.5), [curve(f"b{index}", 0.1) for index in range(2)]
    good = [curve(f"g{index}", 0.9, seed=2) for index in range(3)]
    assert find_lag(own, [*bad, *good], 10, min_siblings=2, same_seed=True) is None
    assert find_lag(own, good, 10, min_siblings=2, same_seed=True) is None, "too few of its own seed"
    lag = find_lag(own, [*bad, *good], 10, min_siblings=2, same_seed=False)
    assert lag is not None
    assert lag.siblings == 5


def test_another_family_and_the_same_stage_do_not_count():
    own = curve("own", 0.1)
    other_rewards = [curve(f"k{index}", 9.0, family="g") for index in range(3)]
    same_stage = [curve("own", 9.0), curve("twin", 9.0), curve("twin", 9.0)]
    assert find_lag(own, other_rewards, 10, min_siblings=2, same_seed=False) is None
    assert find_lag(own, same_stage, 10, min_siblings=2, same_seed=False) is None, "two runs that share a stage are one curve"


def test_curves_are_found_by_the_other_runs_and_not_by_the_own(tmp_path):
    runs = [Pruning(folder=tmp_path / f"{number:03d}", family="f", min_siblings=1, same_seed=True) for number in (1, 2)]
    for run in runs:
        run.folder.mkdir()
        publish_curve(curve(run.folder.name, 0.5), run, "format")
    assert [one.key for one in other_curves(runs[0], "format")] == ["002"]
    assert other_curves(runs[0], "correctness") == []


def test_a_node_that_cannot_see_the_sweep_writes_nothing(tmp_path):
    publish_curve(curve("k", 0.5), Pruning(folder=tmp_path / "elsewhere", family="f", min_siblings=1, same_seed=True), "format")
    assert list(tmp_path.iterdir()) == []

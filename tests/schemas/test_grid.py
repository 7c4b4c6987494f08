"""The runs of a sweep, and what is refused before any of them."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.config.grid import MAX_RUNS, Axis, make_grid
from schemas.errors import ConfigError
from schemas.results.sweep import VariantSpec

RATE, GROUP = "stages.0.learning_rate", "stages.1.num_generations"


def grid(*over, seeds=1, overrides=()):
    return make_grid("demo", list(overrides), over, seeds=seeds)


def refusal(*over, seeds=1):
    with pytest.raises(ConfigError) as error:
        grid(*over, seeds=seeds)
    return str(error.value)


def test_a_grid_has_all_combinations_and_the_first_seed_first():
    made = grid(f"{RATE}=1e-5,5e-6", f"{GROUP}=4,8", seeds=3)
    found = [
        (variant.config.seed, variant.config.stages[0].learning_rate, variant.config.stages[1].num_generations)
        for variant in made.variants
    ]
    assert found == [(seed, rate, group) for seed in (42, 43, 44) for rate in (1e-5, 5e-6) for group in (4, 8)]
    assert [variant.number for variant in made.variants] == list(range(1, 13))
    assert made.variants[0].label == "learning_rate 1e-5, num_generations 4, seed 42"


def test_the_settings_of_a_run_give_its_config_to_an_ordinary_run():
    from schemas.config.load import load_config

    made = grid(f"{RATE}=1e-5,5e-6", "stages.0.rewards=[format],[incremental_format, format]", seeds=2)
    for variant in made.variants:
        assert load_config("demo", made.settings_of(variant.number)) == variant.config


def test_stages_without_held_out_evaluations_get_some_and_others_keep_theirs():
    made = grid(f"{RATE}=1e-5,5e-6", overrides=["stages.0.eval_steps=7"])
    assert made.added == ("stages.1.eval_steps=37",)
    assert [stage.eval_steps for stage in made.variants[0].config.stages] == [7, 37]
    varied = grid("stages.0.eval_steps=5,10")
    assert [variant.config.stages[0].eval_steps for variant in varied.variants] == [5, 10]


def test_every_fault_of_every_value_is_reported_at_once_with_a_fix():
    text = refusal(f"{RATE}=abc,1e-5,-1", "stages.0.learnin=3,4", "stages.9.beta=0", "name=a,b", "oops", seeds=2)
    for part in (
        "learning_rate=abc", "learning_rate=-1", "did you mean", "stages.9.beta=0", "--over name: it changes no trained model",
        "--over oops has no values", "fix:",
    ):  # fmt: skip
        assert part in text
    assert "1e-5:" not in text, "a valid value is not reported"


@pytest.mark.parametrize(
    ("over", "seeds", "said"),
    [
        ((), 1, "one run is no sweep"),
        ((f"{RATE}=",), 1, "an empty value"),
        ((f"{RATE}=1e-5,1e-5",), 1, "1e-5 is given twice"),
        ((f"{RATE}=1e-5,0.00001",), 1, "two runs are the same"),
        ((f"{RATE}=1e-5,2e-5", f"{RATE}=3e-5"), 1, "given twice"),
        (("seed=1,2",), 2, "--seeds chooses the seeds too"),
        ((f"{RATE}=1e-5,2e-5",), MAX_RUNS, "is the limit"),
        ((f"{RATE}=1e-5,2e-5",), 0, "a number from 1"),
        (("resources.num_threads=1,2",), 1, "it changes no trained model"),
        # Each is valid alone.
        (("stages.0.num_generations=8,64", "stages.0.per_device_train_batch_size=64,8"), 1, "exclude each other"),
    ],
)
def test_a_grid_that_compares_nothing_or_cannot_be_is_refused(over, seeds, said):
    assert said in refusal(*over, seeds=seeds)


def test_a_seed_can_be_an_axis():
    made = grid("seed=1,2")
    assert [(variant.config.seed, variant.label) for variant in made.variants] == [(1, "seed 1"), (2, "seed 2")]


def test_the_family_is_the_runs_with_comparable_held_out_rewards():
    same = grid(f"{RATE}=1e-5,5e-6", f"{GROUP}=4,8", seeds=2)
    assert len({variant.family for variant in same.variants}) == 1
    other = grid("stages.0.rewards=[format],[incremental_format]")
    assert len({variant.family for variant in other.variants}) == 2


def test_a_run_survives_its_way_to_another_process(tmp_path):
    variant = grid(f"{RATE}=1e-5,5e-6").variants[0]
    pruning = {"folder": tmp_path, "family": variant.family, "min_siblings": 2, "same_seed": True}
    known = {"number": 1, "label": variant.label, "key": "k", "sweep": "s", "parent_run_id": "p", "prefect_api": None}
    VariantSpec(config=variant.config, pruning=pruning, **known).save(tmp_path / "spec.json")
    assert VariantSpec.load(tmp_path / "spec.json").config == variant.config


VALUES = st.sampled_from(["1e-5", "[a, b]", "{x: 1, y: [2, 3]}", "'a,b'", '"[,"', "null", "-3", "true"])


@settings(max_examples=60, deadline=None)
@given(values=st.lists(VALUES, min_size=1, max_size=6, unique=True))
def test_commas_inside_brackets_and_quotes_belong_to_the_value(values):
    assert Axis.of("a.b=" + ",".join(values)).values == tuple(values)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), seeds=st.integers(2, 3))
def test_a_grid_is_the_product_of_its_axes(sizes, seeds):
    paths = ["stages.0.learning_rate", "stages.0.beta", "stages.1.epsilon"][: len(sizes)]
    over = [f"{path}=" + ",".join(f"0.{digit}" for digit in range(1, size + 1)) for path, size in zip(paths, sizes, strict=True)]
    made = grid(*over, seeds=seeds)
    assert len(made.variants) == seeds * math.prod(sizes)
    chosen = [(*variant.settings.values(), variant.config.seed) for variant in made.variants]
    expected = itertools.product(*([f"0.{digit}" for digit in range(1, size + 1)] for size in sizes), range(42, 42 + seeds))
    assert sorted(chosen) == sorted(expected)

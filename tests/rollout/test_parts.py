"""Sampling in parts: where it stops, what a process that was killed leaves, and that it then decides as before."""

import json
import warnings

import polars as pl
import pytest

from grpo_tasks.rollout import parts
from grpo_tasks.rollout.parts import PARTS, sample_in_parts, stopping_places
from grpo_tasks.rollout.spec import SampleSpec, chosen_rows
from grpo_tasks.running.step import clear
from schemas.config.evaluation import EvaluationConfig
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import Notice
from schemas.prompts import GREEDY
from schemas.results.model import ModelRef


class Killed(BaseException):
    """In place of SIGKILL."""


class Sampler:
    """Samples one token a prompt, in so many seconds a prompt by its own clock; `killed_at` ends it in that part."""

    def __init__(self, seconds=1.0, killed_at=None):
        self.seconds, self.killed_at, self.asked, self.now = seconds, killed_at, [], 0.0

    def monotonic(self):
        return self.now

    def __call__(self, spec, directory):
        rows = chosen_rows(spec.prompts, spec.max_prompts, spec.only)
        self.asked.append(len(rows))
        self.now += self.seconds * len(rows)
        if len(self.asked) == self.killed_at:
            raise Killed
        drawn = [(row.prompt_id, sample) for sample in (0, GREEDY) for row in rows]
        table = pl.DataFrame(drawn, schema=["prompt_id", "sample"], orient="row")
        table.write_parquet(directory / "samples.parquet")


@pytest.fixture
def sampled(tmp_path, monkeypatch):
    """Sample for 256 prompts, with the half width that belongs to each number of prompts; what was used, and the samples."""
    folder = tmp_path / "step"
    table = tmp_path / "prompts.parquet"
    messages = [[{"role": "user", "content": "1 + 1?"}]] * 256
    same = {"source": "a", "line": 1, "answer": "2", "prompt_tokens": 3, "task": "", "extra": "{}", "answers": None}
    ids = [f"{number:016x}" for number in reversed(range(256))]
    pl.DataFrame({"prompt_id": ids, "prompt": messages}).with_columns(**{k: pl.lit(v) for k, v in same.items()}).write_parquet(
        table
    )

    def sample(sampler, widths=None, key="k", **limits):
        monkeypatch.setattr(parts, "run_sampling", sampler)
        monkeypatch.setattr(parts.time, "monotonic", sampler.monotonic)
        clear(folder, resumable=False, keep=(PARTS,))
        spec = SampleSpec(
            model=ModelConfig(),
            ref=ModelRef(path="embedded:base"),
            prompts=table,
            num_samples=1,
            rollout=RolloutConfig(),
            resources=ResourcesConfig(),
            seed=1,
        )
        looked = lambda samples: (widths or {}).get(samples["prompt_id"].n_unique())  # noqa: E731
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", Notice)
            used = sample_in_parts(spec, folder, EvaluationConfig(**limits), looked, least=32, key=key)
        return used, pl.read_parquet(folder / "samples.parquet"), [str(line.message) for line in said]

    return sample


def test_without_a_limit_all_prompts_are_sampled_at_once(sampled):
    sampler = Sampler()
    used, samples, said = sampled(sampler)
    assert (used, sampler.asked, said) == (None, [256], [])
    assert samples["prompt_id"].n_unique() == 256


@pytest.mark.parametrize(
    ("total", "least", "places"),
    [(256, 32, [32, 64, 128, 256]), (100, 32, [32, 50, 100]), (32, 32, [32]), (5, 32, [5]), (16, 8, [8, 16])],
)
def test_there_are_at_most_three_places_to_stop_before_the_end(total, least, places):
    assert stopping_places(total, least) == places


def test_sampling_stops_where_the_interval_is_narrow_enough(sampled):
    sampler = Sampler()
    used, samples, said = sampled(sampler, {32: 0.2, 64: 0.05, 128: 0.01}, max_half_width=0.06)
    assert sampler.asked == [32, 32]
    assert (used.used, used.of, used.stopped, used.looks, used.half_width) == (64, 256, "interval", 4, 0.05)
    assert said == ["64 of 256 prompts were sampled: the interval is within 5.0 points (evaluation.max_half_width)"]
    # In the order of one process: the first prompts by id, sampled completions before greedy ones.
    whole, *_ = sampled(Sampler())[1:]
    first = whole.filter(pl.col("prompt_id").is_in(samples["prompt_id"].to_list()))
    assert samples.equals(first)
    assert samples["prompt_id"].max() == sorted(whole["prompt_id"].unique())[63]


def test_an_interval_that_stays_wide_or_is_unknown_stops_nothing(sampled):
    used, samples, said = sampled(Sampler(), {32: 0.2, 64: None, 128: 0.1}, max_half_width=0.06)
    assert (used.used, used.stopped, said, samples["prompt_id"].n_unique()) == (256, "all", [], 256)


def test_the_time_decides_how_many_prompts_fit_after_the_first_ones(sampled):
    sampler = Sampler(seconds=1.0)
    used, _, said = sampled(sampler, max_minutes=2.0)
    assert sampler.asked == [32, 88]
    assert (used.used, used.stopped, used.looks, used.seconds) == (120, "time", 1, 120.0)
    assert said == ["120 of 256 prompts were sampled: there was no time for more (evaluation.max_minutes)"]
    sampler = Sampler(seconds=10.0)
    assert sampled(sampler, key="slow", max_minutes=2.0)[0].used == 32
    assert sampler.asked == [32]
    assert sampled(Sampler(seconds=0.1), key="fast", max_minutes=2.0)[0].stopped == "all"


def test_both_limits_hold(sampled):
    sampler = Sampler()
    used, *_ = sampled(sampler, {32: 0.2, 64: 0.1}, max_half_width=0.06, max_minutes=1.5)
    assert sampler.asked == [32, 32, 26]
    assert (used.used, used.stopped, used.half_width) == (90, "time", 0.1)


@pytest.mark.parametrize("killed_at", [2, 3])
def test_a_killed_step_continues_with_its_parts_and_decides_as_before(sampled, killed_at):
    """Even on a machine that has become ten times slower."""
    widths, limits = {32: 0.2, 64: 0.1}, {"max_half_width": 0.06, "max_minutes": 1.5}
    wanted = sampled(Sampler(), widths, key="never killed", **limits)
    with pytest.raises(Killed):
        sampled(Sampler(killed_at=killed_at), widths, **limits)
    slower = Sampler(seconds=1.0)
    assert [*sampled(slower, widths, **limits)[:1]] == [wanted[0]]
    assert slower.asked == [32, 32, 26][killed_at - 1 :]
    # Everything is sampled: only the decision is left, and the clock has no part in it.
    used, samples, said = sampled(Sampler(seconds=10.0), widths, **limits)
    assert (used, said) == (wanted[0], wanted[2])
    assert samples.equals(wanted[1])


def test_parts_of_other_inputs_are_not_taken(sampled):
    with pytest.raises(Killed):
        sampled(Sampler(killed_at=2), max_half_width=0.06, key="before")
    sampler = Sampler()
    sampled(sampler, max_half_width=0.06, key="after")
    assert sampler.asked == [32, 32, 64, 128]


def test_what_a_part_took_is_written_before_its_samples(sampled, tmp_path):
    """Samples without a time would be sampled in vain: a killed process leaves both, or samples the part again."""
    with pytest.raises(Killed):
        sampled(Sampler(killed_at=2), max_half_width=0.06)
    folder = tmp_path / "step" / PARTS / "k"
    assert sorted(path.name for path in folder.iterdir()) == ["0.json", "0.parquet"]
    assert json.loads((folder / "0.json").read_text()) == {"seconds": 32.0}
    (folder / "0.parquet").unlink()
    sampler = Sampler()
    sampled(sampler, max_half_width=0.06)
    assert sampler.asked[0] == 32

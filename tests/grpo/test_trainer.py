"""A stage as a whole, in process: on the embedded model with real rewards."""

import json

import polars as pl
import pytest

from grpo_tasks.data.prompts import prompt_id
from grpo_tasks.grpo.stage_dir import StageDir, StageSpec
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.rewards.compose import RewardSuite
from schemas.config import ModelConfig, ResourcesConfig, RewardsConfig, RolloutConfig, StageConfig
from schemas.metrics import describe
from schemas.results import ModelRef

SYSTEM = {"role": "system", "content": "Reply with <reasoning>...</reasoning><answer>...</answer>."}


@pytest.fixture
def train(tmp_path):
    rows = []
    for a in range(11, 41):
        messages, answer = [SYSTEM, {"role": "user", "content": f"What is {a} + 27?"}], str(a + 27)
        name = prompt_id(messages, answer)
        rows.append(
            {
                "prompt_id": name,
                "source": "made",
                "line": a,
                "prompt": messages,
                "answer": answer,
                "prompt_tokens": 34,
                "extra": "{}",
            }
        )
    pl.DataFrame(rows).write_parquet(tmp_path / "train.parquet")

    def run(name="stage", **stage):
        directory = StageDir(tmp_path / name)
        directory.root.mkdir()
        settings = {
            "name": "s",
            "rewards": ["incremental_format", "format"],
            "max_steps": 3,
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-3,
            "save_steps": 10,
        }
        start = stage.pop("start", ModelRef(path="embedded:base"))
        rollout = RolloutConfig(max_completion_length=stage.pop("length", 40))
        StageSpec(
            key="k",
            stage=StageConfig(**settings | stage),
            seed=3,
            model=ModelConfig(),
            start=start,
            rewards=RewardsConfig(),
            rollout=rollout,
            resources=ResourcesConfig(device="cpu", num_threads=1),
            train=tmp_path / "train.parquet",
        ).save(directory.spec)
        spec = StageSpec.load(directory.spec)
        with RewardSuite(spec.rewards, spec.stage.rewards) as suite:
            return Trainer(directory, suite).train(), directory

    return run


def journal(directory):
    return [json.loads(line)["metrics"] for line in directory.journal.read_text().splitlines()]


def test_on_policy_ratios_are_one_and_the_sampler_agrees_with_the_trainer(train):
    _, directory = train(beta=0.01)
    for line in journal(directory):
        assert line["clip_ratio/region_mean"] == 0
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    assert journal(directory)[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert journal(directory)[-1]["kl"] > 0


def test_every_metric_of_the_journal_is_in_the_table(train):
    _, directory = train(beta=0.01)
    assert [name for line in journal(directory) for name in line if describe(name) is None] == []


def test_accumulation_changes_nothing_but_rounding(train):
    """The golden equivalence: one pass of 8 completions, and eight passes of one."""
    whole, first = train("whole", loss_type="dapo")
    cut, second = train("cut", loss_type="dapo", per_device_train_batch_size=1, gradient_accumulation_steps=8)
    for one, other in zip(journal(first), journal(second), strict=True):
        for name in ("reward", "loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5)
    assert whole.steps == cut.steps


def test_several_updates_of_one_rollout_bring_the_ratio_back(train):
    _, directory = train(num_iterations=3, max_steps=6, learning_rate=1e-2)
    lines = journal(directory)
    assert lines[0]["reward"] == lines[1]["reward"] == lines[2]["reward"]
    assert lines[0]["sampling/sampling_logp_difference/max"] == pytest.approx(
        lines[2]["sampling/sampling_logp_difference/max"], abs=1e-4
    )
    assert lines[2]["clip_ratio/region_mean"] > 0


def test_a_stage_ends_early_when_its_target_is_reached(train):
    result, _ = train(max_steps=50, early_stop={"metric": "reward", "target": -1.0, "window": 2, "min_steps": 3})
    assert (result.steps, result.stopped) == (3, "target")


def test_completions_that_are_cut_off_are_masked_only_when_asked(train):
    _, loose = train("loose", length=6, loss_type="grpo")
    _, masked = train("masked", length=6, loss_type="grpo", mask_truncated_completions=True)
    assert all(line["completions/clipped_ratio"] == 1.0 for line in journal(masked)[:1])
    assert journal(masked)[0]["grad_norm"] == 0
    assert journal(loose)[0]["completions/max_length"] == 6


def test_the_completions_table_names_each_completion_once_with_its_rewards(train):
    _, directory = train()
    table = pl.read_parquet(directory.completions(3))
    assert table.height == 8
    assert table.select("stage", "step", "prompt_id", "sample").is_unique().all()
    total = table["reward_format"] + table["reward_incremental_format"]
    assert (total - table["reward"]).abs().max() < 1e-9
    assert abs(table["advantage"].sum()) < 1e-4


def test_kl_towards_the_start_of_the_stage_begins_at_zero_and_towards_the_base_does_not(train):
    first, _ = train("first", learning_rate=1e-2)
    _, near = train("near", start=first.model, beta=0.1, reference="stage_start")
    _, far = train("far", start=first.model, beta=0.1, reference="base")
    assert journal(near)[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert journal(near)[-1]["kl"] > 0
    assert journal(far)[0]["kl"] > 1e-3

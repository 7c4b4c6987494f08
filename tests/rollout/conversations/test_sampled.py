"""Conversations of an evaluation: sampled, written into the table, scored from it."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_tasks.data.table import prompt_id, read_prompts
from grpo_tasks.rewards.held_out import reward_columns
from grpo_tasks.rollout.conversations import player
from grpo_tasks.rollout.sample_table import sample_table
from grpo_tasks.rollout.spec import SampleSpec
from schemas.config.completion import CompletionConfig
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rewards import RewardsConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.run import Scoring
from schemas.prompts import GREEDY
from schemas.results.model import ModelRef
from tests.rollout.counting import Counting, interaction


@pytest.fixture
def spec(tmp_path):
    rows = []
    for number in (11, 12):
        messages = [{"role": "user", "content": f"What is {number} + 27?"}]
        row = {"prompt_id": prompt_id(messages, "4"), "source": "made", "line": number, "prompt": messages, "answer": "4"}
        rows.append(row | {"prompt_tokens": 9, "extra": "{}", "answers": None, "task": ""})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return SampleSpec(
        model=ModelConfig(),
        ref=ModelRef(path="embedded:base"),
        prompts=tmp_path / "rows.parquet",
        max_prompts=None,
        num_samples=2,
        temperature=1.0,
        greedy=True,
        rollout=RolloutConfig(max_completion_length=16),
        resources=ResourcesConfig(device="cpu", num_threads=1),
        seed=3,
        interaction=interaction(),
    )


@pytest.mark.slow
def test_an_evaluation_plays_and_its_rewards_are_those_of_the_table(spec, tmp_path, monkeypatch):
    environment = Counting(2)
    monkeypatch.setattr(player, "EnvironmentPool", lambda *_, **__: environment)
    table = sample_table(spec, tmp_path)
    assert table["sample"].to_list() == [0, 1, 0, 1, GREEDY, GREEDY]
    shown = [json.loads(text) for text in table["conversation"]]
    assert [len(one["turns"]) for one in shown] == [2] * 6
    assert [one["turns"][-1]["text"] for one in shown] == table["completion"].to_list()
    # Every sample of a prompt has the same environment, the greedy one too.
    seeds = [seed for _, _, seed in environment.begun]
    assert seeds[0] == seeds[1] == seeds[4] != seeds[2] == seeds[3] == seeds[5]
    scoring = Scoring(rewards=RewardsConfig(), weighted=["environment"], reported=[])
    scores = reward_columns(table, read_prompts(spec.prompts), scoring, completion=CompletionConfig(), per_prompt=2)
    assert scores["reward"].to_list() == pytest.approx([one["reward"] for one in shown])


def test_a_part_of_the_samples_is_the_same_alone(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(player, "EnvironmentPool", lambda *_, **__: Counting(2))
    whole = sample_table(spec.model_copy(update={"greedy": False}), tmp_path)
    part = spec.part([whole["prompt_id"][2]], range(1, 2)).model_copy(update={"greedy": False})
    assert sample_table(part, tmp_path).equals(whole[3:4])

"""A class and a reward as TRL's page on environments has them, without an import of ours: played, rewarded, compared."""

import numpy as np
import pytest
import torch

from grpo_tasks.grpo.advantages import advantages
from grpo_tasks.grpo.rounds import rewards_of, sample_groups, score_groups
from grpo_tasks.policy.load import load_policy
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.conversations import player
from grpo_tasks.rollout.engine import Sampling
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.completion import CompletionConfig
from schemas.config.model import ModelConfig
from schemas.config.rewards import RewardsConfig
from schemas.config.rollout import InteractionConfig, RolloutConfig
from schemas.config.stage import StageConfig
from schemas.results.model import ModelRef
from tests.rollout.counting import three_rows
from tests.rollout.tool_model import write_model

WRITTEN_FOR_TRL = '''
class SummingEnv:
    def reset(self, **kwargs) -> str | None:
        self.total = 0
        self.calls = 0
        self.level = kwargs["level"]
        return " You may add."

    def add(self, a: int, b: int) -> int:
        """
        Adds two numbers.

        Args:
            a: The first.
            b: The second.

        Returns:
            Their sum.
        """
        self.total += a + b
        self.calls += 1
        return a + b


def calls_reward(environments, **kwargs) -> list[float]:
    return [float(environment.calls) for environment in environments]


def total_reward(completions, environments, level, **kwargs) -> list[float]:
    assert [environment.level for environment in environments] == level
    return [environment.total / 100 for environment in environments]
'''


@pytest.fixture
def scored(tmp_path, monkeypatch):
    """Three groups of four conversations of a model that calls `add`, scored by the rewards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "for_trl.py").write_text(WRITTEN_FOR_TRL, encoding="utf-8")
    ref = ModelRef(path=str(write_model(tmp_path / "model", weights=True)))
    config, free = InteractionConfig(environment="for_trl:SummingEnv", workers=2, max_turns=3), CompletionConfig(format="none")
    names = ["calls_reward", "total_reward"]
    functions = {"functions": {name: {"function": f"for_trl:{name}"} for name in names}, "module_dir": str(tmp_path)}
    rollout = RolloutConfig(max_completion_length=24)
    with (
        player(config, ref, ModelConfig(), rollout, completion=free) as found,
        RewardSuite(RewardsConfig(**functions), names) as suite,
    ):
        engine = LocalEngine(load_policy(ref, ModelConfig(), device=torch.device("cpu")), found.tokenizer)
        given = (engine, found.tokenizer, three_rows(), Sampling.of(rollout))
        played = sample_groups(*given, numbers=range(3), group_size=4, seed=5, player=found)
        return score_groups(suite, played, step=1)


@pytest.mark.slow
def test_a_reward_written_for_trl_sees_what_its_environment_has_become(scored):
    conversations = [completion.conversation for completion in scored.rollout.completions]
    answers = [[message["content"] for message in one.said if message["role"] == "tool"] for one in conversations]
    sums = [[int(text) for text in texts if text.isdigit()] for texts in answers]
    assert any(sums)
    assert scored.scores.raw[:, 0].tolist() == [float(len(each)) for each in sums]
    assert np.allclose(scored.scores.raw[:, 1], [sum(each) / 100 for each in sums])
    assert all(one.prompt[-1]["content"].endswith(" You may add.") for one in conversations)
    stage = StageConfig(name="s", rewards=["calls_reward", "total_reward"], num_generations=4)
    assert not advantages(rewards_of(scored), stage).dead.all()

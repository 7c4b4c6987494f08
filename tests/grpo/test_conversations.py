"""Stages whose policy is answered: what is trained, what is rewarded, what is written down."""

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

from grpo_tasks.grpo.advantages import Advantages, advantages
from grpo_tasks.grpo.losses import LossInputs, policy_loss
from grpo_tasks.grpo.measure import completions_table, conversation_metrics, rollout_metrics
from grpo_tasks.grpo.microbatches import make_microbatches
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.rounds import rewards_of, sample_groups, score_groups, with_charged_faults
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.policy.load import load_policy, load_tokenizer
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rollout.conversations import Player, player
from grpo_tasks.rollout.engine import Sampling
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.completion import CompletionConfig
from schemas.config.model import ModelConfig
from schemas.config.rewards import RewardsConfig
from schemas.config.rollout import InteractionConfig, RolloutConfig
from schemas.config.stage import StageConfig
from schemas.results.model import ModelRef
from tests.grpo.conftest import journal
from tests.in_process import suite_of
from tests.rollout.counting import Counting, interaction, three_rows
from tests.rollout.tool_model import write_model

FIGURES = (
    "conversations/turns",
    "conversations/environment_tokens",
    "conversations/environment_reward",
    "tools/call_frequency",
)


@pytest.fixture
def rollout(policy, tokenizer):
    """Three groups of four conversations of three turns."""
    engine = LocalEngine(policy, tokenizer)
    player = Player(Counting(3), interaction(), tokenizer)
    sampling = Sampling.of(RolloutConfig(max_completion_length=24))
    return sample_groups(engine, tokenizer, three_rows(), sampling, numbers=range(3), group_size=4, seed=5, player=player)


def microbatches(rollout, **settings):
    stage = StageConfig(name="s", rewards=["format"], num_generations=4, **{"per_device_train_batch_size": 12} | settings)
    values = torch.arange(1.0, 13.0)[:, None]
    advantages = Advantages(values, torch.ones(3), torch.zeros(3, dtype=torch.bool))
    made = make_microbatches(
        rollout,
        advantages,
        range(12),
        stage,
        max_completion_length=200,
        device=torch.device("cpu"),
        ranks=OneRank(),
    )
    return stage, made


class OneRank(Ranks):
    """The only rank."""

    def __init__(self):
        pass

    def share(self, items):
        return items


def reference_logps(model, rollout):
    """transformers' log-probabilities of every token after each prompt, conversation by conversation."""
    found = []
    for index, completion in enumerate(rollout.completions):
        prompt = list(rollout.prompts[rollout.prompt_of[index]])
        ids = torch.tensor([prompt + completion.token_ids])
        logps = model(ids).logits[0].log_softmax(-1)
        found.append(logps[:-1].gather(1, ids[0, 1:, None]).squeeze(1)[len(prompt) - 1 :])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("loss_type", "size"), [("grpo", 12), ("dapo", 4), ("dr_grpo", 4)])
def test_the_loss_is_that_of_the_written_tokens_alone(policy, rollout, loss_type, size):
    policy.eval()
    stage, made = microbatches(
        rollout, loss_type=loss_type, per_device_train_batch_size=size, gradient_accumulation_steps=12 // size
    )
    written = [torch.tensor(completion.written) for completion in rollout.completions]
    total = sum(int(each.sum()) for each in written)
    wanted = torch.zeros(())
    for index, logps in enumerate(reference_logps(policy, rollout)):
        mine = written[index]
        weight = {"grpo": 1 / (12 * int(mine.sum())), "dapo": 1 / total, "dr_grpo": 1 / (12 * 200)}[loss_type]
        # On-policy the ratio is 1, and its gradient that of the log-probability.
        wanted = wanted - weight * (index + 1.0) * (logps - logps.detach()).exp()[mine].sum()
    wanted_gradients = torch.autograd.grad(wanted, [one for one in policy.parameters() if one.requires_grad])
    loss = torch.zeros(())
    for microbatch in made:
        scores = completion_logprobs(policy, microbatch.tokens, temperature=1.0).logps
        inputs = LossInputs(
            logps=scores,
            old_logps=scores.detach(),
            ref_logps=None,
            advantages=microbatch.advantages,
            mask=microbatch.trained,
            weights=microbatch.weights,
        )
        loss = loss + policy_loss(inputs, stage).loss
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-6)
    gradients = torch.autograd.grad(loss, [one for one in policy.parameters() if one.requires_grad])
    for found, right in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-5)


def test_tokens_of_the_environment_have_no_weight_wherever_they_stand(rollout):
    stage, (made,) = microbatches(rollout)
    said = made.tokens.completion_mask & ~made.trained
    assert said.sum() > 12
    assert made.weights[said].abs().sum() == 0
    assert made.entropy_weights[said].abs().sum() == 0
    # Whatever the model thinks of them: the loss and its figures stay the same, infinities included.
    logps = torch.where(said, torch.tensor(-200.0), torch.tensor(-1.0)).requires_grad_()
    inputs = LossInputs(
        logps=logps,
        old_logps=torch.where(said, torch.tensor(0.0), torch.tensor(-1.1)),
        ref_logps=torch.where(said, torch.tensor(0.0), torch.tensor(-1.2)),
        advantages=made.advantages,
        mask=made.trained,
        weights=made.weights,
    )
    out = policy_loss(inputs, stage.model_copy(update={"beta": 0.1}))
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(out.kl_sum)
    assert (logps.grad[said] == 0).all()
    assert (logps.grad[made.trained] != 0).all()


@pytest.fixture
def suite():
    """The reward of the environment, and functions of a test."""
    rewards = {"functions": {name: {"function": f"tests.grpo.rewards:{name}"} for name in ("shape", "by_turn")}}
    with RewardSuite(RewardsConfig(**rewards), ["environment", "shape", "by_turn"]) as made:
        yield made


def test_reward_functions_get_the_conversation_and_may_score_its_turns(rollout, suite):
    scored = score_groups(suite, rollout, step=1)
    scores = scored.scores
    assert scores.raw[:, 1].tolist() == [1.0] * 12
    assert scores.raw[:, 2].tolist() == [3.0] * 12
    own = [completion.conversation.reward for completion in rollout.completions]
    assert np.allclose(scores.raw[:, 0], own)
    tokens = rewards_of(scored).tokens
    for row, completion in zip(tokens[..., 2], rollout.completions, strict=True):
        for value, turn in zip([0.0, 3.0, 6.0], completion.conversation.turns, strict=True):
            assert set(row[turn.start : turn.end].tolist()) == {value}
        said = ~torch.tensor(completion.written)
        assert row[: len(said)][said].isnan().all()


def broken(completion, **fields):
    """The completion, ended by a fault of its environment."""
    return replace(completion, conversation=replace(completion.conversation, error="it broke", ending="error", **fields))


@pytest.fixture
def charged(rollout, suite):
    """The scored rollout in which a fault has ended these conversations."""

    def score(*failed):
        completions = [broken(one) if index in failed else one for index, one in enumerate(rollout.completions)]
        return with_charged_faults(score_groups(suite, replace(rollout, completions=completions), step=1))

    return score


def test_nobody_gains_by_a_fault_of_the_environment(rollout, charged):
    scored = charged(0)
    totals, stage = scored.scores.totals, StageConfig(name="s", rewards=["environment"], num_generations=4)
    assert not np.isnan(totals).any()
    assert totals[0] <= min(0.0, totals[1:4].min())
    found = advantages(rewards_of(scored), stage).values
    written = torch.tensor(scored.rollout.completions[0].written)
    # An honest failure would not be better off by a fault: the fault has the lowest advantage of its group.
    assert (found[0, : len(written)][written] < 0).all()
    assert rollout_metrics(scored, advantages(rewards_of(scored), stage))["reward"] == pytest.approx(totals.mean())
    failed = [broken(rollout.completions[0]), *rollout.completions[1:4]]
    assert conversation_metrics(failed)["conversations/errors"] == 0.25


def test_a_group_that_failed_as_a_whole_is_dead_and_counts(charged):
    scored = charged(0, 1, 2, 3)
    found = advantages(rewards_of(scored), StageConfig(name="s", rewards=["environment"], num_generations=4))
    assert found.dead.tolist() == [True, False, False]
    assert (found.values[:4] == 0).all()
    assert (scored.scores.totals[:4] <= scored.scores.totals[4:].min()).all()


def test_what_has_not_begun_keeps_out_of_the_baseline(rollout, suite):
    first = broken(rollout.completions[0], turns=[])
    first = replace(first, token_ids=[], logprobs=[], written=[], policy_logprobs=[], text="")
    scored = score_groups(suite, replace(rollout, completions=[first, *rollout.completions[1:]]), step=1)
    assert np.isnan(with_charged_faults(scored).scores.totals).tolist() == [True] + [False] * 11


def test_the_table_shows_the_conversation_turn_by_turn(rollout, suite):
    table = completions_table(score_groups(suite, rollout, step=1), torch.zeros(12, 1), stage="s", step=1, policy_version=0)
    for text, completion in zip(table["conversation"].to_pylist(), rollout.completions, strict=True):
        shown = json.loads(text)
        assert [turn["answers"][0]["content"] for turn in shown["turns"]] == ["1", "2", "3"]
        assert [turn["text"] for turn in shown["turns"]] == [turn.text for turn in completion.conversation.turns]
    assert table["completion_tokens"].to_pylist() == [completion.num_written for completion in rollout.completions]


SETTINGS = {
    "stage_rewards": ["environment"],
    "max_steps": 3,
    "save_steps": 1,
    "eval_steps": 2,
    "num_eval_prompts": 4,
    "length": 16,
}


def write(stages, name, **settings):
    """A stage with the environment of these tests."""
    directory = stages.write(name, **SETTINGS | settings)
    spec = StageSpec.load(directory.spec)
    spec.model_copy(update={"interaction": interaction()}).save(directory.spec)
    return directory


def train_here(directory, environment=None):
    """Train a stage in this process, with an environment of two turns."""
    spec = StageSpec.load(directory.spec)
    player = Player(environment or Counting(2), spec.interaction, load_tokenizer(spec.start, spec.model))
    with suite_of(spec) as suite:
        return Trainer(directory, suite, (), player).train()


def test_a_stage_whose_environment_fails_loses_nothing_and_gains_nothing(stages):
    """Every conversation fails at its second turn: held-out ones count in the mean, groups are dead, no weight moves."""
    directory = write(stages, "stage")
    train_here(directory, Counting(3, fails_at=2))
    lines = journal(directory)
    assert [line["conversations/errors"] for line in lines] == [1.0] * 3
    assert [(line["reward"], line["frac_reward_zero_std"], line["grad_norm"]) for line in lines] == [(0.0, 1.0, 0.0)] * 3
    assert lines[1]["eval_reward"] == 0.0


def test_a_stage_trains_on_conversations(stages):
    directory = write(stages, "stage")
    train_here(directory)
    lines = journal(directory)
    assert len(lines) == 3
    for line in lines:
        assert set(FIGURES) <= set(line)
        assert line["conversations/turns"] == 2
        # The sampler's log-probabilities and the trainer's agree where the policy wrote; elsewhere nobody compares them.
        assert line["sampling/sampling_logp_difference/max"] < 1e-3
    assert "eval_reward" in lines[1]
    table = pl.read_parquet(directory.completions(1))
    assert table["conversation"].null_count() == 0
    assert lines[0]["completions/mean_length"] == pytest.approx(table["completion_tokens"].mean())


# As on the page of TRL about environments, without an import of ours.
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


@pytest.mark.slow
def test_a_reward_written_for_trl_sees_what_its_environment_has_become(tmp_path, monkeypatch):
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
        scored = score_groups(suite, played, step=1)
    conversations = [completion.conversation for completion in scored.rollout.completions]
    answers = [[message["content"] for message in one.said if message["role"] == "tool"] for one in conversations]
    sums = [[int(text) for text in texts if text.isdigit()] for texts in answers]
    assert any(sums)
    assert scored.scores.raw[:, 0].tolist() == [float(len(each)) for each in sums]
    assert np.allclose(scored.scores.raw[:, 1], [sum(each) / 100 for each in sums])
    assert all(one.prompt[-1]["content"].endswith(" You may add.") for one in conversations)
    stage = StageConfig(name="s", rewards=["calls_reward", "total_reward"], num_generations=4)
    assert not advantages(rewards_of(scored), stage).dead.all()

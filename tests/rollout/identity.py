"""Tokens in, tokens out: what a conversation of five turns promises in every engine."""

import torch

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rollout.conversations import Player
from grpo_tasks.rollout.engine import NoEngine, Sampling
from schemas.config.rollout import RolloutConfig
from tests.rollout.counting import Counting, interaction


def sampling(temperature=None, **settings):
    """Turns of at most 24 tokens."""
    return Sampling.of(RolloutConfig(**{"max_completion_length": 24, **settings}), temperature=temperature)


class Watched(NoEngine):
    """The engine of a test, and what it was asked."""

    def __init__(self, engine):
        self.engine, self.asked = engine, []

    def generate(self, requests, sampling):
        drawn = self.engine.generate(requests, sampling)
        self.asked.append(list(zip(requests, drawn, strict=True)))
        return drawn


def assert_exact(engine, policy, tokenizer, starts):
    """Five turns: what the policy saw in a turn is what it saw and wrote before, and the trainer gets the same tokens."""
    watched = Watched(engine)
    played = Player(Counting(5), interaction(), tokenizer).play(watched, starts, sampling(temperature=0.9))
    assert [len(asked) for asked in watched.asked] == [6] * 5
    for number, completion in enumerate(played):
        conversation = completion.conversation
        assert (conversation.ending, len(conversation.turns)) == ("done", 5)
        assert completion.finish_reason == conversation.turns[-1].finish_reason
        whole = [*conversation.prompt_ids, *completion.token_ids]
        for asked, turn in zip(watched.asked, conversation.turns, strict=True):
            request, drawn = asked[number]
            # What the policy saw, then what it wrote, are the tokens that the trainer gets.
            assert whole[: len(request.prompt_ids)] == request.prompt_ids
            assert completion.token_ids[turn.start : turn.end] == drawn.token_ids
            assert len(request.prompt_ids) == len(conversation.prompt_ids) + turn.start
            assert completion.written[turn.start : turn.end] == [True] * len(drawn.token_ids)
            assert completion.logprobs[turn.start : turn.end] == drawn.logprobs
        assert completion.num_written == sum(turn.end - turn.start for turn in conversation.turns)
        zero = [logp for logp, wrote in zip(completion.logprobs, completion.written, strict=True) if not wrote]
        assert zero == [0.0] * len(zero)
        assert len(zero) > 0
    assert_trainer_agrees(policy, played)


def assert_trainer_agrees(policy, played):
    """The log-probabilities of the sampler are the trainer's, given all the tokens at once."""
    prompts = [completion.conversation.prompt_ids for completion in played]
    batch = token_batch(prompts, [one.token_ids for one in played], range(len(played)), device=torch.device("cpu"))
    logps = completion_logprobs(policy.eval(), batch, temperature=0.9).logps.detach()
    for row, completion in zip(logps, played, strict=True):
        written = torch.tensor(completion.written)
        torch.testing.assert_close(row[: len(written)][written], torch.tensor(completion.logprobs)[written], rtol=1e-4, atol=1e-4)

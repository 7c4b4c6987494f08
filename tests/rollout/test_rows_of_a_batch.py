"""What the other rows of a batch change in a completion: nothing but the rounding."""

from dataclasses import replace
from itertools import takewhile

import pytest
import torch

from grpo_tasks.policy.load import load_policy
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig


def rounding(engine, requests, length):
    """Differences (nats) between a batch and single requests: log-probabilities of the tokens up to the first other one."""
    sampling = Sampling.of(RolloutConfig(max_completion_length=length))
    together = engine.generate(requests, sampling)
    alone = engine.generate(requests, replace(sampling, max_batch_size=1))
    found = []
    for one, other in zip(together, alone, strict=True):
        # After another token, the next one has another context.
        tokens = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=False)
        found += [abs(logp - again) for *_, logp, again in takewhile(lambda pair: pair[0] == pair[1], tokens)]
    return found


# How much of it in 16 bits is up to the processor: 1e-4 nats without instructions for them, above 1e-3 with.
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_other_rows_of_a_batch_change_rounding_only(dtype, most, base_ref, tokenizer, prompts):
    policy = load_policy(base_ref, ModelConfig(dtype=dtype), device=torch.device("cpu"))
    requests = [Request(prompt, seed) for prompt in prompts for seed in range(3)]
    found = rounding(LocalEngine(policy, tokenizer), requests, 20)
    assert len(found) > 100
    assert max(found) < most

"""How far the sampler is from the trainer in the first 30 updates, when an adapter is smaller than what 16 bits can tell apart.

    python -m tests.benchmarks.mismatch

The embedded model in bfloat16, a new adapter, Adam with a learning rate of 1e-5. Every update samples 64 completions with the
local engine, prefers those with many digits, and trains on them. Two figures: the difference of the log-probabilities as a stage
measures it, most of which is the rounding of activations in bfloat16; and that of the weights alone, computed in float32.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_tasks.policy.batch import TokenBatch, token_batch
from grpo_tasks.policy.folded_adapter import CausalLM, FoldedPolicy
from grpo_tasks.policy.load import load_tokenizer, trainable_policy
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rollout.engine import Completion, Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.results.model import ModelRef

BASE = ModelRef(path="embedded:base")
CPU = torch.device("cpu")
UPDATES, GROUP, LEARNING_RATE = 30, 8, 1e-5


@dataclass(frozen=True)
class Mismatch:
    """Mean |difference| in nats per token."""

    measured: list[float]
    """Of sampler and trainer, update by update."""
    moved: float
    """Of the trained policy and the base, by their weights."""
    sampler: float
    """Of the engine's weights and the trained policy's."""
    folded: float
    """The same for a copy with the adapter folded into its 16-bit weights."""


def mismatch(updates: int = UPDATES) -> Mismatch:
    """Train, and compare after the last update."""
    tokenizer = load_tokenizer(BASE)
    policy = trainable_policy(BASE, ModelConfig(dtype="bfloat16"), device=CPU, seed=1)
    engine = LocalEngine(policy, tokenizer)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0.0)
    prompts = [tokenizer(f"What is {number} + 27?")["input_ids"] for number in range(11, 19)]
    measured, rows = [], range(len(prompts) * GROUP)
    for update in range(updates):
        engine.sync()
        requests = [Request(prompts[row // GROUP], 1000 * update + row) for row in rows]
        drawn = engine.generate(requests, Sampling.of(RolloutConfig(max_completion_length=24)))
        batch = token_batch(prompts, [one.token_ids for one in drawn], [row // GROUP for row in rows], device=CPU)
        logps = completion_logprobs(policy, batch, temperature=1.0).logps
        sampled = torch.tensor([logp for one in drawn for logp in one.logprobs])
        measured.append((logps[batch.completion_mask] - sampled).abs().mean().item())
        optimizer.zero_grad()
        (-(_advantages(drawn)[:, None] * logps).sum() / batch.completion_mask.sum()).backward()
        optimizer.step()
    engine.sync()
    trained = _logps(policy, batch)
    with policy.disable_adapter():
        base = _logps(policy, batch)
    folded = FoldedPolicy(policy, fold=True).model
    found = [(_logps(model, batch) - trained).abs().mean().item() for model in (engine._model, folded)]
    return Mismatch(measured, (base - trained).abs().mean().item(), *found)


def _advantages(drawn: list[Completion]) -> Tensor:
    digits = torch.tensor([float(sum(letter.isdigit() for letter in one.text)) for one in drawn]).view(-1, GROUP)
    return ((digits - digits.mean(1, keepdim=True)) / (digits.std(1, keepdim=True) + 1e-4)).flatten()


@torch.no_grad()
def _logps(model: CausalLM, batch: TokenBatch) -> Tensor:
    # In float32 the weights alone decide; in 16 bits the rounding of activations would hide them.
    exact = copy.deepcopy(model).float().eval()
    return completion_logprobs(exact, batch, temperature=1.0, layout="plain").logps[batch.completion_mask]


def main() -> None:
    """Print the figures."""
    found = mismatch()
    mean, most = sum(found.measured) / UPDATES, max(found.measured)
    print(f"sampler against trainer, {UPDATES} updates: {mean:.2g} nats a token, at most {most:.2g}")
    print(f"by the weights alone: {found.sampler:.2g}, folded into 16 bits {found.folded:.2g}")
    print(f"the policy has moved by {found.moved:.2g}")


if __name__ == "__main__":
    main()

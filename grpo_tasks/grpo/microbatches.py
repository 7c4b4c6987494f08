"""An update cut into forward and backward passes.

Dead groups and masked completions are left out: their gradient is zero, so there is nothing to compute. With beta above 0 they
lose their KL as well, on purpose: a group that teaches nothing should not pull the policy anywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_tasks.grpo.advantages import Advantages
from grpo_tasks.grpo.groups import Rollout
from grpo_tasks.grpo.losses import token_weights
from grpo_tasks.policy.batch import TokenBatch, pad, token_batch
from schemas.config import StageConfig


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Completions that go through the model together."""

    indices: Sequence[int]
    """Their numbers in the rollout."""
    tokens: TokenBatch
    weights: Float[Tensor, "N T"]
    advantages: Float[Tensor, " N"]
    sampler_logps: Float[Tensor, "N T"]
    """log-probabilities the sampler drew the tokens with; 0 on padding."""


def microbatches(
    rollout: Rollout,
    advantages: Advantages,
    indices: Sequence[int],
    stage: StageConfig,
    *,
    max_completion_length: int,
    device: torch.device,
) -> Iterator[Microbatch]:
    """Cut the completions `indices` (one update, whole groups) into passes of at most per_device_train_batch_size."""
    size = stage.per_device_train_batch_size
    completions = [rollout.completions[index] for index in indices]
    _, mask = pad([completion.token_ids for completion in completions], left=False)
    if stage.mask_truncated_completions:
        mask &= torch.tensor([not completion.truncated for completion in completions])[:, None]
    weights = token_weights(mask, stage, max_completion_length=max_completion_length, microbatch_size=size)
    live = [place for place, index in enumerate(indices) if _teaches(advantages, rollout, index) and mask[place].any()]
    for start in range(0, len(live), size):
        places = live[start : start + size]
        yield _assemble(rollout, advantages, [indices[place] for place in places], weights[places], device)


def _teaches(advantages: Advantages, rollout: Rollout, index: int) -> bool:
    return not bool(advantages.dead[index // rollout.group_size])


def _assemble(
    rollout: Rollout, advantages: Advantages, indices: list[int], weights: Float[Tensor, "N L"], device: torch.device
) -> Microbatch:
    completions = [rollout.completions[index] for index in indices]
    tokens = token_batch(
        rollout.prompts,
        [completion.token_ids for completion in completions],
        [rollout.prompt_of[i] for i in indices],
        device=device,
    )
    width = tokens.completion_ids.shape[1]
    return Microbatch(
        indices=indices,
        tokens=tokens,
        weights=weights[:, :width].to(device),
        advantages=advantages.values[indices].to(device),
        sampler_logps=_padded([completion.logprobs for completion in completions], tokens.completion_mask),
    )


def _padded(rows: Sequence[Sequence[float]], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float32, device=mask.device)
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, flat)

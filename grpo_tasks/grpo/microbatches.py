"""An update cut into forward and backward passes.

Dead groups and masked completions are left out: their gradient is zero, so there is nothing to compute. With beta above 0 they
lose their KL as well, on purpose: a group that teaches nothing should not pull the policy anywhere (`skip_dead_groups` off keeps
them). The passes are as large as a number of completions or a budget of tokens allows; what is together in one changes nothing
but rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_tasks.grpo.advantages import Advantages
from grpo_tasks.grpo.groups import Rollout
from grpo_tasks.grpo.losses import mean_weights, token_weights
from grpo_tasks.grpo.ranks import Processes
from grpo_tasks.policy.batch import TokenBatch, pad, token_batch
from schemas.config.stage import StageConfig


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Completions that go through the model together."""

    indices: Sequence[int]
    """Their numbers in the rollout."""
    tokens: TokenBatch
    weights: Float[Tensor, "N T"]
    advantages: Float[Tensor, "N _"]
    """Per completion [N, 1], or per token [N, T]."""
    entropy_weights: Float[Tensor, "N T"]
    """Weight of each token in the mean entropy of the update."""
    sampler_logps: Float[Tensor, "N T"]
    """log-probabilities the sampler drew the tokens with; 0 on padding."""
    idle: bool = False
    """Goes through the model only because other processes have more passes; counts for nothing."""


def microbatches(
    rollout: Rollout,
    advantages: Advantages,
    indices: Sequence[int],
    stage: StageConfig,
    *,
    max_completion_length: int,
    device: torch.device,
    processes: Processes,
    level: bool = False,
) -> list[Microbatch]:
    """Cut this process's share of the completions `indices` (one update, whole groups) into passes.

    With `level` every process gets as many, for weights that are spread over the processes are gathered by all of them at once.
    """
    size = stage.per_device_train_batch_size
    completions = [rollout.completions[index] for index in indices]
    _, mask = pad([completion.token_ids for completion in completions], left=False)
    if stage.mask_truncated_completions:
        mask &= torch.tensor([not completion.truncated for completion in completions])[:, None]
    weights = token_weights(mask, stage, max_completion_length=max_completion_length, microbatch_size=size)
    keep_dead = not stage.skip_dead_groups or stage.entropy_coef > 0
    dead = advantages.dead[torch.tensor(indices) // rollout.group_size]
    live = processes.share((mask.any(1) & (keep_dead | ~dead)).nonzero().flatten().tolist())
    budget = stage.max_tokens_per_microbatch
    cuts = _by_count(live, size) if budget is None else _by_tokens(live, [_size(rollout, index) for index in indices], budget)
    entropy_weights = mean_weights(mask if keep_dead else mask & ~dead[:, None])

    def assemble(places: Sequence[int]) -> Microbatch:
        chosen = [indices[place] for place in places]
        return _assemble(rollout, advantages, chosen, weights[places], entropy_weights[places], device)

    parts = [assemble(places) for places in cuts]
    if level:
        shortest = min(range(len(indices)), key=lambda place: len(completions[place].token_ids))
        missing = max(processes.everyone(len(parts))) - len(parts)
        parts += [replace(assemble([shortest]), idle=True)] * missing
    return parts


def _by_count(live: Sequence[int], size: int) -> list[Sequence[int]]:
    return [live[start : start + size] for start in range(0, len(live), size)]


def _size(rollout: Rollout, index: int) -> tuple[int, int, int]:
    """(prompt's number, its tokens, completion's tokens)."""
    prompt = index // rollout.group_size
    return prompt, len(rollout.prompts[prompt]), len(rollout.completions[index].token_ids)


def _by_tokens(live: Sequence[int], sizes: Sequence[tuple[int, int, int]], budget: int) -> list[Sequence[int]]:
    """Passes of at most `budget` padded tokens, in the order that pads less: by length, or by group and then length.

    A group's prompt counts once in a pass. A completion that is longer than the budget has a pass of its own.
    """
    longest: dict[int, int] = {}
    for place in live:
        prompt, _, tokens = sizes[place]
        longest[prompt] = max(longest.get(prompt, 0), tokens)
    by_length = sorted(live, key=lambda place: (sizes[place][2], place))
    by_group = sorted(live, key=lambda place: (longest[sizes[place][0]], sizes[place][0], sizes[place][2], place))
    cuts = [_cut(order, sizes, budget) for order in (by_group, by_length)]
    return min(cuts, key=lambda passes: sum(_padded_tokens(places, sizes) for places in passes))


def _cut(order: Sequence[int], sizes: Sequence[tuple[int, int, int]], budget: int) -> list[Sequence[int]]:
    passes: list[list[int]] = []
    for place in order:
        if passes and _padded_tokens([*passes[-1], place], sizes) <= budget:
            passes[-1].append(place)
        else:
            passes.append([place])
    return list(passes)


def _padded_tokens(places: Sequence[int], sizes: Sequence[tuple[int, int, int]]) -> int:
    chosen = [sizes[place] for place in places]
    prompts = {prompt: tokens for prompt, tokens, _ in chosen}
    return len(prompts) * max(prompts.values()) + len(chosen) * max(tokens for _, _, tokens in chosen)


def _assemble(
    rollout: Rollout,
    advantages: Advantages,
    indices: list[int],
    weights: Float[Tensor, "N L"],
    entropy_weights: Float[Tensor, "N L"],
    device: torch.device,
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
        advantages=_fitted(advantages.values[indices], width).to(device),
        entropy_weights=entropy_weights[:, :width].to(device),
        sampler_logps=_padded([completion.logprobs for completion in completions], tokens.completion_mask),
    )


def _fitted(values: Float[Tensor, "N _"], width: int) -> Float[Tensor, "N _"]:
    return values if values.shape[1] == 1 else values[:, :width]


def _padded(rows: Sequence[Sequence[float]], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    flat = torch.tensor([value for row in rows for value in row], dtype=torch.float32, device=mask.device)
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, flat)

"""An update split into microbatches: the completions that go through the model together.

Dead groups and masked completions are left out: their gradient is zero, so there is nothing to compute. With beta above 0 they
lose their KL term as well, on purpose: a group without signal should not pull the policy anywhere (`skip_dead_groups: false`
keeps them). How an update is split changes rounding only.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_tasks.grpo.advantages import Advantages
from grpo_tasks.grpo.losses import mean_weights, token_weights
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.rounds import Rollout, ScoredRollout
from grpo_tasks.kit.pinned import moved
from grpo_tasks.policy.batch import TokenBatch, fill, pad, token_batch
from grpo_tasks.rewards.suite import solved
from grpo_tasks.rollout.engine import Completion
from schemas.config.stage import StageConfig


@dataclass(frozen=True, slots=True)
class Microbatch:
    """N completions, padded to T tokens."""

    indices: Sequence[int]
    """Of its completions in the rollout."""
    tokens: TokenBatch
    trained: Bool[Tensor, "N T"]
    """The tokens that the policy wrote. All others have no loss, and no figure counts them."""
    weights: Float[Tensor, "N T"]
    """Weight of each token in the loss of the update."""
    advantages: Float[Tensor, "N _"]
    """Per completion [N, 1], or per token [N, T]."""
    entropy_weights: Float[Tensor, "N T"]
    """Weight of each token in the mean entropy of the update."""
    sampler_logps: Float[Tensor, "N T"]
    """log-probabilities (nats) with which the sampler drew the tokens; 0 on padding and where the policy did not write."""
    sampler_policy_logps: Float[Tensor, "N T"] | None
    """The same at the sampling temperature alone, which the trainer's are compared with; None: not reported."""
    idle: bool = False
    """Only keeps step with other ranks: adds nothing to the gradient."""


OldLogps = Sequence[Float[Tensor, "_ _"]] | None
"""For each microbatch the log-probabilities [N, T] under the policy that sampled; None where that is the present one."""


@dataclass(slots=True)
class Microbatches:
    """The microbatches of an update.

    Each is built when an iteration first reaches it. A GPU then computes the one before it: the host has only launched that one.
    """

    rows: Sequence[Sequence[int]]
    """Completions of each microbatch, as places in the update."""
    build: Callable[[Sequence[int]], Microbatch]
    num_idle: int = 0
    """How many at the end only keep step with other ranks."""
    halvings: int = 0
    """How often they were halved."""
    _built: dict[int, Microbatch] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Microbatch]:
        for number, rows in enumerate(self.rows):
            if number not in self._built:
                self._built[number] = replace(self.build(rows), idle=number >= len(self.rows) - self.num_idle)
            yield self._built[number]

    @property
    def divisible(self) -> bool:
        """True where a microbatch has several completions."""
        return any(len(rows) > 1 for rows in self.rows)

    def halved(self, old_logps: OldLogps) -> "tuple[Microbatches, OldLogps]":
        """The same update with the completions of each microbatch in two, where it has several; and its `old_logps`."""
        halves = []
        for number, rows in enumerate(self.rows):
            middle = (len(rows) + 1) // 2
            halves += [(number, start, end) for start, end in ((0, middle), (middle, len(rows))) if start < end]
        divided = [self.rows[number][start:end] for number, start, end in halves]
        parts = Microbatches(divided, self.build, self.num_idle, self.halvings + 1)
        return parts, None if old_logps is None else [old_logps[number][start:end] for number, start, end in halves]


def make_microbatches(
    rollout: Rollout,
    advantages: Advantages,
    indices: Sequence[int],
    stage: StageConfig,
    *,
    max_completion_length: int,
    device: torch.device,
    ranks: Ranks,
    padded: bool = False,
    same_count: bool = False,
) -> Microbatches:
    """Split this rank's share of the completions `indices` (one update, complete groups) into microbatches.

    `padded`: a pass computes rows as long as its longest one (`Policies.pads`), so a budget of tokens holds the padding too.

    With `same_count` every rank gets the same number of them, filled up with idle ones: all ranks gather sharded weights at
    once, so a rank that is done early would leave the others waiting.
    """

    def assemble(rows: Sequence[int]) -> Microbatch:
        return _assemble(rollout, advantages, [indices[row] for row in rows], weights[rows], entropy_weights[rows], device)

    if not indices:
        return Microbatches([], assemble)
    supervised, size = stage.kind != "grpo", stage.per_device_train_batch_size
    completions = [rollout.completions[index] for index in indices]
    mask = _written(completions)  # [N, T], N of the complete update
    if stage.mask_truncated_completions:
        # DAPO's overlong filtering (arXiv:2503.14476, 3.4): a completion that was cut off may have been right. [N] -> [N, 1]
        mask &= torch.tensor([not completion.truncated for completion in completions])[:, None]
    # Before the split: means over the update must not depend on which completions share a microbatch or a rank.
    limits = {"max_completion_length": max_completion_length, "microbatch_size": size}
    # Kinds sft and rejection weigh all trained tokens alike, whatever their group earned.
    weights = mean_weights(mask) if supervised else token_weights(mask, stage, **limits)
    # The entropy bonus has a gradient in dead groups too.
    keep_dead = supervised or not stage.skips_dead
    dead = advantages.dead[torch.tensor(indices) // rollout.group_size]  # [P] -> [N]
    entropy_weights = mean_weights(mask if keep_dead else mask & ~dead[:, None])
    # Positions in `indices`, from here on: rows of mask, weights and dead.
    live = ranks.share((mask.any(1) & (keep_dead | ~dead)).nonzero().flatten().tolist())

    if isinstance(stage.max_tokens_per_microbatch, int):  # token_budget.py has put a number, or none, in the place of "auto"
        parts = _by_tokens(live, rollout, indices, stage.max_tokens_per_microbatch, padded=padded)
    else:
        # The last one may be smaller; weights are those of the update, so it needs no correction.
        parts = [list(live[start : start + size]) for start in range(0, len(live), size)]
    missing = max(ranks.gather(len(parts))) - len(parts) if same_count else 0
    # The shortest completion makes the cheapest idle pass.
    shortest = min(range(len(indices)), key=lambda row: len(completions[row].token_ids))
    return Microbatches([*parts, *[[shortest]] * missing], assemble, num_idle=missing)


def chosen_completions(scored: ScoredRollout, stage: StageConfig) -> list[int]:
    """Indices of the completions that a stage of kind rejection trains on, in the order of the rollout.

    Ties are broken by the order of sampling. Without a limit the best of a group is kept even if it is bad: RAFT
    (arXiv:2304.06767). With keep_reward and no number it is the selection of RFT (arXiv:2308.01825).
    """
    totals, completions = scored.scores.totals, scored.rollout.completions
    # A conversation that a fault ended has a score, so that it counts in the figures, and teaches nothing.
    allowed = ~np.isnan(totals) & np.array([not completion.failed for completion in completions])
    if stage.keep_reward is not None:
        allowed &= solved(scored.scores.raw, scored.scores.weights, scored.scores.full, stage.keep_reward) == 1.0
    if stage.mask_truncated_completions:
        allowed &= np.array([not completion.truncated for completion in completions])
    size, chosen = scored.rollout.group_size, []
    for start in range(0, len(completions), size):
        group = sorted(range(start, start + size), key=lambda index: -totals[index] if allowed[index] else np.inf)
        seen: set[tuple[int, ...]] = set()
        for index in group:
            tokens = tuple(completions[index].token_ids)
            # An empty completion has nothing to learn; an equal one would count the same text twice.
            if not allowed[index] or not tokens or tokens in seen:
                continue
            if stage.keep_completions is not None and len(seen) == stage.keep_completions:
                break
            seen.add(tokens)
            chosen.append(index)
    return sorted(chosen)


def _by_tokens(live: Sequence[int], rollout: Rollout, indices: Sequence[int], budget: int, *, padded: bool) -> list[list[int]]:
    """Microbatches of at most `budget` tokens, with their padding where a pass is `padded`; one completion may have more.

    The prompt of a group counts once in a microbatch, so a group stays together as far as it fits. Groups are ordered by their
    longest completion: the attention of a CPU works on rectangles, and neighbours of equal length waste least of them.
    """
    prompt_of = {row: indices[row] // rollout.group_size for row in live}
    tokens = {row: len(rollout.completions[indices[row]].token_ids) for row in live}
    longest: dict[int, int] = {}
    for row in live:
        longest[prompt_of[row]] = max(longest.get(prompt_of[row], 0), tokens[row])
    filled: list[list[int]] = []
    completions, prompts, seen = _Spans(), _Spans(), set[int]()
    for row in sorted(live, key=lambda row: (longest[prompt_of[row]], prompt_of[row], tokens[row], row)):
        prompt = prompt_of[row]
        more, begun = completions.with_one(tokens[row]), prompts
        if prompt not in seen:
            begun = prompts.with_one(len(rollout.prompts[prompt]))
        if not filled or more.size(padded=padded) + begun.size(padded=padded) > budget:
            filled.append([])
            seen = set()
            more, begun = _Spans().with_one(tokens[row]), _Spans().with_one(len(rollout.prompts[prompt]))
        filled[-1].append(row)
        seen.add(prompt)
        completions, prompts = more, begun
    return filled


class _Spans(NamedTuple):
    """Prompts, or completions, of a microbatch."""

    rows: int = 0
    tokens: int = 0
    longest: int = 0

    def with_one(self, tokens: int) -> "_Spans":
        return _Spans(self.rows + 1, self.tokens + tokens, max(self.longest, tokens))

    def size(self, *, padded: bool) -> int:
        return self.rows * self.longest if padded else self.tokens


def _assemble(
    rollout: Rollout,
    advantages: Advantages,
    indices: list[int],
    weights: Float[Tensor, "N L"],
    entropy_weights: Float[Tensor, "N L"],
    device: torch.device,
) -> Microbatch:
    completions = [rollout.completions[index] for index in indices]
    # Each different prompt once [P, S], with the row of the prompt for each completion [N].
    tokens = token_batch(
        rollout.prompts,
        [completion.token_ids for completion in completions],
        [rollout.prompt_of[index] for index in indices],
        device=device,
        share_starts=True,
    )
    # L tokens, the longest completion of the update, are narrowed to T, the longest of this microbatch: padding is on the right.
    width = tokens.completion_ids.shape[1]
    compared = [completion.policy_logprobs for completion in completions if completion.policy_logprobs is not None]
    tables = [
        _written(completions).float(),
        weights[:, :width],
        advantages.values[indices, :width],  # [N, 1] stays [N, 1]
        entropy_weights[:, :width],
        _padded([completion.logprobs for completion in completions], width),
        *([_padded(compared, width)] if len(compared) == len(completions) else []),
    ]
    # All of them by one copy to the device.
    flat = moved(torch.cat([table.flatten() for table in tables]), device)
    trained, weights, values, entropy_weights, sampler_logps, *policy_logps = (
        part.view(table.shape) for part, table in zip(flat.split([table.numel() for table in tables]), tables, strict=True)
    )
    return Microbatch(
        indices=indices,
        tokens=tokens,
        trained=trained > 0,
        weights=weights,
        advantages=values,
        entropy_weights=entropy_weights,
        sampler_logps=sampler_logps,
        sampler_policy_logps=policy_logps[0] if policy_logps else None,
    )


def _written(completions: Sequence[Completion]) -> Bool[Tensor, "N T"]:
    # Padded like token ids: 0, which is no token that was written.
    return pad([completion.policy_mask for completion in completions], left=False)[0] > 0


def _padded(rows: Sequence[Sequence[float]], width: int) -> Float[Tensor, "N T"]:
    mask = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    return fill(rows, mask, torch.float32)

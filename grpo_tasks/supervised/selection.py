"""Which completions of a rollout a stage of kind rejection trains on: the best of each prompt, or all above a limit.

    rewards -> scored, sound, complete, above keep_reward -> best keep_completions of each prompt, each text once

Ties are broken by the order of sampling. Without a limit the best of a group is kept even if it is bad: rejection sampling as in
RAFT (arXiv:2304.06767). With keep_reward and no number it is the selection of RFT (arXiv:2308.01825).
"""

import numpy as np

from grpo_tasks.grpo.groups import ScoredRollout
from grpo_tasks.rewards.totals import solved
from schemas.config.stage import StageConfig


def chosen_completions(scored: ScoredRollout, stage: StageConfig) -> list[int]:
    """Indices of the completions that the stage trains on, in the order of the rollout."""
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

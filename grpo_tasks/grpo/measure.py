"""The figures of an update that come from its completions and rewards (names: schemas/metrics.py)."""

from collections.abc import Mapping

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from grpo_tasks.grpo.advantages import Advantages
from grpo_tasks.grpo.groups import ScoredRollout
from grpo_tasks.rewards.totals import mean_total, total_scores
from grpo_tasks.stage.finish import BEST_METRIC


def rollout_metrics(scored: ScoredRollout, advantages: Advantages) -> dict[str, float]:
    """Rewards, groups and lengths of a rollout."""
    completions, scores = scored.rollout.completions, scored.scores
    lengths = np.array([len(completion.token_ids) for completion in completions])
    metrics: dict[str, float | None] = {
        "reward": mean_total(scores.totals),
        "reward_std": float(advantages.group_std.mean()),
        "frac_reward_zero_std": float(advantages.dead.float().mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(np.mean([completion.truncated for completion in completions])),
        "rollout_time": scored.rollout.seconds,
        "reward_time": scored.seconds,
    }
    for index, name in enumerate(scores.names):
        column = scores.raw[:, index]
        known = column[~np.isnan(column)]
        metrics[f"rewards/{name}/weight"] = float(scores.weights[index])
        if len(known):
            metrics[f"rewards/{name}/mean"] = float(known.mean())
            metrics[f"rewards/{name}/std"] = float(known.std())
            metrics[f"rewards/{name}/success"] = float((known >= scores.full[index]).mean())
    metrics |= scores.logged_metrics()
    return _known(metrics)


def held_out_metrics(scored: ScoredRollout, weights: NDArray[np.float64]) -> dict[str, float]:
    """Rewards of held-out completions, the total as `reward` is (rewards/totals.py).

    Args:
        scored: one completion for each held-out prompt.
        weights: the configured ones, not those that adaptive weights have come to, so that one look compares with the next.
    """
    scores = scored.scores
    metrics = {BEST_METRIC: mean_total(total_scores(scores.raw, weights))}
    for index, name in enumerate(scores.names):
        known = scores.raw[:, index][~np.isnan(scores.raw[:, index])]
        if len(known):
            metrics[f"eval_rewards/{name}/mean"] = float(known.mean())
            metrics[f"eval_rewards/{name}/success"] = float((known >= scores.full[index]).mean())
    return _known(metrics)


def _known(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Without those that nothing was counted for."""
    return {name: value for name, value in metrics.items() if value is not None}


def completions_table(scored: ScoredRollout, advantages: torch.Tensor, *, stage: str, step: int) -> pl.DataFrame:
    """Every completion of a rollout with its rewards; (stage, step, prompt_id, sample) names it."""
    rollout, scores = scored.rollout, scored.scores
    rows = [rollout.rows[index] for index in rollout.prompt_of]
    return pl.DataFrame(
        {
            "stage": [stage] * len(rows),
            "step": [step] * len(rows),
            "prompt_id": [row.prompt_id for row in rows],
            "sample": [index % rollout.group_size for index in range(len(rows))],
            "prompt": [row.messages[-1]["content"] for row in rows],
            "answer": [row.answer for row in rows],
            "completion": [completion.text for completion in rollout.completions],
            "completion_tokens": [len(completion.token_ids) for completion in rollout.completions],
            "finish_reason": [completion.finish_reason for completion in rollout.completions],
            "reward": pl.Series(scores.totals, nan_to_null=True),
            "advantage": advantages.mean(-1).numpy(),
            **{f"reward_{name}": scores.raw[:, index] for index, name in enumerate(scores.names)},
        }
    )

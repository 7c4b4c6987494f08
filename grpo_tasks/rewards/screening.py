"""Completions that measure how often prompts are solved, drawn at once or with a screening first.

    draw `screen` completions of every prompt -> solved by no stage's rewards: no more of this prompt
                                              -> solved at least once: draw the rest, up to `samples`

The completions of a prompt that passes are those that it would have without a screening: sample numbers, and with them the seeds,
go on where the screening ended.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl

from grpo_tasks.rewards.contract import Row
from grpo_tasks.rewards.held_out import solved_by_stage
from schemas.config.run import RunConfig

Draw = Callable[[Sequence[str] | None, range], pl.DataFrame]
"""Samples completions: prompt ids (None: all prompts) and sample numbers -> columns prompt_id, sample, completion, token_ids."""


def solved_samples(draw: Draw, rows: Sequence[Row], config: RunConfig, *, log: Path | None = None) -> pl.DataFrame:
    """The completions, with a column for each stage as `solved_by_stage` returns them; those of a prompt follow each other.

    Args:
        draw: samples completions.
        rows: the row of every prompt.
        config: how many completions, and what solved means.
        log: file that receives what the reward functions print.

    Raises:
        RewardError: a function with on_error raise failed.
        ConfigError: a function cannot be loaded.
    """

    def scored(prompts: Sequence[str] | None, numbers: range) -> pl.DataFrame:
        samples = draw(prompts, numbers)
        return samples.hstack(solved_by_stage(samples, rows, config, per_prompt=len(numbers), log=log))

    if not config.difficulty.screen:
        return scored(None, range(config.difficulty.samples))
    first = scored(None, range(config.difficulty.screen))
    once = pl.max_horizontal(stage.name for stage in config.stages) > 0
    passed = first.filter(once)["prompt_id"].unique(maintain_order=True).to_list()
    if not passed:
        return first
    rest = scored(passed, range(config.difficulty.screen, config.difficulty.samples))
    return pl.concat([first, rest]).sort("prompt_id", "sample", maintain_order=True)

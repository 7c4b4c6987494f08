"""The gate before a stage that samples: can the policy solve enough prompts at least once in a group?

GRPO strengthens what a policy already does. Where none of the G completions of a prompt is right, the group is dead and teaches
nothing. pass@G over the training prompts says how many groups can be alive at all.
"""

from math import comb

import polars as pl

from schemas.config.stage import StageConfig
from schemas.errors import DataError


def pass_at_group(rates: pl.DataFrame, stage: StageConfig) -> float | None:
    """Mean over the prompts of the chance that at least one of `num_generations` completions solves it.

    Args:
        rates: pass rates (schemas/tables.py PassRates); those of this stage count.
        stage: its name, and its `num_generations`.

    Returns:
        None where no prompt has a measured pass rate.
    """
    known = rates.filter((pl.col("stage") == stage.name) & pl.col("pass_rate").is_not_null() & (pl.col("samples") > 0))
    if known.is_empty():
        return None
    chances = [_chance(rate, samples, stage.num_generations) for rate, samples in known.select("pass_rate", "samples").rows()]
    return sum(chances) / len(chances)


def _chance(rate: float, samples: int, size: int) -> float:
    """pass@size from `samples` completions: unbiased where there are enough of them (arXiv:2107.03374), else by the rate."""
    solved = round(rate * samples)
    if samples >= size:
        return 1.0 - comb(samples - solved, size) / comb(samples, size)
    return float(1.0 - (1.0 - rate) ** size)


def require_pass_at_group(rates: pl.DataFrame, stage: StageConfig) -> None:
    """Refuse to train a stage whose policy solves too few prompts.

    Raises:
        DataError: with the numbers, and what to do.
    """
    limit, found = stage.min_pass_at_group, pass_at_group(rates, stage)
    if limit is None or (found is not None and found >= limit):
        return
    if found is None:
        # Nobody knows whether the policy reaches the limit: a gate that cannot measure stays shut.
        raise DataError(
            f"pass@{stage.num_generations} of the training prompts is unknown, and min_pass_at_group is {limit:.1%}: no "
            "completion that measured the difficulty has a reward",
            place=f"stage {stage.name}",
            fix="correct what the log of measure_difficulty names: an environment that fails, or rewards that apply to no row "
            "(tasks, answers); or remove min_pass_at_group",
        )
    own = rates.filter(pl.col("stage") == stage.name)
    never = own.filter(pl.col("pass_rate") == 0.0).height
    raise DataError(
        f"pass@{stage.num_generations} of the training prompts is {found:.1%}, below min_pass_at_group {limit:.1%}: {never:,} of "
        f"{own.height:,} prompts are never solved, so their groups would carry no signal",
        place=f"stage {stage.name}",
        fix="put a stage of kind sft with demonstrations before it, raise num_generations, add an incremental reward, or leave "
        "out prompts that are too hard (keep_pass_rate)",
    )

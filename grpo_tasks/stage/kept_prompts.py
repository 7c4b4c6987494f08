"""Which prompts a stage trains on: those whose pass rate lies in `keep_pass_rate`.

A prompt that is never solved, or always, has only dead groups, and one with a wrong ground truth teaches a wrong answer.
"""

from dataclasses import dataclass
from math import comb
from pathlib import Path

import polars as pl

from grpo_tasks.data.table import PASS_RATE_COLUMNS, read_table
from grpo_tasks.stage.stage_dir import StageDir
from schemas.config.stage import StageConfig
from schemas.errors import DataError
from schemas.results.model import KeptPrompts

_ROUNDING = 1e-9
"""1/3 lies in a band that ends at 0.3333333333."""


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """The prompts of a stage, and those that it leaves out."""

    kept: pl.DataFrame
    """schemas/tables.py StagePrompts."""
    left_out: pl.DataFrame
    """schemas/tables.py LeftOut, likely wrong ground truths first."""
    counts: KeptPrompts

    def write(self, directory: StageDir) -> Path:
        """Write both tables into the stage directory; the path of the rows to train on."""
        self.left_out.write_parquet(directory.left_out)
        self.kept.write_parquet(directory.train)
        return directory.train


def choose_prompts(train: Path, rates: pl.DataFrame, stage: StageConfig) -> PromptChoice:
    """Divide the training prompts by their pass rates in this stage; both bounds of `keep_pass_rate` are inclusive."""
    known = rates.filter(pl.col("stage") == stage.name).drop("stage", "samples").unique("prompt_id", maintain_order=True)
    table = read_table(train).join(known, on="prompt_id", how="left", maintain_order="left")
    low, high = stage.keep_pass_rate or (0.0, 1.0)
    rate = pl.col("pass_rate")
    inside = rate.is_null() | ((rate >= low - _ROUNDING) & (rate <= high + _ROUNDING))
    kept, left_out = table.filter(inside), table.filter(~inside)
    reasons = left_out.select(
        pl.when(rate == 0.0)
        .then(pl.lit("never_solved"))
        .when(rate == 1.0)
        .then(pl.lit("always_solved"))
        .when(rate < low)
        .then(pl.lit("below"))
        .otherwise(pl.lit("above"))
        .alias("reason")
    )["reason"]
    counts = {name: int((reasons == name).sum()) for name in ("never_solved", "below", "above", "always_solved")}
    found = KeptPrompts(
        prompts=table.height, kept=kept.height, low=low, high=high, unknown=table["pass_rate"].null_count(), **counts
    )
    shown = left_out.with_columns(reasons, pl.col("prompt").list.last().struct.field("content").alias("question"))
    columns = ["prompt_id", "source", "line", "question", "answer", *PASS_RATE_COLUMNS]
    columns += ["reason", "frequent_answer", "frequent_share"]
    # Likely wrong ground truths first: never solved, although the model is sure of another answer.
    order = [pl.col("reason") == "never_solved", pl.col("frequent_share")]
    listed = shown.select(columns).sort(order, descending=True, nulls_last=True, maintain_order=True)
    return PromptChoice(kept.drop("frequent_answer", "frequent_share"), listed, found)


def require_prompts(counts: KeptPrompts, stage: StageConfig, min_prompts: int | None = None) -> None:
    """DataError for a choice by `keep_pass_rate` that leaves fewer prompts than a rollout needs, or than `min_prompts`."""
    fewest = min_prompts if min_prompts is not None else min(stage.prompts_per_rollout, counts.prompts)
    if stage.keep_pass_rate is None or counts.kept >= fewest:
        return
    raise DataError(
        f"too few prompts are left: {counts.summary()}; the stage needs {fewest:,}",
        place=f"stage {stage.name}, keep_pass_rate",
        fix="widen keep_pass_rate, lower rewards.functions.NAME.full_score if no completion reaches it, start from a model that "
        f"solves more of the prompts, raise difficulty.samples, or set difficulty.min_prompts: {max(1, counts.kept)}",
    )


def pass_at_group(rates: pl.DataFrame, stage: StageConfig) -> float | None:
    """Chance that at least one of `num_generations` completions solves a prompt, their mean; None without measured pass rates."""
    known = rates.filter((pl.col("stage") == stage.name) & pl.col("pass_rate").is_not_null() & (pl.col("samples") > 0))
    size, chances = stage.num_generations, list[float]()
    for rate, samples in known.select("pass_rate", "samples").rows():
        solved = round(rate * samples)
        # Unbiased where there are enough completions (arXiv:2107.03374), else by the rate.
        enough = samples >= size
        chances.append(1.0 - (comb(samples - solved, size) / comb(samples, size) if enough else (1.0 - rate) ** size))
    return sum(chances) / len(chances) if chances else None


def require_pass_at_group(rates: pl.DataFrame, stage: StageConfig) -> None:
    """DataError for a stage whose policy solves too few prompts: groups without a right completion are dead."""
    limit, found = stage.min_pass_at_group, pass_at_group(rates, stage)
    if limit is None or (found is not None and found >= limit):
        return
    if found is None:
        # Without measurements the gate fails closed.
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

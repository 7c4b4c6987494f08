"""What a sweep costs, counted before it runs: stages that several runs share are trained once.

The duration comes from earlier stages of the same config on this machine, if there are any. What this module does not do: guess
how many runs will be pruned. The forecast is that of a sweep without pruning.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from grpo_tasks.stage.journal import read_lines
from grpo_tasks.sweeping.grid import NO_EFFECT, Variant
from schemas.config.stage import StageConfig
from schemas.metrics import STEP_TIME

_LATER = {*NO_EFFECT, "stages", "evaluation", "lab", "validation"}
_JOURNALS = 20
"""Most journals that are read for a duration."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The cost of a sweep without pruning."""

    runs: int
    stages: int
    """Trainings of a stage. Runs that agree up to a stage share it."""
    shared: int
    """Stages that need no training, because another run has the same."""
    updates: int | None
    """Updates of these stages; None where a stage is measured in epochs."""
    completions: int | None
    """Completions sampled for them."""
    seconds: float | None
    """Expected duration of the updates, one run after the other; None without an earlier run of this config here."""

    def lines(self) -> list[str]:
        """The forecast in words."""
        shared = f" ({self.shared} more are shared)" if self.shared else ""
        first = f"{self.runs} runs, {self.stages} stages to train{shared}"
        amount = "length in epochs: it depends on the data"
        if self.updates is not None and self.completions is not None:
            amount = f"at most {self.updates:,} updates with {self.completions:,} completions"
        lines = [f"{first}: {amount}", "validation, reward lab and the evaluation of the base run once for each seed"]
        if self.seconds is not None:
            minutes = max(1, round(self.seconds / 60))
            duration = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
            lines.append(f"about {duration} of updates without pruning, as fast as earlier runs here")
        return lines


def forecast(variants: Sequence[Variant], folder: Path) -> Forecast:
    """Count what a sweep computes.

    Args:
        variants: its runs.
        folder: where earlier runs of the config are.
    """
    trained: dict[str, StageConfig] = {}
    stages = 0
    for variant in variants:
        shared = variant.config.model_dump(mode="json", exclude=_LATER)
        for index, stage in enumerate(variant.config.stages, start=1):
            stages += 1
            before = [one.model_dump(mode="json") for one in variant.config.stages[:index]]
            trained[json.dumps([shared, before], sort_keys=True)] = stage
    lengths = [stage.max_steps for stage in trained.values()]
    updates = sum(length or 0 for length in lengths) if all(lengths) else None
    completions = sum((stage.max_steps or 0) * stage.completions_per_update for stage in trained.values())
    per_update = update_seconds(folder)
    seconds = per_update * updates if per_update is not None and updates is not None else None
    return Forecast(
        len(variants), len(trained), stages - len(trained), updates, completions if updates is not None else None, seconds
    )


def update_seconds(folder: Path) -> float | None:
    """Median duration of an update of the newest stages in the folder of a config; None if there are none."""
    journals = sorted(folder.glob("train_stage/*/metrics.jsonl"), key=lambda path: -path.stat().st_mtime)[:_JOURNALS]
    lines = [line["metrics"] for path in journals for line in read_lines(path, {"step": int, "metrics": dict})[0]]
    times = [metrics[STEP_TIME] for metrics in lines if STEP_TIME in metrics]
    return median(times) if times else None

"""Sample the prompts of a list in parts, and stop when an interval is narrow enough or the time is over.

    prompts, sorted by id  ->  an eighth | an eighth | a quarter | a half  ->  after each part: interval, time  ->  stop or go on

The order is fixed, so of two models that stop at different places one has a part of the other's prompts, and they are compared on
these. The rule reads the width of an interval, never a comparison of models, and in three fixed places at most. Where such a
rule stops an interval covers less than its level says (Chow and Robbins 1965, doi:10.1214/aoms/1177700156; 91 % at the worst
instead of 95, by simulation in tests/evaluation), and less with each further look. A width also says something about the values:
the test of a promotion has its level divided by the number of places (`promotion_test` in evaluation/statistics.py).

A part is a child process of its own, with its own start. What is sampled stays in the folder PARTS until the step is finished:
a step that was killed takes the same parts and their times, so it decides as before.
"""

import json
import math
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import polars as pl

from grpo_tasks.kit.files import replacing
from grpo_tasks.rollout.spec import SAMPLES, SampleSpec, chosen_rows, run_sampling
from schemas.config.evaluation import EvaluationConfig
from schemas.config.rewards import LabConfig
from schemas.errors import Notice
from schemas.prompts import GREEDY
from schemas.results.data import PromptsUsed

PARTS = "parts"
"""Folder with the samples of each part, and how long they took. It outlives the process of the step (running/step.py `clear`)."""
SHARES = (1 / 8, 1 / 4, 1 / 2)


def sample_in_parts(
    spec: SampleSpec,
    directory: Path,
    limits: EvaluationConfig | LabConfig,
    half_width: Callable[[pl.DataFrame], float | None],
    *,
    least: int,
    key: str,
) -> PromptsUsed | None:
    """Sample into `directory`/samples.parquet, for at least so many prompts; None where `limits` sets none, and all are sampled.

    `half_width` is half the width of the interval that the samples so far give; None where they give none. `key` is that of the
    step: parts of another one are not taken.
    """
    if limits.max_half_width is None and limits.max_minutes is None:
        run_sampling(spec, directory)
        return None
    ids = list(dict.fromkeys(row.prompt_id for row in chosen_rows(spec.prompts, spec.max_prompts)))
    ends = stopping_places(len(ids), least)
    looks = 1 if limits.max_half_width is None else len(ends)
    if looks == 1:
        # The first part shows how long a prompt takes.
        ends = list(dict.fromkeys([ends[0], len(ids)]))
    parts = directory / PARTS / key
    parts.mkdir(parents=True, exist_ok=True)
    tables: list[pl.DataFrame] = []
    used, seconds, width = 0, 0.0, None
    stopped: Literal["all", "interval", "time"] = "all"
    for number, end in enumerate(ends):
        reached = end
        if limits.max_minutes is not None and used:
            reached = min(end, used + int((60.0 * limits.max_minutes - seconds) * used / seconds))
        if reached > used:
            table, took = _part(spec, directory, parts / str(number), ids[used:reached])
            tables.append(table)
            used, seconds = reached, seconds + took
        if used < end:
            stopped = "time"
            break
        if limits.max_half_width is not None and used < len(ids):
            width = half_width(joined(tables))
            if width is not None and width <= limits.max_half_width:
                stopped = "interval"
                break
    with replacing(directory / SAMPLES) as unfinished:
        joined(tables).write_parquet(unfinished)
    found = PromptsUsed(
        section="lab" if isinstance(limits, LabConfig) else "evaluation",
        used=used,
        of=len(ids),
        stopped=stopped,
        looks=looks,
        half_width=width,
        seconds=seconds,
    )
    if stopped != "all":
        warnings.warn(found.text(), Notice, stacklevel=2)
    return found


def stopping_places(total: int, least: int) -> list[int]:
    """The numbers of prompts at which sampling can stop, in order; the last one is all of them."""
    return sorted({min(total, max(least, math.ceil(share * total))) for share in SHARES} | {total})


def joined(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The tables of parts of the prompts, in order, as the table of one process: sampled completions first, then greedy ones."""
    # One chunk, so that the file has the same row groups too.
    whole = pl.concat(tables)
    return pl.concat([whole.filter(pl.col("sample") != GREEDY), whole.filter(pl.col("sample") == GREEDY)], rechunk=True)


def _part(spec: SampleSpec, directory: Path, part: Path, only: Sequence[str]) -> tuple[pl.DataFrame, float]:
    """The samples of a part and the seconds that they took; those that are there already are not sampled again."""
    table, record = part.with_suffix(".parquet"), part.with_suffix(".json")
    if not table.exists():
        began = time.monotonic()
        run_sampling(spec.model_copy(update={"only": list(only)}), directory)
        record.write_text(json.dumps({"seconds": time.monotonic() - began}), encoding="utf-8")
        # Last: a part that has its table has both.
        with replacing(table) as unfinished:
            shutil.copyfile(directory / SAMPLES, unfinished)
    return pl.read_parquet(table), float(json.loads(record.read_bytes())["seconds"])

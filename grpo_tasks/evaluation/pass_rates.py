"""Pass rates of prompts: how often a model solves each, with an interval, and what it answers most often.

They come from samples (`measured_rates`), or without intervals from a column of the user's data (`column_rates`). Calls no reward
function: whether a completion is solved is decided before (grpo_tasks/rewards/suite.py). Nor does it choose prompts:
grpo_tasks/stage/kept_prompts.py does.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import polars as pl

from grpo_tasks.answers.extract import extract
from grpo_tasks.content.markdown import as_markdown, code
from grpo_tasks.evaluation.statistics import rate_interval, wilson_interval
from schemas.config.completion import CompletionConfig
from schemas.config.run import RunConfig
from schemas.errors import DataError
from schemas.prompts import PromptRow
from schemas.results.base import Section
from schemas.results.evaluation import CONFIDENCE, DifficultyReport, StageDifficulty, histogram
from schemas.tables import PassRates

REPORT = "report.md"
_EXAMPLES = 20
_SHOWN_CHARS = 120
_SCHEMA = pl.Schema(
    {
        "stage": pl.String,
        "prompt_id": pl.String,
        "pass_rate": pl.Float64,
        "pass_rate_low": pl.Float64,
        "pass_rate_high": pl.Float64,
        "samples": pl.Int64,
        "frequent_answer": pl.String,
        "frequent_share": pl.Float64,
    }
)


def measured_rates(samples: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """The table of pass rates (schemas/tables.py PassRates), stage by stage and prompts sorted by id.

    `samples` has columns prompt_id, sample, completion, and one for each stage: 1 where its rewards count the sample as solved,
    else 0; null where no function of the stage applies, and the sample does not count.
    """
    # A prompt that occurs twice in the data was sampled twice with the same random numbers: that is no new information.
    single = pl.struct("prompt_id", "sample").is_first_distinct()
    frequent = _frequent_answers(samples.filter(single), config.completion)
    tables = []
    for stage in (one.name for one in config.stages):
        counts = samples.filter(single).group_by("prompt_id")
        rates = counts.agg(pass_rate=pl.col(stage).mean(), samples=pl.col(stage).count().cast(pl.Int64)).sort("prompt_id")
        counted = rates.select("pass_rate", "samples").iter_rows()
        bounds = [(None, None) if rate is None else wilson_interval(rate, count, CONFIDENCE) for rate, count in counted]
        bounded = rates.with_columns(
            pl.Series("pass_rate_low", [low for low, _ in bounds], dtype=pl.Float64),
            pl.Series("pass_rate_high", [high for _, high in bounds], dtype=pl.Float64),
            pl.lit(stage).alias("stage"),
        )
        tables.append(
            bounded.join(frequent, on="prompt_id", how="left", maintain_order="left").select(list(_SCHEMA)).cast(_SCHEMA)
        )
    return pl.concat(tables)


def column_rates(rows: Iterable[PromptRow], column: str, stages: Sequence[str]) -> pl.DataFrame:
    """The same table from a column of the data; rows without a value are left out.

    A DataError where no row has the column, or, with file and line, where a value is no number between 0 and 1.
    """
    rates: dict[str, float] = {}
    seen = False
    for row in rows:
        seen = seen or column in row.extra
        given = row.extra.get(column)
        if given is None or given == "":
            continue
        rates[row.prompt_id] = _rate(given, column, f"{row.source}:{row.line}")
    if not seen:
        raise DataError(
            f"no training row has the column {column}",
            place="difficulty.pass_rate_column",
            fix="name the column with the pass rates, under its new name if data.rename changes it",
        )
    known = pl.DataFrame({"prompt_id": list(rates), "pass_rate": list(rates.values())}, schema_overrides={"prompt_id": pl.String})
    missing = {name: pl.lit(None) for name in _SCHEMA if name not in ("stage", "prompt_id", "pass_rate")}
    of_stages = [known.sort("prompt_id").with_columns(stage=pl.lit(stage), **missing) for stage in stages]
    return pl.concat(of_stages).select(list(_SCHEMA)).cast(_SCHEMA)


def _rate(given: object, column: str, place: str) -> float:
    try:
        # A cell of a CSV file is text; a flag such as true is no pass rate.
        rate = math.nan if isinstance(given, bool) else float(str(given))
    except ValueError:
        rate = math.nan
    if not 0.0 <= rate <= 1.0:
        raise DataError(
            f"the pass rate in column {column} is {str(given)[:40]!r}, not a number between 0 and 1",
            place=place,
            fix="write 0.25 for a prompt that is solved in a quarter of all tries, and leave the cell empty where it is unknown",
        )
    return rate


def _frequent_answers(samples: pl.DataFrame, completion: CompletionConfig) -> pl.DataFrame:
    """For each prompt the answer that most completions give, and the share of completions that give it."""
    found: dict[str, Counter[str]] = {}
    totals: Counter[str] = Counter()
    for prompt_id, text in samples.select("prompt_id", "completion").iter_rows():
        read = extract(text, completion)
        answer = read.answer if read.answer is not None else read.lenient_answer
        totals[prompt_id] += 1
        if answer is not None:
            found.setdefault(prompt_id, Counter())[answer.strip()] += 1
    frequent = {prompt_id: counts.most_common(1)[0] for prompt_id, counts in found.items()}
    return pl.DataFrame(
        {
            "prompt_id": list(frequent),
            "frequent_answer": [answer for answer, _ in frequent.values()],
            "frequent_share": [count / totals[prompt_id] for prompt_id, (_, count) in frequent.items()],
        },
        schema={"prompt_id": pl.String, "frequent_answer": pl.String, "frequent_share": pl.Float64},
    )


def summarise_rates(table: pl.DataFrame) -> list[StageDifficulty]:
    """The pass rates of each stage in a few numbers."""
    found = []
    for stage in table["stage"].unique(maintain_order=True):
        rates = table.filter(pl.col("stage") == stage)["pass_rate"].drop_nulls()
        counts = histogram(rates)
        found.append(
            StageDifficulty(
                stage=stage,
                prompts=len(rates),
                mean=rate_interval(rates.to_numpy(), confidence=CONFIDENCE) if len(rates) else None,
                never_solved=counts[0],
                always_solved=counts[-1],
                histogram=counts,
            )
        )
    return found


def write_rates(
    rates: pl.DataFrame, rows: Sequence[PromptRow], config: RunConfig, directory: Path, *, key: str, label: str
) -> DifficultyReport:
    """Write pass_rates.parquet and report.md into `directory`: for each stage a histogram and the prompts that are never solved.

    `rates` are those of `measured_rates` or `column_rates` by this config, of these training rows; `label` names the stage whose
    start was measured, or is `start`.
    """
    measured = config.difficulty.pass_rate_column is None
    report = DifficultyReport(
        key=key,
        directory=directory,
        seconds=0.0,
        label=label,
        origin="measured" if measured else "column",
        samples=config.difficulty.samples if measured else 0,
        screen=config.difficulty.screen if measured else 0,
        success=config.difficulty.success,
        stages=summarise_rates(rates),
    )
    PassRates.validate(rates).write_parquet(report.pass_rates)
    by_id = {row.prompt_id: row for row in rows}
    never = [section for one in report.stages for section in _never_solved(one.stage, rates, by_id)]
    (directory / REPORT).write_text("# Difficulty\n\n" + as_markdown([*report.sections(), *never]), encoding="utf-8")
    return report


def _never_solved(stage: str, rates: pl.DataFrame, by_id: Mapping[str, PromptRow]) -> list[Section]:
    """The prompts most likely to have a wrong ground truth: never solved, although the model mostly gives one answer."""
    never = rates.filter((pl.col("stage") == stage) & (pl.col("pass_rate") == 0.0) & (pl.col("prompt_id").is_in(list(by_id))))
    if never.is_empty():
        return []
    lines = []
    ordered = never.sort("frequent_share", descending=True, nulls_last=True, maintain_order=True)
    for line in ordered.head(_EXAMPLES).iter_rows(named=True):
        row, share = by_id[line["prompt_id"]], line["frequent_share"]
        asked, answer = row.messages[-1]["content"], line["frequent_answer"]
        lines.append(
            [
                f"{row.source}:{row.line}",
                code(asked[:_SHOWN_CHARS]),
                code((row.truths[0] if row.truths else "")[:_SHOWN_CHARS]),
                "" if answer is None else code(answer[:_SHOWN_CHARS]),
                "" if share is None else f"{share:.0%}",
            ]
        )
    title = f"Never solved by the rewards of stage {stage}: {never.height:,} prompts"
    advice = (
        "A prompt that is never solved is too hard for now, or its ground truth is wrong. An answer that the model often gives "
        "points to a wrong ground truth. pass_rates.parquet has all of them."
    )
    columns = ("row", "prompt", "ground truth", "most frequent answer", "share")
    return [Section(title=title, text=advice, columns=columns, rows=lines, right=("share",))]

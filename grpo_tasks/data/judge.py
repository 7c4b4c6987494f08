"""The verdict on all rows: which are accepted, in which split, and why the others are quarantined.

Rows are processed in slices, so that the intermediate columns of the rules stay small compared with the data.
"""

import hashlib
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from grpo_tasks.data.leaks import NearDuplicates, broken_separation, near_duplicates
from grpo_tasks.data.normalise import (
    SHOWN,
    DecimalCommas,
    add_prompts,
    check_patterns,
    decimal_commas,
    prompt_format,
    prompt_id_column,
)
from grpo_tasks.data.rules import (
    RULES,
    RowRule,
    add_views,
    broken_row_rules,
    check_ignored,
    find_contradictions,
    find_duplicates,
    relation_keys,
    row_rules,
)
from grpo_tasks.kit.progress import Count
from schemas.config.data import PromptFormat
from schemas.config.run import RunConfig
from schemas.results.data import RuleCount, TaskRows, TokenLengths
from schemas.tables import Prompts, Quarantine, Raw

if TYPE_CHECKING:
    from grpo_tasks.data.chat_tokens import TokenCounter

_SLICE_ROWS = 200_000
_SWITCH_INTERVAL_S = 0.0003  # Python's default is 0.005
EXACT_ROWS = 100_000
"""Up to this many rows every prompt's tokens are counted; with more, prompts that are provably short enough are not."""
_BROKEN = pl.Schema({"row": pl.UInt32, "rule": pl.String, "value": pl.String})


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """Every row is in `accepted`, in `dropped` or, once for each broken rule, in `quarantine`."""

    rows: int
    accepted: pl.DataFrame
    """Prompts (schemas/tables.py) and `split`, in reading order."""
    quarantine: pl.DataFrame
    """Quarantine (schemas/tables.py), in reading order, causes before effects."""
    rules: list[RuleCount]
    """Every rule, in the order of the table."""
    ignored: frozenset[str]
    prompt_tokens: TokenLengths
    format: PromptFormat
    dropped: pl.DataFrame
    """Rows that repeat an earlier one (data.duplicates: drop): columns source, line, value."""
    near: NearDuplicates
    commas: list[DecimalCommas]

    @property
    def num_quarantined(self) -> int:
        """Number of rows that break a rule."""
        return self.rows - self.accepted.height - self.dropped.height

    @property
    def tasks(self) -> list[TaskRows]:
        """Accepted rows of each task, in the order of the alphabet; empty when the data has a single task."""
        is_train = pl.col("split") == "train"
        counts = self.accepted.group_by("task").agg(train_rows=is_train.sum(), eval_rows=(~is_train).sum()).sort("task")
        return [TaskRows.model_validate(row) for row in counts.filter(pl.col("task") != "").iter_rows(named=True)]

    def split(self, name: str) -> pl.DataFrame:
        """The accepted rows of `train` or `eval`."""
        return self.accepted.filter(split=name).drop("split")


def judge(rows: pl.DataFrame, *, config: RunConfig, counter: "TokenCounter", markers: Sequence[str]) -> RowVerdict:
    """Apply every rule to `rows` (schemas/tables.py Raw); `markers` are special tokens that no prompt may contain.

    `ConfigError` where answer_pattern is no pattern with a group, or ignore_rules names an unknown or a required rule;
    `DataError` where the configured form or the system prompt does not fit the prompts.
    """
    check_patterns(config.data)
    ignored = check_ignored(config.validation.ignore_rules)
    form = prompt_format(rows, config.data)
    rules = row_rules(config.completion.tags, markers, form)
    commas = decimal_commas(rows, config.data)
    with_commas = {file for one in commas if one.used for file in one.files}
    exact = rows.height <= EXACT_ROWS
    rows = Raw.validate(rows).with_row_index("row").with_columns(needs_answer=_needs_answer(rows, config))
    slices, count = list[_Slice](), Count("checking", rows.height, "rows")
    with ThreadPoolExecutor(1) as pool, _short_switch_interval():
        for one in rows.iter_slices(_SLICE_ROWS):
            slices.append(
                _judge_slice(
                    one, rules=rules, counter=counter, exact=exact, config=config, form=form, with_commas=with_commas, pool=pool
                )
            )
            count.add(one.height)
        judged = pl.concat([one.rows.hstack(one.hashes.result()) for one in slices])
    broken = pl.concat([one.broken for one in slices]).filter(~pl.col("rule").is_in(list(ignored)))
    broken, dropped = _compare_rows(judged, broken, config=config, ignored=ignored)
    judged = judged.join(dropped.select("row"), on="row", how="anti", maintain_order="left")
    if not config.data.eval:
        judged = _both_filled(judged.with_columns(split="hash_split"), broken, config)
    # A refused eval row is not part of the evaluation, so a training row cannot leak into it.
    leaks = broken_separation(judged.join(broken, on="row", how="anti", maintain_order="left")).cast(_BROKEN)
    broken = pl.concat([broken, leaks.filter(~pl.col("rule").is_in(list(ignored)))])
    order = pl.DataFrame([{"rule": rule.name, "meaning": rule.meaning} for rule in RULES]).with_row_index("order")
    reasons = broken.unique(["row", "rule"], keep="first", maintain_order=True).join(order, on="rule").sort("row", "order")
    counts = dict(reasons.group_by("rule").len().iter_rows())
    quarantine = reasons.join(judged.select("row", "split", "source", "line"), on="row", maintain_order="left")
    accepted = judged.join(reasons.select("row"), on="row", how="anti", maintain_order="left")
    return RowVerdict(
        rows=judged.height + dropped.height,
        accepted=Prompts.validate(accepted.select(list(Prompts.to_schema().columns))).with_columns(accepted["split"]),
        quarantine=Quarantine.validate(quarantine.select(list(Quarantine.to_schema().columns))),
        rules=[RuleCount(rule=rule.name, meaning=rule.meaning, rows=counts.get(rule.name, 0)) for rule in RULES],
        ignored=ignored,
        prompt_tokens=_lengths(judged["prompt_tokens"], config.validation.max_prompt_length),
        format=form,
        dropped=dropped.select("source", "line", "value"),
        near=near_duplicates(accepted),
        commas=commas,
    )


def _needs_answer(rows: pl.DataFrame, config: RunConfig) -> pl.Expr:
    """Whether a row without ground truth is refused."""
    if config.data.answer_column is None:
        return pl.lit(value=False)
    optional = [name for name, task in config.data.tasks.items() if task.answers == "optional"]
    needed = ~pl.col("task").fill_null("").is_in(optional) if optional else pl.lit(value=True)
    if config.completion.is_free_text:
        # Completions have no answer, yet in a source that has answers a missing one is a mistake.
        with_answers = rows.filter(pl.col("answer").is_not_null())["source"].unique().to_list()
        needed &= pl.col("source").is_in(with_answers)
    return needed


def _compare_rows(
    judged: pl.DataFrame, broken: pl.DataFrame, *, config: RunConfig, ignored: frozenset[str]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The broken rules with those between rows, and the duplicates that are left out."""
    comparable = judged.drop_nulls("prompt_id")
    # The copy of a row that is refused is the first one of its kind that can be used.
    duplicates = find_duplicates(comparable.join(broken, on="row", how="anti", maintain_order="left")).cast(_BROKEN)
    mode = "keep" if "duplicate" in ignored else config.data.duplicates
    dropped = duplicates if mode == "drop" else duplicates.clear()
    contradictions = find_contradictions(comparable.join(dropped, on="row", how="anti", maintain_order="left")).cast(_BROKEN)
    copies = duplicates if mode == "quarantine" else duplicates.clear()
    between = pl.concat([copies, contradictions]).filter(~pl.col("rule").is_in(list(ignored)))
    return pl.concat([broken, between]), dropped.join(judged.select("row", "source", "line"), on="row", maintain_order="left")


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    # The hashing thread never blocks, so polars would wait 5 ms for the interpreter lock after each of a thousand operations.
    default = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(default)


@dataclass(frozen=True, slots=True)
class _Slice:
    rows: pl.DataFrame
    hashes: Future[pl.DataFrame]  # prompt_id and hash_split
    broken: pl.DataFrame  # row, rule, value


def _judge_slice(
    rows: pl.DataFrame,
    *,
    rules: Sequence[RowRule],
    counter: "TokenCounter",
    exact: bool,
    config: RunConfig,
    form: PromptFormat,
    with_commas: Collection[str],
    pool: Executor,
) -> _Slice:
    faults = rows.select("row", "faults").drop_nulls().explode("faults").unnest("faults").select("row", "rule", "value")
    prepared = add_prompts(rows, config.data, form, with_commas=with_commas)
    blank = ~pl.col("needs_answer") & ~pl.col("answer").str.contains(SHOWN)
    prepared = prepared.with_columns(answer=pl.when(~blank.fill_null(value=False)).then("answer"))
    # Hashing is the only work that Python does row by row; polars checks the rules in the meantime.
    hashes = pool.submit(_hashes, prepared.select("prompt", "answer", "answers", "task", "needs_answer"), config)
    prepared = add_views(prepared)
    broken = broken_row_rules(prepared, rules)
    limit = config.validation.max_prompt_length
    tokens = counter.count_column(prepared["prompt"], limit=None if exact else limit).alias("prompt_tokens")
    prepared = prepared.with_columns(tokens)
    prepared = prepared.with_columns(relation_keys(prepared))
    # For a row whose turns are out of order, a template that refuses them adds no information.
    turn_rules = ["unknown_role", "system_position", "turn_order", "last_not_user"]
    turns_in_order = prepared.join(broken.filter(pl.col("rule").is_in(turn_rules)), on="row", how="anti")
    refused = turns_in_order.filter(pl.col("prompt").is_not_null() & pl.col("prompt_tokens").is_null())
    reasons = pl.Series(list(map(counter.template.refusal, refused["prompt"].to_list())), dtype=pl.String)
    too_long = pl.format("{} tokens, the limit is {}", "prompt_tokens", pl.lit(limit))
    views = ("text", "truths", "roles", "pattern_found", "raw_answer", "faults", "faulty_line", "faulty_answer", "other_form")
    found = [
        faults,
        broken,
        refused.select("row", rule=pl.lit("template_refused"), value=reasons),
        prepared.filter(pl.col("prompt_tokens") > limit).select("row", rule=pl.lit("prompt_too_long"), value=too_long),
    ]
    return _Slice(prepared.drop(*views, "needs_answer"), hashes, pl.concat([one.cast(_BROKEN) for one in found]))


def _hashes(rows: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    prompt_id = prompt_id_column(rows)
    hash_split = assign_splits(prompt_id, fraction=config.data.eval_fraction, seed=config.seed).alias("hash_split")
    return pl.DataFrame([prompt_id, hash_split])


def _lengths(tokens: pl.Series, limit: int) -> TokenLengths:
    p50, p95 = (tokens.quantile(share, "nearest") for share in (0.5, 0.95))
    return TokenLengths.model_validate(
        {"mean": tokens.mean() or 0, "p50": p50 or 0, "p95": p95 or 0, "max": tokens.max() or 0, "limit": limit}
    )


def _both_filled(judged: pl.DataFrame, broken: pl.DataFrame, config: RunConfig) -> pl.DataFrame:
    """The rows with enough of them held out, and enough left to train on, where the share of few rows gives one side too few.

    Rows move in the order of their hashes, so the side of every row still depends on no position.
    """
    usable = judged.join(broken, on="row", how="anti").drop_nulls("prompt_id").unique("prompt_id")
    held = usable.filter(split="eval").height
    fewest, most = config.validation.min_eval_rows, usable.height - config.validation.min_train_rows
    if most < fewest or fewest <= held <= most:
        return judged
    order = sorted(usable["prompt_id"], key=lambda prompt_id: hash_number(prompt_id, seed=config.seed))
    held_out = pl.Series(order[: fewest if held < fewest else most], dtype=pl.String)
    moved = pl.when(pl.col("prompt_id").is_in(held_out.implode())).then(pl.lit("eval")).otherwise(pl.lit("train"))
    return judged.with_columns(
        split=pl.when(pl.col("prompt_id").is_in(usable["prompt_id"].implode())).then(moved).otherwise("split")
    )


def hash_number(prompt_id: str, *, seed: int) -> int:
    """A number below 2**64 that a row always has; another seed gives another one."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[:8], "big")


def is_held_out(prompt_id: str, *, fraction: float, seed: int) -> bool:
    """Whether the row is in the eval split, where about `fraction` of all rows are. Another seed holds out other rows."""
    return hash_number(prompt_id, seed=seed) < fraction * 2**64


def assign_splits(prompt_id: pl.Series, *, fraction: float, seed: int) -> pl.Series:
    """`train` or `eval` for each prompt_id; rows without one stay in the train split and are refused anyway.

    By a hash and not by position: rows that are added or removed leave the split of every other row unchanged.
    """
    splits = ["eval" if one is not None and is_held_out(one, fraction=fraction, seed=seed) else "train" for one in prompt_id]
    return pl.Series("split", splits, dtype=pl.String)

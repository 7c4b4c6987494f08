"""The verdict on all rows: which are accepted, in which split, and why the others are quarantined.

    Raw --add_prompts--> --row rules--> --token length--> --copies--> --split--> --leaks--> Verdict(accepted, quarantine)

Rows are processed in slices, so that the intermediate columns of the rules stay small compared with the data.
"""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import polars as pl

from grpo_tasks.data.checks import (
    RowRule,
    add_views,
    broken_copies,
    broken_row_rules,
    broken_separation,
    relation_keys,
    row_rules,
)
from grpo_tasks.data.normalise import add_prompts, check_pattern, prompt_id_column
from grpo_tasks.data.rules import RULES, check_ignored
from grpo_tasks.data.split import assign_splits
from schemas.config.run import JudgeInputs, RunConfig
from schemas.results.data import RuleCount, TokenLengths
from schemas.tables import Prompts, Quarantine, Raw

_SLICE_ROWS = 200_000
_SWITCH_INTERVAL_S = 0.0003  # Python's default is 0.005
EXACT_ROWS = 100_000
"""Up to this many rows every prompt's tokens are counted; with more, prompts that are provably short enough are not."""
_BROKEN = pl.Schema({"row": pl.UInt32, "rule": pl.String, "value": pl.String})


class CountTokens(Protocol):
    """Counts the tokens of each chat of a column after the chat template (`chat_tokens.TokenCounter.count_column`)."""

    def __call__(self, messages: pl.Series, *, limit: int | None = None) -> pl.Series:
        """Null where the template refuses; with a `limit`, rows within it may get an upper bound instead of the count."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Every row is in `accepted` or, once for each broken rule, in `quarantine`."""

    rows: int
    accepted: pl.DataFrame
    """Columns of schemas/tables.py Prompts, and `split`, in reading order."""
    quarantine: pl.DataFrame
    """Columns of schemas/tables.py Quarantine, in reading order, causes before effects."""
    rules: list[RuleCount]
    """For every rule, in the order of the table: the number of rows that break it."""
    ignored: frozenset[str]
    prompt_tokens: TokenLengths

    @property
    def num_quarantined(self) -> int:
        """Number of rows that are not accepted."""
        return self.rows - self.accepted.height

    def split(self, name: str) -> pl.DataFrame:
        """The accepted rows of `train` or `eval` (schemas/tables.py Prompts)."""
        return self.accepted.filter(split=name).drop("split")

    def prompts_with(self, text: str) -> int:
        """Number of accepted rows with a message that contains the text."""
        contents = pl.element().struct.field("content").str.contains(text, literal=True)
        return self.accepted.select(pl.col("prompt").list.eval(contents).list.any().sum()).item()


def judge(rows: pl.DataFrame, *, config: JudgeInputs | RunConfig, count_tokens: CountTokens, markers: Sequence[str]) -> Verdict:
    """Apply every rule to `rows` (schemas/tables.py Raw).

    Args:
        rows: as read, in reading order.
        config: its data, validation and completion.tags sections, and the seed of the split.
        count_tokens: prompt lengths after the chat template.
        markers: the tokenizer's own special tokens.

    Raises:
        ConfigError: answer_pattern is not a pattern with a group, or ignore_rules names an unknown or a required rule.
    """
    check_pattern(config.data.answer_pattern)
    ignored = check_ignored(config.validation.ignore_rules)
    limit = config.validation.max_prompt_length
    lengths = _Lengths(count_tokens, limit=limit, exact=rows.height <= EXACT_ROWS)
    rules = row_rules(config.completion.tags, markers)
    rows = Raw.validate(rows).with_row_index("row")
    with ThreadPoolExecutor(1) as pool, _short_switch_interval():
        slices = [
            _judge_slice(one, rules=rules, lengths=lengths, config=config, pool=pool) for one in rows.iter_slices(_SLICE_ROWS)
        ]
        judged = pl.concat([one.with_hashes() for one in slices])
    applied = ~pl.col("rule").is_in(list(ignored))
    copies = broken_copies(judged.drop_nulls("prompt_id"))
    broken = pl.concat([*(one.broken for one in slices), copies.cast(_BROKEN)]).filter(applied)
    if not config.data.eval:
        judged = judged.with_columns(split="hash_split")
    # A refused eval row is not part of the evaluation, so a training row cannot leak into it.
    leaks = broken_separation(judged.join(broken, on="row", how="anti", maintain_order="left")).cast(_BROKEN).filter(applied)
    return _verdict(judged, pl.concat([broken, leaks]), ignored=ignored, limit=limit)


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """The hashing thread never blocks, so polars would wait 5 ms for the interpreter lock after each of a thousand operations."""
    default = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(default)


@dataclass(frozen=True, slots=True)
class _Lengths:
    count_tokens: CountTokens
    limit: int
    exact: bool

    def count(self, prompt: pl.Series) -> pl.Series:
        return self.count_tokens(prompt, limit=None if self.exact else self.limit)


@dataclass(frozen=True, slots=True)
class _Slice:
    rows: pl.DataFrame
    hashes: Future[pl.DataFrame]
    broken: pl.DataFrame
    """Columns row, rule, value."""

    def with_hashes(self) -> pl.DataFrame:
        """The rows with prompt_id and hash_split; waits for the hashing thread."""
        return self.rows.hstack(self.hashes.result())


def _hashes(prompt: pl.Series, answer: pl.Series, config: JudgeInputs | RunConfig) -> pl.DataFrame:
    prompt_id = prompt_id_column(prompt, answer)
    hash_split = assign_splits(prompt_id, fraction=config.data.eval_fraction, seed=config.seed).alias("hash_split")
    return pl.DataFrame([prompt_id, hash_split])


def _judge_slice(
    rows: pl.DataFrame, *, rules: Sequence[RowRule], lengths: _Lengths, config: JudgeInputs | RunConfig, pool: Executor
) -> _Slice:
    structure = _structure_faults(rows)
    prepared = add_prompts(rows, config.data)
    # Hashing is the only work that Python does row by row; polars checks the rules in the meantime.
    hashes = pool.submit(_hashes, prepared["prompt"], prepared["answer"], config)
    prepared = add_views(prepared).with_columns(answers=pl.lit(None, pl.List(pl.String)), task=pl.lit(""))
    broken = broken_row_rules(prepared, rules)
    prepared = prepared.with_columns(lengths.count(prepared["prompt"]).alias("prompt_tokens"))
    prepared = prepared.with_columns(relation_keys(prepared))
    return _Slice(
        prepared.drop("text", "roles", "pattern_found", "raw_answer", "faults", "faulty_line", "faulty_answer"),
        hashes,
        pl.concat([structure, broken.cast(_BROKEN), _length_faults(prepared, broken, lengths.limit)]),
    )


def _structure_faults(rows: pl.DataFrame) -> pl.DataFrame:
    faults = rows.select("row", "faults").drop_nulls().explode("faults").unnest("faults")
    return faults.select("row", "rule", "value").cast(_BROKEN)


def _length_faults(prepared: pl.DataFrame, broken: pl.DataFrame, limit: int) -> pl.DataFrame:
    # For a row whose turns are out of order, a template that refuses them adds no information.
    turn_rules = ["unknown_role", "system_position", "turn_order", "last_not_user"]
    turns_in_order = prepared.join(broken.filter(pl.col("rule").is_in(turn_rules)), on="row", how="anti")
    refused = turns_in_order.filter(pl.col("prompt").is_not_null() & pl.col("prompt_tokens").is_null())
    long = prepared.filter(pl.col("prompt_tokens") > limit)
    return pl.concat(
        [
            refused.select("row", rule=pl.lit("template_refused"), value="roles"),
            long.select(
                "row",
                rule=pl.lit("prompt_too_long"),
                value=pl.format("{} tokens, the limit is {}", "prompt_tokens", pl.lit(limit)),
            ),
        ]
    ).cast(_BROKEN)


def _verdict(judged: pl.DataFrame, broken: pl.DataFrame, *, ignored: frozenset[str], limit: int) -> Verdict:
    order = pl.DataFrame({"rule": [rule.name for rule in RULES], "meaning": [rule.meaning for rule in RULES]}).with_row_index(
        "order"
    )
    reasons = broken.unique(["row", "rule"], keep="first", maintain_order=True).join(order, on="rule").sort("row", "order")
    counts = dict(reasons.group_by("rule").len().iter_rows())
    quarantine = reasons.join(judged.select("row", "split", "source", "line"), on="row", maintain_order="left")
    accepted = judged.join(reasons.select("row"), on="row", how="anti", maintain_order="left")
    columns = list(Prompts.to_schema().columns)
    return Verdict(
        rows=judged.height,
        accepted=Prompts.validate(accepted.select(columns)).with_columns(accepted["split"]),
        quarantine=Quarantine.validate(quarantine.select(list(Quarantine.to_schema().columns))),
        rules=[RuleCount(rule=rule.name, meaning=rule.meaning, rows=counts.get(rule.name, 0)) for rule in RULES],
        ignored=ignored,
        prompt_tokens=_token_lengths(judged["prompt_tokens"].drop_nulls(), limit),
    )


def _token_lengths(lengths: pl.Series, limit: int) -> TokenLengths:
    if lengths.is_empty():
        return TokenLengths(mean=0.0, p50=0, p95=0, max=0, limit=limit)
    column = pl.col("tokens")
    figures = lengths.to_frame("tokens").select(
        mean=column.mean(), p50=column.quantile(0.5, "nearest"), p95=column.quantile(0.95, "nearest"), max=column.max()
    )
    return TokenLengths.model_validate({**figures.row(0, named=True), "limit": limit})

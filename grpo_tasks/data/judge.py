"""The verdict on all rows: which are accepted, on which side, and why the others are not.

    rows --with_prompts--> --row rules--> --token length--> --split--> --relations--> Verdict(accepted, refused)

Goes through the rows in slices, so that what the rules build in between stays small beside the data.
"""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import polars as pl

from grpo_tasks.data.prompts import check_pattern, prompt_ids, with_prompts
from grpo_tasks.data.relations import broken_copies, broken_separation, relation_keys
from grpo_tasks.data.row_rules import RowRule, broken_rules, row_rules, with_views
from grpo_tasks.data.rules import RULES, check_ignored
from grpo_tasks.data.split import split_sides
from schemas.config.run import JudgeInputs, RunConfig
from schemas.results import RuleCount, TokenLengths
from schemas.tables import Prompts, Quarantine, Raw

_SLICE = 200_000
_TURN_S = 0.0003  # of the interpreter, against Python's usual 0.005
EXACT_ROWS = 100_000
"""Up to so many rows every prompt's tokens are counted; beyond, those that are provably short enough are not."""
_BROKEN = pl.Schema({"row": pl.UInt32, "rule": pl.String, "value": pl.String})


class CountTokens(Protocol):
    """Tokens of each chat of a column after the chat template (`chat_tokens.TokenCounter.count_column`)."""

    def __call__(self, messages: pl.Series, *, within: int | None = None) -> pl.Series:
        """Null where the template refuses; `within` allows upper bounds for rows that keep it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Every row is in `accepted` or, once for each broken rule, in `refused`."""

    rows: int
    accepted: pl.DataFrame
    """Columns of schemas/tables.py Prompts, and `side`, in reading order."""
    refused: pl.DataFrame
    """Columns of schemas/tables.py Quarantine, in reading order, causes before effects."""
    rules: list[RuleCount]
    """Every rule of the table, in its order; rows that break it."""
    ignored: frozenset[str]
    prompt_tokens: TokenLengths

    @property
    def quarantined(self) -> int:
        """Rows refused."""
        return self.rows - self.accepted.height

    def side(self, name: str) -> pl.DataFrame:
        """The accepted rows of `train` or `eval` (schemas/tables.py Prompts)."""
        return self.accepted.filter(side=name).drop("side")

    def prompts_with(self, text: str) -> int:
        """Accepted rows with a message that holds the text."""
        contents = pl.element().struct.field("content").str.contains(text, literal=True)
        return self.accepted.select(pl.col("prompt").list.eval(contents).list.any().sum()).item()


def judge(rows: pl.DataFrame, *, config: JudgeInputs | RunConfig, count_tokens: CountTokens, markers: Sequence[str]) -> Verdict:
    """Apply every rule to `rows` (schemas/tables.py Raw).

    Args:
        rows: as read, in reading order.
        config: its data, validation and rewards.tags sections, and the seed of the split.
        count_tokens: prompt lengths after the chat template.
        markers: the tokenizer's own special tokens.

    Raises:
        ConfigError: answer_pattern is no pattern with a group, or ignore_rules names what is no rule.
    """
    check_pattern(config.data.answer_pattern)
    ignored = check_ignored(config.validation.ignore_rules)
    limit = config.validation.max_prompt_length
    lengths = _Lengths(count_tokens, limit=limit, within=limit if rows.height > EXACT_ROWS else None)
    rules = row_rules(config.rewards.tags, markers)
    rows = Raw.validate(rows).with_row_index("row")
    with ThreadPoolExecutor(1) as pool, _short_turns():
        slices = [_judge_slice(part, rules=rules, lengths=lengths, config=config, pool=pool) for part in rows.iter_slices(_SLICE)]
        judged = pl.concat([part.with_marks() for part in slices])
    heeded = ~pl.col("rule").is_in(list(ignored))
    copies = broken_copies(judged.drop_nulls("prompt_id"))
    broken = pl.concat([*(part.broken for part in slices), copies.cast(_BROKEN)]).filter(heeded)
    if not config.data.eval:
        judged = judged.with_columns(side="drawn_side")
    # A row that is refused anyway is held out of nothing.
    leaks = broken_separation(judged.join(broken, on="row", how="anti", maintain_order="left")).cast(_BROKEN).filter(heeded)
    return _verdict(judged, pl.concat([broken, leaks]), ignored=ignored, limit=limit)


@contextmanager
def _short_turns() -> Iterator[None]:
    """The thread that hashes never waits; polars, back from each of a thousand steps, would wait 5 ms for its turn."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@dataclass(frozen=True, slots=True)
class _Lengths:
    count_tokens: CountTokens
    limit: int
    within: int | None


@dataclass(frozen=True, slots=True)
class _Slice:
    rows: pl.DataFrame
    marks: Future[pl.DataFrame]
    broken: pl.DataFrame
    """Columns row, rule, value."""

    def with_marks(self) -> pl.DataFrame:
        """The rows with the columns of `_marks`; waits for them."""
        return self.rows.hstack(self.marks.result())


def _marks(prompt: pl.Series, answer: pl.Series, config: JudgeInputs | RunConfig) -> pl.DataFrame:
    ids = prompt_ids(prompt, answer)
    return pl.DataFrame([ids, split_sides(ids, fraction=config.data.eval_fraction, seed=config.seed).alias("drawn_side")])


def _judge_slice(
    rows: pl.DataFrame, *, rules: Sequence[RowRule], lengths: _Lengths, config: JudgeInputs | RunConfig, pool: Executor
) -> _Slice:
    structure = _structure_faults(rows)
    prepared = with_prompts(rows, config.data)
    # Hashing is the one part that Python does row by row; polars judges meanwhile.
    marks = pool.submit(_marks, prepared["prompt"], prepared["answer"], config)
    prepared = with_views(prepared)
    broken = broken_rules(prepared, rules)
    tokens = lengths.count_tokens(prepared["prompt"], within=lengths.within)
    prepared = prepared.with_columns(tokens.alias("prompt_tokens"))
    prepared = prepared.with_columns(relation_keys(prepared))
    return _Slice(
        prepared.drop("text", "roles", "found", "raw_answer", "faults", "faulty_line", "faulty_answer"),
        marks,
        pl.concat([structure, broken.cast(_BROKEN), _length_faults(prepared, broken, lengths.limit)]),
    )


def _structure_faults(rows: pl.DataFrame) -> pl.DataFrame:
    faults = rows.select("row", "faults").drop_nulls().explode("faults").unnest("faults")
    return faults.select("row", "rule", "value").cast(_BROKEN)


def _length_faults(prepared: pl.DataFrame, broken: pl.DataFrame, limit: int) -> pl.DataFrame:
    # A template that raises on turns out of order says nothing new.
    turns = ["unknown_role", "system_position", "turn_order", "last_not_user"]
    sound = prepared.join(broken.filter(pl.col("rule").is_in(turns)), on="row", how="anti")
    refused = sound.filter(pl.col("prompt").is_not_null() & pl.col("prompt_tokens").is_null())
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
    told = broken.unique(["row", "rule"], keep="first", maintain_order=True).join(order, on="rule").sort("row", "order")
    counts = dict(told.group_by("rule").len().iter_rows())
    refused = told.join(judged.select("row", "side", "source", "line"), on="row", maintain_order="left")
    accepted = judged.join(told.select("row"), on="row", how="anti", maintain_order="left")
    columns = list(Prompts.to_schema().columns)
    return Verdict(
        rows=judged.height,
        accepted=Prompts.validate(accepted.select(columns)).with_columns(accepted["side"]),
        refused=Quarantine.validate(refused.select(list(Quarantine.to_schema().columns))),
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

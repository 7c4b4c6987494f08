"""Accepted rows as objects, for the lab, the trainer and the evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
import polars as pl

from grpo_tasks.data.template import Message


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One accepted row (schemas/tables.py Prompts)."""

    prompt_id: str
    source: str
    line: int
    messages: tuple[Message, ...]
    answer: str
    """Ground truth, normalised."""
    prompt_tokens: int
    extra: Mapping[str, object]
    """Other columns of the row; reward functions get them as keyword arguments."""


def read_prompts(path: Path, limit: int | None = None) -> list[PromptRow]:
    """Rows of train.parquet or eval.parquet in reading order.

    With a limit: the first so many by prompt_id, which is a hash, so that a sample does not depend on how a file is sorted.
    """
    rows = pl.read_parquet(path)
    if limit is not None and limit < rows.height:
        rows = rows.sort("prompt_id").head(limit)
    return [_row(fields) for fields in rows.iter_rows()]


def _row(fields: tuple[str, str, int, list[dict[str, str]], str, int, str]) -> PromptRow:
    prompt_id, source, line, messages, answer, tokens, extra = fields
    return PromptRow(prompt_id, source, line, tuple(messages), answer, tokens, orjson.loads(extra))

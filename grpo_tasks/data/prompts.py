"""Raw rows -> the prompt and the ground truth they mean: system message in front, answer taken out by pattern and tidied.

Expressions over a whole column; nothing is refused here. `prompt_id` is made here, once, for every table after.
"""

import hashlib
from collections.abc import Mapping, Sequence

import orjson
import polars as pl

from grpo_tasks.data.normalise import normalised
from schemas.config.data import DataConfig
from schemas.errors import ConfigError
from schemas.tables import MESSAGES


def with_prompts(rows: pl.DataFrame, data: DataConfig) -> pl.DataFrame:
    """`rows` (schemas/tables.py Raw) with `prompt` instead of question and messages, `answer` tidied, and `found`.

    `prompt` is null where the row has none. `found` tells whether the pattern occurred, null where there was nothing to search;
    `raw_answer` is what was searched.
    """
    answer = pl.col("answer")
    taken = _last_match(answer, data.answer_pattern) if data.answer_pattern else answer
    return rows.with_columns(
        prompt=_prompt(data.system_prompt),
        answer=normalised(taken),
        raw_answer=answer,
        found=pl.when(answer.is_not_null()).then(taken.is_not_null()),
    ).drop("question", "messages")


def check_pattern(pattern: str | None) -> None:
    """Raise `ConfigError` unless the pattern is linear-time syntax with a group."""
    if pattern is None:
        return
    fix = "for example '#### (.+)'; Rust regex syntax: no look-around, no back-references"
    try:
        groups = pl.DataFrame({"text": [""]}).select(pl.col("text").str.extract_groups(pattern)).to_series().struct.fields
    except pl.exceptions.ComputeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(f"not a pattern: {reason}", place=f"data.answer_pattern: {pattern}", fix=fix) from error
    if not groups or groups == [""]:
        raise ConfigError("the pattern has no group to take the answer from", place=f"data.answer_pattern: {pattern}", fix=fix)


def prompt_id(messages: Sequence[Mapping[str, str]], answer: str) -> str:
    """First 16 hex digits of the SHA-256 of the canonical JSON of messages and answer."""
    chat = [{"role": message["role"], "content": message["content"]} for message in messages]
    return _digest(orjson.dumps({"messages": chat, "answer": answer}))


def prompt_ids(prompt: pl.Series, answer: pl.Series) -> pl.Series:
    """`prompt_id` of each row; null where prompt or answer is."""
    frame = pl.DataFrame({"messages": prompt, "answer": answer})
    whole = pl.col("messages").is_not_null() & pl.col("answer").is_not_null()
    text = frame.select(pl.when(whole).then(pl.struct("messages", "answer").struct.json_encode()))
    ids = [None if json is None else _digest(json.encode()) for json in text.to_series()]
    return pl.Series("prompt_id", ids, dtype=pl.String)


def _digest(json: bytes) -> str:
    return hashlib.sha256(json).hexdigest()[:16]


def _prompt(system: str | None) -> pl.Expr:
    question = pl.struct(role=pl.lit("user"), content="question")
    asked = pl.when(pl.col("question").is_not_null()).then(pl.concat_list(question))
    prompt = pl.coalesce("messages", asked)
    if system is None:
        return prompt
    opening = pl.lit(pl.Series([[{"role": "system", "content": system}]], dtype=MESSAGES)).first()
    led = prompt.list.first().struct.field("role") == "system"
    return pl.when(led).then(prompt).when(prompt.is_not_null()).then(pl.concat_list(opening, prompt))


def _last_match(answer: pl.Expr, pattern: str) -> pl.Expr:
    # extract alone gives the first match; the worked solution may hold several
    return answer.str.extract_all(pattern).list.last().str.extract(pattern, 1)

"""Raw rows -> the prompt, the ground truth and the prompt_id of each: expressions over a whole column. No row is refused here.

    question or messages --system prompt in front--> prompt
    answer column --answer_pattern, last match--> --normalise_column--> answer     $1,234.50 -> 1234.5, 51.0 -> 51, −7 -> -7
    prompt + answer --SHA-256--> prompt_id

Normalisation exists twice, for one text and for a column, made from the same replacements; a test proves them equal. It leaves
everything that is not a number as it is, and does not handle units, fractions or scientific notation. Whether two answers are
equal is decided in grpo_tasks/answers.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence

import orjson
import polars as pl

from schemas.config.data import DataConfig
from schemas.errors import ConfigError
from schemas.tables import MESSAGES

BLANKS = " \t\n\r\x0b\x0c\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
INVISIBLE = "\u200b\u2060\ufeff"
_MAX_NUMBER_LENGTH = 400  # longer strings of digits are no answer; leaving them unchanged keeps the regular expressions cheap

_SIGN = "[-+\u2212]"
_CURRENCY = "[$€£¥₹]"
_GROUPED = "|".join(f"[1-9][0-9]{{0,2}}(?:{mark}[0-9]{{3}})+" for mark in (",", "\u00a0", "\u202f", "\u2009"))
_DIGITS = rf"(?:(?:{_GROUPED}|0|[1-9][0-9]*)(?:\.[0-9]+)?|\.[0-9]+)"
_SPACE = "[ \u00a0\u202f\u2009]?"
_WHOLE_NUMBER = "^(?:0|-?[1-9][0-9]*)$"
_NUMBER = rf"^(?:{_SIGN}{_SPACE}{_CURRENCY}?|{_CURRENCY}{_SPACE}{_SIGN}?)?{_SPACE}{_DIGITS}(?:{_SPACE}(?:%|{_CURRENCY}))?\.?$"

_TEXT_REPLACEMENTS: tuple[tuple[str, str], ...] = (
    (f"[{INVISIBLE}]", ""),
    # a no-break space between words means a space
    ("\u00a0", " "),
)
_NUMBER_REPLACEMENTS: tuple[tuple[str, str], ...] = (
    ("\u2212", "-"),
    (rf"[+,$€£¥₹{BLANKS}]", ""),
    (r"\.$", ""),
    (r"^(-?)\.", "${1}0."),
    (r"(\.[0-9]*?)0+(%?)$", "${1}${2}"),
    (r"\.(%?)$", "${1}"),
    (r"^-0(%?)$", "0${1}"),
)


def add_prompts(rows: pl.DataFrame, data: DataConfig) -> pl.DataFrame:
    """`rows` (schemas/tables.py Raw) with `prompt` instead of question and messages, and the answer normalised.

    `prompt` is null where the row has none. `raw_answer` is the text that `data.answer_pattern` was applied to; `pattern_found`
    is whether the pattern matched (True without a pattern), null where there was no text.
    """
    raw_answer = pl.col("answer")
    extracted = _last_match(raw_answer, data.answer_pattern) if data.answer_pattern else raw_answer
    return rows.with_columns(
        prompt=_prompt(data.system_prompt),
        answer=normalise_column(extracted),
        raw_answer=raw_answer,
        pattern_found=pl.when(raw_answer.is_not_null()).then(extracted.is_not_null()),
    ).drop("question", "messages")


def check_pattern(pattern: str | None) -> None:
    """Raise `ConfigError` unless the pattern is a linear-time regular expression with a group."""
    if pattern is None:
        return
    fix = "for example '#### (.+)'; Rust regex syntax: no look-around, no back-references"
    try:
        groups = pl.DataFrame({"text": [""]}).select(pl.col("text").str.extract_groups(pattern)).to_series().struct.fields
    except pl.exceptions.ComputeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ConfigError(f"invalid pattern: {reason}", place=f"data.answer_pattern: {pattern}", fix=fix) from error
    if not groups or groups == [""]:
        raise ConfigError("the pattern has no group that captures the answer", place=f"data.answer_pattern: {pattern}", fix=fix)


def prompt_id(messages: Sequence[Mapping[str, str]], answer: str) -> str:
    """First 16 hex digits of the SHA-256 of the canonical JSON of messages and answer."""
    chat = [{"role": message["role"], "content": message["content"]} for message in messages]
    return _digest(orjson.dumps({"messages": chat, "answer": answer}))


def prompt_id_column(prompt: pl.Series, answer: pl.Series) -> pl.Series:
    """`prompt_id` of each row; null where prompt or answer is null."""
    frame = pl.DataFrame({"messages": prompt, "answer": answer})
    complete = pl.col("messages").is_not_null() & pl.col("answer").is_not_null()
    # polars writes the same JSON as orjson in prompt_id; a test proves it.
    json = frame.select(pl.when(complete).then(pl.struct("messages", "answer").struct.json_encode())).to_series()
    digests = [None if text is None else _digest(text.encode()) for text in json]
    return pl.Series("prompt_id", digests, dtype=pl.String)


def normalise_answer(text: str) -> str:
    """The normalised form of one answer; empty when it consists of whitespace only."""
    text = re.sub(_TEXT_REPLACEMENTS[0][0], "", text).strip(BLANKS)
    number = len(text) <= _MAX_NUMBER_LENGTH and re.search(_NUMBER, text)
    for pattern, replacement in _NUMBER_REPLACEMENTS if number else _TEXT_REPLACEMENTS:
        text = re.sub(pattern, re.sub(r"\$\{(\d)\}", r"\\g<\1>", replacement), text)
    return text


def normalise_column(answer: pl.Expr) -> pl.Expr:
    """`normalise_answer` for a column of strings; null stays null."""
    # Most answers are plain whole numbers already. Replaced by null, they cost the dozen replacements below nothing.
    plain = answer.str.contains(_WHOLE_NUMBER)
    text = pl.when(~plain).then(answer).str.replace_all(*_TEXT_REPLACEMENTS[0]).str.strip_chars(BLANKS)
    number = (text.str.len_chars() <= _MAX_NUMBER_LENGTH) & text.str.contains(_NUMBER)
    changed = pl.when(number).then(_replace(text, _NUMBER_REPLACEMENTS)).otherwise(_replace(text, _TEXT_REPLACEMENTS))
    return pl.when(plain).then(answer).otherwise(changed)


def _replace(text: pl.Expr, replacements: tuple[tuple[str, str], ...]) -> pl.Expr:
    for pattern, replacement in replacements:
        text = text.str.replace_all(pattern, replacement)
    return text


def _digest(json: bytes) -> str:
    return hashlib.sha256(json).hexdigest()[:16]


def _prompt(system: str | None) -> pl.Expr:
    question = pl.struct(role=pl.lit("user"), content="question")
    from_question = pl.when(pl.col("question").is_not_null()).then(pl.concat_list(question))
    prompt = pl.coalesce("messages", from_question)
    if system is None:
        return prompt
    system_message = pl.lit(pl.Series([[{"role": "system", "content": system}]], dtype=MESSAGES)).first()
    has_system = prompt.list.first().struct.field("role") == "system"
    return pl.when(has_system).then(prompt).when(prompt.is_not_null()).then(pl.concat_list(system_message, prompt))


def _last_match(answer: pl.Expr, pattern: str) -> pl.Expr:
    # extract alone returns the first match; a worked solution may contain several
    return answer.str.extract_all(pattern).list.last().str.extract(pattern, 1)

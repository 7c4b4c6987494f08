"""Raw rows -> the prompt, the ground truth and the prompt_id of each: expressions over a whole column. No row is refused here.

A prompt in TRL's standard format is one message of the role PLAIN. An answer is the last match of answer_pattern, and a number is
written in one way: $1,234.50 -> 1234.5, 51.0 -> 51, −7 -> -7. What is no number stays as it is. Where a file writes decimal
commas, 1.234,50 € -> 1234.5.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import polars as pl

from grpo_tasks.content.shards import shards_of
from grpo_tasks.data.table import json_digest
from schemas.config.data import DataConfig, PromptFormat
from schemas.errors import ConfigError, DataError
from schemas.prompts import PLAIN
from schemas.tables import MESSAGES

BLANKS = " \t\n\r\x0b\x0c\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
INVISIBLE = "\u200b\u2060\ufeff"
SHOWN = r"[^\p{Z}\p{C}\p{M}\x{2800}\x{3164}\x{115f}\x{1160}\x{ffa0}\x{1d159}]"
"""Found in a text that shows something: not only blanks, controls, fillers and marks alone (see answers/extraction.py)."""
_MAX_NUMBER_LENGTH = 400  # longer strings of digits are no answer; leaving them unchanged keeps the regular expressions cheap

_SIGN = "[-+\u2212]"
_CURRENCY = "[$€£¥₹]"
_GROUPED = "|".join(f"[1-9][0-9]{{0,2}}(?:{mark}[0-9]{{3}})+" for mark in (",", "\u00a0", "\u202f", "\u2009"))
_DIGITS = rf"(?:(?:{_GROUPED}|0|[1-9][0-9]*)(?:\.[0-9]+)?|\.[0-9]+)"
_SPACE = "[ \u00a0\u202f\u2009]?"
_WHOLE_NUMBER = "^(?:0|-?[1-9][0-9]*)$"
_NUMBER = rf"^(?:{_SIGN}{_SPACE}{_CURRENCY}?|{_CURRENCY}{_SPACE}{_SIGN}?)?{_SPACE}{_DIGITS}(?:{_SPACE}(?:%|{_CURRENCY}))?\.?$"

_AROUND = r"[^0-9.,]{0,12}"
_POINTS, _COMMAS = r"(?:[.\x{a0}\x{202f}\x{2009}'’ ][0-9]{3})", r"(?:,[0-9]{3})"
_WITH_COMMA = (
    rf"^{_AROUND}(?:[0-9]{{1,3}}{_POINTS}+,[0-9]+|[0-9]+,(?:[0-9]{{1,2}}|[0-9]{{4,}})|0,[0-9]+|[0-9]{{4,}},[0-9]+){_AROUND}$"
)
"""A number, perhaps with a currency or a unit, whose comma cannot group thousands."""
_WITH_POINT = (
    rf"^{_AROUND}(?:[0-9]{{1,3}}{_COMMAS}+\.[0-9]+|[0-9]{{1,3}}{_COMMAS}{{2,}}|[0-9]+\.(?:[0-9]{{1,2}}|[0-9]{{4,}})|0?\.[0-9]+"
    rf"|[0-9]{{4,}}\.[0-9]+){_AROUND}$|^[0-9]+(?:,[0-9]+)*, [0-9]|^[0-9]+(?:,[0-9]+){{2,}}$"
)
"""The same for a point, commas that do group thousands, or a list of numbers."""
_EITHER = rf"^{_AROUND}[0-9]{{1,3}},[0-9]{{3}}{_AROUND}$"
_COMMA_NUMBER = rf"^({_AROUND})([0-9]{{1,3}}{_POINTS}+|[0-9]+)(?:,([0-9]+))?({_AROUND})$"

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


def prompt_format(rows: pl.DataFrame, data: DataConfig) -> PromptFormat:
    """The form of the prompts: as configured, or that of most rows; `DataError` where it or the system prompt does not fit."""
    strings, chats = rows["text"].count(), rows["messages"].count()
    if data.format == "conversational":
        return "conversational"
    if data.format == "standard":
        if chats and not strings + rows["question"].count():
            raise DataError(
                "the prompts are chat messages, not strings",
                place="data.format: standard",
                fix="remove data.format, or name a column of strings in data.prompt_column or data.question_column",
            )
        return "standard"
    if strings <= chats + rows["question"].count():
        return "conversational"
    if data.system_prompt is not None:
        raise DataError(
            "the prompts are strings, which have no system message",
            place="data.system_prompt",
            fix="set data.format: conversational to ask them as user messages, or remove data.system_prompt",
        )
    return "standard"


@dataclass(frozen=True, slots=True)
class DecimalCommas:
    """How the ground truths of one source write decimals, where commas occur."""

    source: str
    files: frozenset[str]
    commas: int
    """Answers with a decimal comma."""
    points: int
    first: str
    """The first with a decimal comma."""
    used: bool
    """Whether commas are read as decimal commas."""

    def __str__(self) -> str:
        found = f"{self.source}: answers with a decimal comma ({self.commas:,}, first {self.first!r})"
        if self.used:
            return (
                f"{found} are read as numbers with a point, and completions have to write a point too; data.number_format: point "
                "leaves them as they are"
            )
        return (
            f"{found} stand next to others with a decimal point or a comma between thousands ({self.points:,}) and stay as they "
            "are; data.number_format: comma reads 1.234,5 as 1234.5"
        )


def decimal_commas(rows: pl.DataFrame, data: DataConfig) -> list[DecimalCommas]:
    """The sources (of `rows`, schemas/tables.py Raw) whose ground truths have decimal commas, in reading order."""
    if data.number_format == "point":
        return []
    # All files of a source are written alike.
    files = {shard.path: source.path for source in [*data.train, *data.eval] for shard in shards_of(source)}
    given = rows.lazy().select("source", answer=pl.coalesce("answers", pl.concat_list("answer"))).explode("answer")
    # Most answers hold neither mark; only a short one is a number.
    marked = given.filter(pl.col("answer").str.contains("[.,]")).collect()
    text = _by_source(data, lambda pattern: _last_match(pl.col("answer"), pattern)).str.strip_chars(BLANKS)
    found = marked.with_columns(answer=text).filter(pl.col("answer").str.len_chars() <= _MAX_NUMBER_LENGTH)
    comma, point, either = (pl.col("answer").str.contains(pattern) for pattern in (_WITH_COMMA, _WITH_POINT, _EITHER))
    counts = found.group_by(path=pl.col("source").replace_strict(files, default=pl.col("source")), maintain_order=True).agg(
        commas=comma.sum(), points=(point | either).sum(), certain=point.sum(), first=pl.col("answer").filter(comma).first()
    )
    forced = data.number_format == "comma"
    return [
        DecimalCommas(
            path,
            frozenset(file for file, source in files.items() if source == path),
            commas,
            points,
            first or "",
            # 1,500 alone may be either; more of them than of decimal commas are thousands.
            used=forced or (not certain and commas >= points),
        )
        for path, commas, points, certain, first in counts.iter_rows()
        if commas or forced
    ]


def add_prompts(
    rows: pl.DataFrame, data: DataConfig, form: PromptFormat = "conversational", *, with_commas: Collection[str] = ()
) -> pl.DataFrame:
    """`rows` (schemas/tables.py Raw) with `prompt` instead of question, messages and text, and the answers normalised.

    `with_commas`: files whose numbers have decimal commas. `other_form`: the row has a prompt, but of another form.
    `raw_answer`: what the answer pattern was applied to.
    `pattern_found`: whether it matched (True without a pattern); null where there was no text.
    """
    raw_answer = pl.col("answer")
    extracted = _with_points(_by_source(data, lambda pattern: _last_match(raw_answer, pattern)), with_commas)
    given = pl.any_horizontal(pl.col("question", "messages", "text").is_not_null())
    prepared = rows.with_columns(
        prompt=_prompt(data, form),
        answer=normalise_column(extracted),
        raw_answer=raw_answer,
        pattern_found=pl.when(raw_answer.is_not_null()).then(extracted.is_not_null()),
    ).with_columns(other_form=given & pl.col("prompt").is_null())
    if prepared["answers"].null_count() < prepared.height:
        prepared = _several_answers(prepared, data, with_commas)
    return prepared.drop("question", "messages", "text")


def _with_points(answer: pl.Expr, with_commas: Collection[str], element: pl.Expr | None = None) -> pl.Expr:
    """Numbers with decimal commas rewritten with points, in the rows of these files."""
    if not with_commas:
        return answer
    one = (answer if element is None else element).str.strip_chars(BLANKS)
    groups = one.str.extract_groups(_COMMA_NUMBER).struct
    whole = groups.field("2").str.replace_all("[^0-9]", "")
    number = pl.concat_str(
        groups.field("1"), whole, pl.concat_str(pl.lit("."), groups.field("3")).fill_null(""), groups.field("4")
    )
    rewritten = pl.coalesce(number, one)
    changed = rewritten if element is None else answer.list.eval(rewritten)
    return pl.when(pl.col("source").is_in(list(with_commas))).then(changed).otherwise(answer)


def _several_answers(rows: pl.DataFrame, data: DataConfig, with_commas: Collection[str]) -> pl.DataFrame:
    """The rows with `answers` normalised, each value once, and the first of them as `answer`."""
    found = _by_source(data, lambda pattern: pl.col("answers").list.eval(_last_match(pl.element(), pattern)))
    found = _with_points(found, with_commas, pl.element())
    normalised = pl.col("found").list.eval(normalise_column(pl.element())).list.drop_nulls()
    listed = rows.with_columns(found=found).with_columns(
        values=normalised.list.eval(pl.element().filter(pl.element() != "")).list.unique(maintain_order=True)
    )
    is_list = pl.col("answers").is_not_null()
    return listed.with_columns(
        answers=pl.when(pl.col("values").list.len() > 1).then("values"),
        answer=pl.when(is_list).then(pl.col("values").list.first().fill_null("")).otherwise("answer"),
        pattern_found=pl.when(is_list).then(~pl.col("found").list.contains(None)).otherwise("pattern_found"),
    ).drop("found", "values")


def check_patterns(data: DataConfig) -> None:
    """Raise `ConfigError` unless every answer pattern of the section is a linear-time regular expression with a group."""
    fix = "for example '#### (.+)'; Rust regex syntax: no look-around, no back-references"
    for pattern in filter(None, [data.answer_pattern, *(source.answer_pattern for source in [*data.train, *data.eval])]):
        place = f"data.answer_pattern: {pattern}"
        try:
            groups = pl.DataFrame({"text": [""]}).select(pl.col("text").str.extract_groups(pattern)).to_series().struct.fields
        except pl.exceptions.ComputeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ConfigError(f"invalid pattern: {reason}", place=place, fix=fix) from error
        if not groups or groups == [""]:
            raise ConfigError("the pattern has no group that captures the answer", place=place, fix=fix)


def prompt_id_column(rows: pl.DataFrame) -> pl.Series:
    """`prompt_id` of each row; null where there is no prompt, or no answer although the row needs one."""
    complete = pl.col("prompt").is_not_null() & (pl.col("answer").is_not_null() | ~pl.col("needs_answer"))
    short = pl.struct(messages="prompt", answer="answer").struct.json_encode()
    full = pl.struct(messages="prompt", answer="answer", answers="answers", task="task").struct.json_encode()
    more = pl.col("answers").is_not_null() | (pl.col("task").fill_null("") != "")
    # polars writes the same JSON as orjson in prompt_id; a test proves it.
    plain = rows["answers"].null_count() == rows.height and bool((rows["task"].fill_null("") == "").all())
    json = rows.select(pl.when(complete).then(short if plain else pl.when(more).then(full).otherwise(short))).to_series()
    digests = [None if text is None else json_digest(text.encode()) for text in json]
    return pl.Series("prompt_id", digests, dtype=pl.String)


def normalise_column(answer: pl.Expr) -> pl.Expr:
    """The normalised form of answers; null stays null, and only whitespace becomes empty."""
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


def _prompt(data: DataConfig, form: PromptFormat) -> pl.Expr:
    if form == "standard":
        # A question is a plain prompt only where the config says so: most data with a question column is asked in a chat.
        text = pl.coalesce("text", "question") if data.format == "standard" else pl.col("text")
        return pl.when(text.is_not_null()).then(pl.concat_list(pl.struct(role=pl.lit(PLAIN), content=text)))
    asked = pl.coalesce("question", "text") if data.format == "conversational" else pl.col("question")
    from_question = pl.when(asked.is_not_null()).then(pl.concat_list(pl.struct(role=pl.lit("user"), content=asked)))
    prompt = pl.coalesce("messages", from_question)
    if data.system_prompt is None:
        return prompt
    system_message = pl.lit(pl.Series([[{"role": "system", "content": data.system_prompt}]], dtype=MESSAGES)).first()
    has_system = prompt.list.first().struct.field("role") == "system"
    return pl.when(has_system).then(prompt).when(prompt.is_not_null()).then(pl.concat_list(system_message, prompt))


def _by_source(data: DataConfig, extract: Callable[[str | None], pl.Expr]) -> pl.Expr:
    """What `extract` makes of the answer pattern of the row's source."""
    found = extract(data.answer_pattern)
    for source in [*data.train, *data.eval]:
        if source.answer_pattern:
            own = pl.col("source").is_in([shard.path for shard in shards_of(source)])
            found = pl.when(own).then(extract(source.answer_pattern)).otherwise(found)
    return found


def _last_match(answer: pl.Expr, pattern: str | None) -> pl.Expr:
    # extract alone returns the first match; a worked solution may contain several
    return answer if pattern is None else answer.str.extract_all(pattern).list.last().str.extract(pattern, 1)

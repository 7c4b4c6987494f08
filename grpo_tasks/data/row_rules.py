"""What a row must keep by itself: one polars expression a rule, judged together by one pandera schema.

An expression is True where the rule holds. A prompt or answer that is not there breaks no rule of its content: the reason
for its absence has been told already.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandera.errors
import pandera.polars as pa
import polars as pl

from grpo_tasks.data.normalise import BLANKS, INVISIBLE, normalised
from grpo_tasks.data.rules import RULES
from schemas.config.rewards import TagsConfig

ROLES = ["system", "user", "assistant"]
GENERIC_MARKERS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<<SYS>>",
    "<</SYS>>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u0080-\u0084\u0086-\u009f]"

_ROLES = pl.col("prompt").list.eval(pl.element().struct.field("role"))
_CONTENTS = pl.col("prompt").list.eval(pl.element().struct.field("content"))
_USER_TEXT = (
    pl.col("prompt")
    .list.eval(pl.element().filter(pl.element().struct.field("role") == "user").struct.field("content"))
    .list.join("\n")
)


@dataclass(frozen=True, slots=True)
class RowRule:
    """How one rule of the table is told."""

    rule: str
    holds: pl.Expr
    """True where the row keeps it; null counts as kept."""
    value: pl.Expr
    """What to show of a row that breaks it; a string."""


def row_rules(tags: TagsConfig, markers: Sequence[str]) -> list[RowRule]:
    """The rules of a single row, over the columns prompt, text, roles, answer, found, faulty_line, faulty_answer, prompt_tokens.

    `markers` are the tokenizer's own special tokens; they count beside GENERIC_MARKERS.
    """
    own_tags = [f"<{slash}{tag}>" for tag in (tags.reasoning, tags.answer) for slash in ("", "/")]
    forbidden = [marker for marker in dict.fromkeys((*GENERIC_MARKERS, *markers)) if marker and marker not in own_tags]
    return [*_turn_rules(), *_content_rules(tags.answer, forbidden), *_answer_rules(own_tags)]


def with_views(rows: pl.DataFrame) -> pl.DataFrame:
    """`rows` with the columns the rules look at: roles (joined by commas) and text (all contents, one below the other)."""
    return rows.with_columns(
        roles=_ROLES.list.join(","),
        text=_CONTENTS.list.join("\n"),
        faulty_line=_has_fault("line"),
        faulty_answer=_has_fault("answer"),
    )


def broken_rules(rows: pl.DataFrame, rules: Sequence[RowRule]) -> pl.DataFrame:
    """Columns row, rule, value: one line for each rule a row breaks; `rows` needs a column `row`."""
    held = rows.select(rule.holds.fill_null(value=True).alias(rule.rule) for rule in rules)
    schema = pa.DataFrameSchema({rule.rule: pa.Column(bool, pa.Check.eq(True)) for rule in rules})
    try:
        schema.validate(held, lazy=True)
    except pandera.errors.SchemaErrors as errors:
        cases = errors.failure_cases.select(pl.col("column").alias("rule"), pl.col("index").cast(pl.UInt32))
        return pl.concat(_told(rows, rule, cases.filter(pl.col("rule") == rule.rule)["index"]) for rule in rules)
    return _told(rows, rules[0], pl.Series([], dtype=pl.UInt32))


def _told(rows: pl.DataFrame, rule: RowRule, places: pl.Series) -> pl.DataFrame:
    value = rule.value.cast(pl.String).fill_null("null")
    shown = pl.when(value.str.len_chars() > 200).then(value.str.head(199) + "…").otherwise(value)
    return rows[places].select("row", rule=pl.lit(rule.rule), value=shown)


def _has_fault(part: str) -> pl.Expr:
    # A doubled key leaves a row that can be read; the other faults of a line leave none.
    names = [rule.name for rule in RULES if rule.part == part and not rule.ignorable]
    return pl.col("faults").list.eval(pl.element().struct.field("rule").is_in(names)).list.any().fill_null(value=False)


def _turn_rules() -> list[RowRule]:
    roles = pl.col("roles")
    known = ~_ROLES.list.eval(~pl.element().is_in(ROLES)).list.any()
    turns = roles.str.replace_all("system,", "", literal=True).str.replace(",?system$", "")
    alternate = turns.str.contains("^(user(,assistant,user)*(,assistant)?)?$")
    # The order of turns means something only where every role does.
    return [
        RowRule("unknown_role", known, roles),
        RowRule("system_position", ~known | ~_ROLES.list.slice(1).list.contains("system"), roles),
        RowRule("turn_order", ~known | alternate, roles),
        RowRule("last_not_user", ~known | (_ROLES.list.last() == "user"), roles),
    ]


def _content_rules(answer_tag: str, markers: list[str]) -> list[RowRule]:
    text, answer = pl.col("text"), pl.col("answer").fill_null("")
    filled = _CONTENTS.list.eval(pl.element().str.strip_chars(BLANKS + INVISIBLE) != "").list.all()
    both = pl.concat_str(text, answer, separator="\n")
    block = rf"(?s)<{answer_tag}>.*?</{answer_tag}>"
    given = _USER_TEXT.str.extract_all(block).list.eval(
        normalised(pl.element().str.strip_prefix(f"<{answer_tag}>").str.strip_suffix(f"</{answer_tag}>"))
    )
    # Blocks in a prompt are rare; looking for the two characters first spares every other row the regex.
    has_block = text.str.contains(f"<{answer_tag}>", literal=True)
    return [
        RowRule("content_empty", filled, pl.col("roles")),
        RowRule("control_characters", ~both.str.contains(_CONTROL), _around(both, _CONTROL)),
        RowRule(
            "template_markers",
            ~both.str.contains_any(markers),
            both.str.extract_many(markers).list.unique(maintain_order=True).list.join(" "),
        ),
        RowRule("answer_in_prompt", ~has_block | ~given.list.contains(answer) | (answer == ""), given.list.join(" | ")),
    ]


def _answer_rules(own_tags: list[str]) -> list[RowRule]:
    answer = pl.col("answer")
    told_already = pl.col("faulty_line") | pl.col("faulty_answer")
    return [
        RowRule("answer_missing", told_already | (pl.col("found").is_not_null() & (answer != "").fill_null(value=True)), answer),
        RowRule("answer_pattern", told_already | pl.col("found"), pl.col("raw_answer")),
        RowRule("answer_has_tags", ~answer.str.contains_any(own_tags), answer),
    ]


def _around(text: pl.Expr, pattern: str) -> pl.Expr:
    # as JSON, so that what cannot be seen is written out
    return pl.struct(found=text.str.extract(f"(?s)(.{{0,20}}{pattern}.{{0,20}})", 1)).struct.json_encode()

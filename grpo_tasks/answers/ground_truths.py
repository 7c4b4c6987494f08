"""Ground truths that the configured equality cannot compare with anything, so that no answer to them is ever right.

A ground truth that does not equal itself equals nothing: text under `numeric`, a word under `choice`. `math` still compares text
letter by letter, so it only causes a warning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from grpo_tasks.answers.equality import answers_equal
from grpo_tasks.answers.expressions import expressions_equal
from grpo_tasks.answers.numerals import parse_number
from grpo_tasks.content.places import row_place
from schemas.config.completion import Equality
from schemas.errors import DataError

MAX_DISTINCT: dict[Equality, int] = {"numeric": 20_000, "choice": 20_000, "math": 200}
"""Distinct ground truths that are checked, about one second of work. When there are more, a random sample is checked. Plain
numbers are recognised by a pattern and do not count towards this limit."""
_PLAIN_NUMBER = r"^\s*[+-]?[0-9]{1,100}(?:\.[0-9]{1,50})?\s*$"
_DEFECT = {
    "numeric": "are not numbers",
    "math": "are not mathematical expressions",
    "choice": "are not letters of a multiple choice",
}
_SHOWN_CHARS = 60
_TRIED = 500  # answers that a pattern is tried on
PATTERNS = (
    (r"#### (.+)", "the text after the last ####, as in GSM8K"),
    (r"\\boxed\{([^{}]*)\}", r"the content of \boxed{}"),
    (r"(?s)<answer>\s*(.*?)\s*</answer>", "the text between <answer> and </answer>"),
    (r"(?i)\banswer is:?\s*(.+?)\.?\s*$", "the text after `answer is`"),
)
"""Marks of the final answer inside a worked solution, in the syntax of Rust's linear-time regular expressions."""
FORMULA, NUMBER = (r"\$([^$]+)\$", "the last text between two $"), (r"(-?\d[\d,]*(?:\.\d+)?)", "the last number")
"""What is proposed only where it makes the answers comparable."""
MATCHED = 0.95
"""Share of the answers in which a pattern must occur."""


@dataclass(frozen=True, slots=True)
class UnusableTruths:
    """The unusable ground truths of one column."""

    how: Equality
    count: int
    of: int
    """Rows checked: all of them, unless the column has more distinct ground truths than MAX_DISTINCT."""
    first: str
    """With file and line of its row."""
    fix: str = ""

    @property
    def warning(self) -> str:
        """A sentence with the numbers and the fix; empty when every ground truth is usable."""
        if not self.count:
            return ""
        effect = "are right only when the text is identical" if self.how == "math" else "can never be right"
        return (
            f"{self.count:,} of {self.of:,} answers {_DEFECT[self.how]} ({self.first}) and {effect} "
            f"under completion.equality: {self.how}; {self.fix}"
        )

    def enforce(self) -> None:
        """Raise `DataError` when no completion of any row could be right."""
        if self.count and self.count == self.of and self.how != "math":
            raise DataError(
                f"none of the {self.of:,} answers can ever be right: all {_DEFECT[self.how]} ({self.first})",
                place=f"completion.equality: {self.how}",
                fix=self.fix,
            )


def find_unusable_truths(rows: pl.DataFrame, how: Equality, *, extracted: bool = False) -> UnusableTruths:
    """Check the ground truths of accepted rows, each distinct one once. Of several right answers of a row one usable is enough.

    `rows` has the columns answer (null for a row without ground truth), source and line, and answers where rows list several.
    `extracted`: a pattern has taken them out of a longer text, so none is proposed.
    """
    rows = rows.filter(pl.col("answer").is_not_null())
    if how in ("exact", "json"):
        return UnusableTruths(how, 0, rows.height, "")
    listed = pl.coalesce("answers", pl.concat_list("answer")) if "answers" in rows.columns else pl.concat_list("answer")
    truths = rows.select(row=pl.int_range(pl.len()), truth=listed).explode("truth")
    usual = pl.lit(value=False) if how == "choice" else pl.col("truth").str.contains(_PLAIN_NUMBER)
    unusual = truths.filter(~usual)
    distinct = unusual["truth"].unique(maintain_order=True)
    sample = distinct if len(distinct) <= MAX_DISTINCT[how] else distinct.sample(MAX_DISTINCT[how], seed=0)
    bad = pl.Series(
        [
            truth
            for truth in sample
            if not answers_equal(truth, truth, how)
            # Equal text is always right under `math`; what it is not, is mathematics.
            or (how == "math" and parse_number(truth) is None and not expressions_equal(truth, truth))
        ],
        dtype=pl.String,
    )
    known = truths.with_columns(bad=pl.col("truth").is_in(bad.implode()), checked=usual | pl.col("truth").is_in(sample.implode()))
    # A row whose truths were not all sampled may have a usable one: it does not count.
    by_row = known.group_by("row", maintain_order=True).agg(pl.col("bad").all(), pl.col("checked").all())
    found = rows.filter(by_row["bad"])
    first = ""
    for answer, source, line in found.select("answer", "source", "line").head(1).iter_rows():
        shown = answer if len(answer) <= _SHOWN_CHARS else answer[: _SHOWN_CHARS - 1] + "…"
        first = f"first {shown!r} in {row_place(source, line)}"
    fix = _fix(bad.to_list(), how, extracted=extracted) if found.height else ""
    return UnusableTruths(how, found.height, int(by_row["checked"].sum()), first, fix)


def find_pattern(answers: Sequence[str], how: Equality | None = None) -> tuple[str, str] | None:
    """The pattern that marks the ground truth in nearly all answers, and what it takes; None when the answer is bare.

    With `how`: one that takes something that this equality can compare.
    """
    column = pl.Series("answer", answers, dtype=pl.String)
    for pattern, meaning in PATTERNS if how is None else (*PATTERNS, FORMULA, NUMBER):
        taken = column.str.extract_all(pattern).list.last().str.extract(pattern, 1).drop_nulls()
        usable = [text for text in taken if how is None or answers_equal(text, text, how)]
        if len(column) and len(usable) >= MATCHED * len(column):
            return pattern, meaning
    return None


def _fix(truths: Sequence[str], how: Equality, *, extracted: bool) -> str:
    """What makes these ground truths comparable, tried on them before it is proposed."""
    if all(truth.startswith("{") for truth in truths):
        return "set completion.equality: json and remove completion.answer_key, to compare whole JSON objects"
    pattern = None if extracted else find_pattern(truths[:_TRIED], how)
    extract = f"set data.answer_pattern: '{pattern[0]}', which takes {pattern[1]}, or " if pattern else ""
    return f"{extract}set completion.equality: exact to compare text"

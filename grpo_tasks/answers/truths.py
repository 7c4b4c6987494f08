"""Ground truths that the configured equality cannot compare with anything: no answer to them is ever right.

    answer column --answers_equal(truth, truth)--> Unusable(count, of, first) --> warning, or refusal when there is no other

A truth that does not equal itself equals nothing: text under `numeric`, a word under `choice`. Under `math` text is still
compared letter by letter, so such a column is not refused.
"""

from dataclasses import dataclass

import polars as pl

from grpo_tasks.answers.expressions import expressions_equal
from grpo_tasks.answers.extract import Equality, answers_equal
from grpo_tasks.answers.numerals import parse_number
from schemas.errors import DataError

MAX_DISTINCT: dict[Equality, int] = {"numeric": 20_000, "choice": 20_000, "math": 200}
"""Distinct truths that are looked at, a second's worth; of more, a random sample. Plain numbers always count."""
_PLAIN_NUMBER = r"^\s*[+-]?[0-9]{1,100}(?:\.[0-9]{1,50})?\s*$"
_LACK = {
    "numeric": "are not one number",
    "math": "are not one mathematical expression",
    "choice": "are not the letter of a choice",
}
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Unusable:
    """What was found in one column of ground truths."""

    how: Equality
    count: int
    of: int
    """Rows looked at: all, but for columns with more distinct answers than MAX_DISTINCT."""
    first: str
    """The first such truth, with the place of its row."""

    @property
    def warning(self) -> str:
        """A sentence with the numbers and the fix; empty when every truth is usable."""
        if not self.count:
            return ""
        effect = "are right only when the text is identical" if self.how == "math" else "can never be right"
        return (
            f"{self.count:,} of {self.of:,} answers {_LACK[self.how]} ({self.first}) and {effect} "
            f"under rewards.equality: {self.how}; {_fix(self.how)}"
        )

    def enforce(self) -> None:
        """Raise `DataError` when no completion of any row could be right."""
        if self.count and self.count == self.of and self.how != "math":
            raise DataError(
                f"none of the {self.of:,} answers can ever be right: all {_LACK[self.how]} ({self.first})",
                place=f"rewards.equality: {self.how}",
                fix=_fix(self.how),
            )


def find_unusable(rows: pl.DataFrame, how: Equality) -> Unusable:
    """Look through the columns answer, source and line of accepted rows; the time goes by the distinct answers."""
    if how == "exact":
        return Unusable(how, 0, rows.height, "")
    odd = rows["answer"].filter(~rows["answer"].str.contains(_PLAIN_NUMBER)) if how != "choice" else rows["answer"]
    distinct = odd.unique(maintain_order=True)
    seen = distinct if len(distinct) <= MAX_DISTINCT[how] else distinct.sample(MAX_DISTINCT[how], seed=0)
    bad = pl.Series([truth for truth in seen if not _usable(truth, how)], dtype=pl.String)
    found = rows.filter(pl.col("answer").is_in(bad.implode()))
    looked = rows.height - len(odd) + int(odd.is_in(seen.implode()).sum())
    return Unusable(how, found.height, looked, _shown(found))


def _usable(truth: str, how: Equality) -> bool:
    if how == "math":
        return parse_number(truth) is not None or expressions_equal(truth, truth)
    return answers_equal(truth, truth, how)


def _shown(found: pl.DataFrame) -> str:
    if found.is_empty():
        return ""
    row = found.row(0, named=True)
    answer = row["answer"] if len(row["answer"]) <= _SHOWN else row["answer"][: _SHOWN - 1] + "…"
    return f"first {answer!r} in {row['source']}:{row['line']}"


def _fix(how: Equality) -> str:
    pick = ", or data.answer_pattern to pick the number out of the text" if how == "numeric" else ""
    return f"set rewards.equality: exact to compare text{pick}"

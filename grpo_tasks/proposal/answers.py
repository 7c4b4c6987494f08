"""Where the ground truth stands inside the answer column, and how two answers are compared."""

from collections.abc import Sequence

import polars as pl

from grpo_tasks.answers.ground_truths import find_unusable_truths
from grpo_tasks.data.normalise import normalise_answer
from schemas.config.completion import Equality

PATTERNS = (
    (r"#### (.+)", "the text after the last ####, as in GSM8K"),
    (r"\\boxed\{([^{}]*)\}", r"the content of \boxed{}"),
    (r"(?s)<answer>\s*(.*?)\s*</answer>", "the text between <answer> and </answer>"),
    (r"(?i)\banswer is:?\s*(.+?)\.?\s*$", "the text after `answer is`"),
)
"""Marks of the final answer inside a worked solution, in the syntax of Rust's linear-time regular expressions."""
MATCHED = 0.95
"""Share of the answers in which a pattern must occur."""
_LONGEST_CHOICE = 3


def find_pattern(answers: Sequence[str]) -> tuple[str, str] | None:
    """The pattern that marks the ground truth in nearly all answers, and what it takes; None when the answer is bare."""
    column = pl.Series("answer", answers, dtype=pl.String)
    for pattern, meaning in PATTERNS:
        if len(column) and int(column.str.contains(pattern).sum()) >= MATCHED * len(column):
            return pattern, meaning
    return None


def find_equality(truths: Sequence[str]) -> Equality:
    """How these ground truths are compared: as letters, numbers or expressions if all of them are such, otherwise as text."""
    normal = [normalise_answer(truth) for truth in truths]
    rows = pl.DataFrame({"answer": normal, "source": "", "line": range(len(normal))})
    short = all(len(truth) <= _LONGEST_CHOICE for truth in normal)
    kinds: list[Equality] = ["numeric", "choice", "math"] if short else ["numeric", "math"]
    for kind in kinds:
        if normal and find_unusable_truths(rows, kind).count == 0:
            return kind
    return "exact"

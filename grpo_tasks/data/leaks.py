"""Training questions that are also held out, however they are disguised.

A row whose question has the same key (`normalise_question`) is a leak and quarantined; one with much of the same text and the
same numbers is reported. Compatibility forms, case, marks, punctuation, markup and the spelling of a number (1,500 = 1500.0) are
no difference. Operators are one: 3 - 4 is not 3 / 4, and (2 + 3) * 4 is not 2 + 3 * 4.
"""

import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from grpo_tasks.content.places import row_place

NEAR_ROWS = 20_000
"""Training rows that near duplicates are looked for among, some seconds of work. Of more, a random sample is taken."""
NEAR_HELD_OUT = 5_000
"""Held-out rows, likewise."""
NEAR_SHARE = 0.85
"""Share of the parts of a held-out question that a near duplicate has."""
_PART_CHARS = 5
_FEWEST_PARTS = 8
"""A question with fewer parts is too short to tell."""
_COMMON, _MANY = 0.5, 50
"""Of many held-out questions, parts that more than this share have belong to the frame of all of them: they are left out."""
_ALIKE = 0.3
"""Smallest Jaccard index: a long text has the parts of many short ones."""
_BATCH = 1_000
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")

_CHARACTERS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d", "-"),
    **dict.fromkeys("\u2018\u2019\u201b\u02bc", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u201f\u00ab\u00bb", '"'),
    **dict.fromkeys("\u00d7\u22c5\u2219", "*"),
    **dict.fromkeys("\u00f7\u2215", "/"),
    **dict.fromkeys("\u2800\u3164\u115f\u1160\uffa0\u2022\u00bf\u00a1", " "),
    # Before compatibility forms: there, 2² is 22 and 1½ is 11/2.
    **{mark: f"^{number}" for number, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **dict.fromkeys("\u2044", "/"),
}
_DIGITS = {letter: str(unicodedata.decimal(letter)) for letter in map(chr, range(0x80, 0x20000)) if letter.isdecimal()}
# Letters of other scripts that look like Latin ones.
_LATIN = dict(zip("аеорсухіјѕһԁԛԝο", "aeopcyxijshdqwo", strict=True))
_FOREIGN = r"[^\x00-\x7f]"
_MARKUP = {
    "&nbsp;": " ",
    "&amp;": "&",
    "&lt;": "<",
    "&gt;": ">",
    "&quot;": '"',
    "&#39;": "'",
    "`": "",
    "~~": "",
    "\\$": " ",
    "$": " ",
}


def _ungrouped(digit: str, mark: str) -> list[tuple[str, str]]:
    # Joins the groups of three digits of a number, up to the trillions.
    first, group = rf"\b({digit}{{1,3}})", rf"{mark}({digit}{{3}})"
    return [(first + group * more + r"\b", "".join(f"${{{at + 1}}}" for at in range(more + 1))) for more in (4, 3, 2, 1)]


_REPLACEMENTS: tuple[tuple[str, str], ...] = (
    (r"</?(?:b|i|u|em|strong|p|br|span|div|font|li|ul|ol)(?:\s[^<>]*)?/?>", " "),
    # numbers by their value: 1,500 and 1{,}500; 25.0 and 1.50; .5; 007
    *_ungrouped(r"[0-9]", r"(?:,|\{,\}|\\[,!])"),
    (r"([0-9]\.[0-9]*?[1-9])0+\b", "${1}"),
    (r"([0-9])\.0+\b", "${1}"),
    (r"(^|[^0-9.])\.([0-9])", "${1}0.${2}"),
    (r"(^|[^0-9.])0+([1-9])", "${1}${2}"),
    # emphasis and headings: **word**, *word*, __word__, # word
    (r"(^|\s)(?:\*{2,3}|_{1,3}|#{1,6}\s|\*\b)", "${1}"),
    (r"([^\s*_])(?:\*{2,3}|_{1,3}|\b\*)([\s.,:;?!]|$)", "${1}${2}"),
    (r"_{2,}", " "),
    # hyphens and dashes between words, where there are no variables
    (r"(\p{L}{2,})(?:-|\s+-+\s+)(\p{L}{2,})", "${1} ${2}"),
    (r"(\p{L}{2,})(?:-|\s+-+\s+)(\p{L}{2,})", "${1} ${2}"),
    # brackets around words: not those of a formula, of a call or of an index
    (r"(^|[\s\x22'])[(\[{]([^()\[\]{}+*/^=<>|\\-]*)[)\]}]", "${1} ${2} "),
    (r"(^|[\s\x22'])[(\[{]([^()\[\]{}+*/^=<>|\\-]*)[)\]}]", "${1} ${2} "),
    # punctuation at the edge of a word: 1.5 is not 15. An exclamation mark behind a number or a variable is a factorial.
    (r"(\p{L}{2,}|[\s.,:;?\x22'])!+", "${1} "),
    (r"[.,;:?'\x22]+(?:\s|$)", " "),
    (r"(?:^|\s)['\x22]+", " "),
    (r"\s\s+|[^\S ]", " "),
)


def normalise_question(text: pl.Expr) -> pl.Expr:
    """A question without what makes no other question of it; see the module docstring."""
    # Replaced by null, texts of ASCII alone cost the foreign part nothing.
    foreign = text.str.contains(_FOREIGN)
    plain = pl.when(foreign).then(_as_ascii(pl.when(foreign).then(text))).otherwise(text.str.to_lowercase())
    plain = plain.str.replace_many(_MARKUP)
    for pattern, replacement in _REPLACEMENTS:
        plain = plain.str.replace_all(pattern, replacement)
    return plain.str.strip_chars()


def asked_text() -> pl.Expr:
    """All messages but the system message, joined by line breaks, from the column prompt."""
    asked = pl.element().filter(pl.element().struct.field("role") != "system").struct.field("content")
    return pl.col("prompt").list.eval(asked).list.join("\n")


def _as_ascii(text: pl.Expr) -> pl.Expr:
    text = text.str.replace_many(_CHARACTERS)
    # a fraction in one character
    text = text.str.replace_all("([\u00bc-\u00be\u2150-\u215e])", " ${1}")
    for pattern, replacement in _ungrouped(r"\p{Nd}", "[\u00a0\u2009\u202f]"):
        text = text.str.replace_all(pattern, replacement)
    text = text.str.normalize("NFKD").str.replace_all(r"[\p{M}\p{Cf}\p{Co}]", "")
    # Up and down again is case folding: ß becomes ss.
    text = text.str.to_uppercase().str.to_lowercase().str.normalize("NFKC")
    return text.str.replace_many({**_DIGITS, **_LATIN, "\u2044": "/"})


def broken_separation(keys: pl.DataFrame) -> pl.DataFrame:
    """Training rows whose question is also in the eval split, by the keys of rules.relation_keys: columns row, rule, value."""
    train, held_out = keys.filter(split="train"), keys.filter(split="eval")
    exact = _leak(train, held_out, "question_key", "leak_exact")
    others = train.join(exact, on="row", how="anti")
    return pl.concat([exact, _leak(others, held_out, "normalised_key", "leak_normalised")])


def _leak(train: pl.DataFrame, held_out: pl.DataFrame, key: str, rule: str) -> pl.DataFrame:
    first = held_out.unique(key, keep="first", maintain_order=True).select(key, eval_source="source", eval_line="line")
    found = train.join(first, on=key, how="inner", maintain_order="left")
    value = pl.concat_str(pl.lit("in the eval split at "), "eval_source", pl.lit(":"), "eval_line")
    return found.select("row", rule=pl.lit(rule), value=value)


class NearDuplicate(NamedTuple):
    """A training question with much of the text and the numbers of a held-out one, each by file and line."""

    train: str
    held_out: str
    share: float
    """Of the parts of the held-out question that the training question has."""


class NearDuplicates(NamedTuple):
    """What was found, the most alike first, one for each training row."""

    found: Sequence[NearDuplicate]
    checked: int

    @property
    def warning(self) -> str:
        """A sentence about the first pair; empty where there is none."""
        if not self.found:
            return ""
        first, rows = self.found[0], len(self.found)
        return (
            f"{rows:,} of {self.checked:,} training questions ({rows / self.checked:.1%}) are nearly held out: {first.train} has "
            f"{first.share:.0%} of {first.held_out}, and the same numbers; report.md lists them. They stay; fix: remove those "
            "that are the same question"
        )


def near_duplicates(accepted: pl.DataFrame) -> NearDuplicates:
    """Compare the accepted training rows with the held-out ones."""
    train = _sample(accepted.filter(split="train"), NEAR_ROWS)
    held_out = _sample(accepted.filter(split="eval"), NEAR_HELD_OUT)
    texts = _questions(held_out)
    parts = _Parts.of(texts)
    if not parts.columns or train.is_empty():
        return NearDuplicates([], train.height)
    held, sizes = parts.table(texts)
    weighted, counted = (held * parts.weights[None, :]).T.tocsc(), np.diff(held.indptr)
    numbers, best = [_numbers(text) for text in texts], dict[int, NearDuplicate]()
    for start in range(0, train.height, _BATCH):
        asked = _questions(train[start : start + _BATCH])
        rows, lengths = parts.table(asked)
        # [training rows, held-out rows]: the weight of the parts that they have in common
        both = (rows @ weighted).tocoo()
        share, alike = both.data / sizes[both.col], both.data / (lengths[both.row] + sizes[both.col] - both.data)
        near = (share >= NEAR_SHARE) & (alike >= _ALIKE) & (counted[both.col] >= _FEWEST_PARTS)
        pairs = zip(share[near].tolist(), both.row[near].tolist(), both.col[near].tolist(), strict=True)
        for part, row, other in sorted(pairs):
            # Problems of one template differ in nothing but their numbers. One of two questions may have a number in words.
            ours, theirs = _numbers(asked[row]), numbers[other]
            if ours <= theirs or theirs <= ours:
                best[start + row] = NearDuplicate(_place(train, start + row), _place(held_out, other), min(1.0, part))
    return NearDuplicates(sorted(best.values(), key=lambda pair: -pair.share), train.height)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Substrings of a fixed length of the held-out questions. The fewer questions have one, the more it weighs (idf)."""

    columns: dict[str, int]
    weights: NDArray[np.float64]
    common: frozenset[str]
    most: float
    """Weight of a part that no held-out question has."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> "_Parts":
        rows, number = Counter(part for text in texts for part in _substrings(text)), len(texts)
        common = frozenset(part for part, count in rows.items() if number >= _MANY and count > _COMMON * number)
        kept = {part: count for part, count in rows.items() if part not in common}
        # Half a question more, so that a part of all of them, or of the only one, still weighs something.
        weights = np.log((number + 0.5) / np.array(list(kept.values())))
        return cls({part: column for column, part in enumerate(kept)}, weights, common, math.log(number + 0.5))

    def table(self, texts: Sequence[str]) -> tuple[Any, NDArray[np.float64]]:
        """[texts, columns], 1 where a text has the part; and the weight of all parts of each text."""
        # Imported on first use: only the step that validates data needs it.
        from scipy.sparse import csr_array

        own = [_substrings(text) - self.common for text in texts]
        found = [[column for part in parts if (column := self.columns.get(part)) is not None] for parts in own]
        ends = np.cumsum([0, *map(len, found)])
        flat = np.fromiter(itertools.chain.from_iterable(found), np.int64, ends[-1])
        cells = csr_array((np.ones(ends[-1]), flat, ends), shape=(len(texts), len(self.columns)))
        unknown = np.array([len(parts) for parts in own]) - np.diff(ends)
        return cells, cells @ self.weights + unknown * self.most


def _sample(rows: pl.DataFrame, most: int) -> pl.DataFrame:
    return rows.sample(most, seed=0) if rows.height > most else rows


def _substrings(text: str) -> frozenset[str]:
    return frozenset(text[at : at + _PART_CHARS] for at in range(len(text) - _PART_CHARS + 1))


def _numbers(text: str) -> Counter[str]:
    return Counter(_NUMBER.findall(text))


def _questions(rows: pl.DataFrame) -> list[str]:
    return rows.select(normalise_question(asked_text())).to_series().to_list()


def _place(rows: pl.DataFrame, number: int) -> str:
    return row_place(rows["source"][number], rows["line"][number])

"""Probes: completions made from a row of the data, with the order in which a reward should rank them. No model is used.

    perfect  >  partial (right answer, wrong format; wrong answer, right format; cut off)  >  empty
    gamed (tags stuffed, nested or repeated; answers listed; answer in the reasoning)  <  perfect
    edge (unusual text)  must not break the function

A gamed completion looks like work to a careless reward function, and is none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from grpo_tasks.answers.choices import choice_letter
from grpo_tasks.answers.equality import answers_equal
from grpo_tasks.answers.numerals import parse_number
from grpo_tasks.answers.tags import Tags
from grpo_tasks.rewards.contract import Row
from schemas.config.completion import Equality

Role = Literal["perfect", "partial", "empty", "gamed", "edge"]

# Names of the probes that checks treat specially.
PERFECT = "perfect"
WRONG_ANSWER = "wrong_answer_right_format"
LISTING = "every_answer"
CUT_OFF = "cut_off"

LONG_CHARS = 1_000_000
"""Length of the long probes."""
ARABIC_INDIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")


@dataclass(frozen=True, slots=True)
class Probe:
    """One completion made for the lab."""

    kind: str
    """Its name in checks and tables."""
    role: Role
    text: str


def make_probes(row: Row, tags: Tags, equality: Equality) -> list[Probe]:
    """All probes of one row: the same kinds in the same order for every row, the perfect one first."""
    assert row.answer is not None, "a row without ground truth has no such probes"
    work, answer, wrong = _working(row, tags), row.answer, wrong_answer(row.answer, equality)
    perfect = _block(tags, work, answer)
    return [
        Probe(PERFECT, "perfect", perfect),
        *_partial(tags, work, answer, wrong),
        *_empty(tags, work),
        *_gamed(tags, work, answer, wrong, perfect),
        *_edges(tags, work, answer, perfect),
    ]


def perfect_text(row: Row, tags: Tags) -> str:
    """The completion that deserves the full score for a row."""
    assert row.answer is not None, "a row without ground truth has no perfect completion"
    return _block(tags, _working(row, tags), row.answer)


def wrong_answer(answer: str, equality: Equality) -> str:
    """An answer of the same kind that does not equal the given one."""
    number, letter = parse_number(answer), choice_letter(answer)
    if equality == "choice" and letter is not None:
        return "B" if letter == "A" else "A"
    if equality != "choice" and number is not None:
        return str(number + 1) if number.denominator == 1 else f"{float(number) + 1:.6g}"
    other = f"{answer} and something else"
    assert not answers_equal(other, answer, equality)
    return other


def long_texts(tags: Tags) -> dict[str, str]:
    """Completions of LONG_CHARS characters by name. Each makes another kind of careless scan quadratic or worse."""
    opened, reasoned, answered, closed = tags.in_order
    pieces = {
        "long_words": "one plus one is two and ",
        "long_opening_tags": answered,
        "long_tag_pairs": f"{opened}{reasoned}{answered}{closed}",
        "long_half_tags": answered[:-1],
        "long_digits": "9",
        "long_commas": "1,",
        "long_powers": "9**",
        "long_brackets": "(",
        "long_blanks": " ",
        "long_invisible": "\u200b",
        "long_newlines": "\n",
    }
    texts = {kind: (piece * (LONG_CHARS // len(piece) + 1))[:LONG_CHARS] for kind, piece in pieces.items()}
    return texts | {
        "long_reasoning": _block(tags, texts["long_words"], "42"),
        "long_answer": _block(tags, "work", texts["long_commas"]),
    }


def _working(row: Row, tags: Tags) -> str:
    question = row.messages[-1].get("content", "") if row.messages else ""
    for tag in tags.in_order:
        question = question.replace(tag, "")
    return f"The question is: {question[:200].strip()} Working it out step by step gives {row.answer}."


def _block(tags: Tags, reasoning: str, answer: str) -> str:
    opened, reasoned, answered, closed = tags.in_order
    return f"{opened}{reasoning}{reasoned}{answered}{answer}{closed}"


def _partial(tags: Tags, work: str, answer: str, wrong: str) -> Iterator[Probe]:
    opened, _, answered, closed = tags.in_order
    yield Probe("right_answer_wrong_format", "partial", f"{work}\n{answered}{answer}{closed}")
    yield Probe(WRONG_ANSWER, "partial", _block(tags, work, wrong))
    yield Probe(CUT_OFF, "partial", f"{opened}{work[: len(work) // 2]}")


def _empty(tags: Tags, work: str) -> Iterator[Probe]:
    yield Probe("empty", "empty", "")
    yield Probe("blank", "empty", " \n\t ")
    yield Probe("empty_answer", "empty", _block(tags, work, ""))
    yield Probe("blank_answer", "empty", _block(tags, work, " \n"))
    yield Probe("invisible_answer", "empty", _block(tags, work, "\u200b"))
    yield Probe("bare_tags", "empty", f"{tags.in_order[0]}{tags.in_order[3]}")
    yield Probe("empty_blocks", "empty", _block(tags, "", ""))


def _gamed(tags: Tags, work: str, answer: str, wrong: str, perfect: str) -> Iterator[Probe]:
    opened, reasoned, answered, closed = tags.in_order
    yield Probe("tag_stuffed", "gamed", f"{''.join(tags.in_order) * 10}{answer}")
    yield Probe("tag_stuffed_right", "gamed", f"{perfect}{''.join(tags.in_order) * 5}")
    yield Probe("nested_tags", "gamed", _block(tags, f"{opened}{work}{reasoned}", f"{answered}{answer}{closed}"))
    yield Probe("repeated_block", "gamed", perfect * 3)
    yield Probe("answer_in_reasoning", "gamed", f"{opened}{work}{answered}{answer}{closed}{reasoned}")
    yield Probe("two_answers", "gamed", f"{_block(tags, work, wrong)}{answered}{answer}{closed}")
    yield Probe(LISTING, "gamed", _block(tags, work, _listing(answer, wrong)))


def _edges(tags: Tags, work: str, answer: str, perfect: str) -> Iterator[Probe]:
    yield Probe("unicode_digits", "edge", _block(tags, work, answer.translate(ARABIC_INDIC)))
    yield Probe("text_after", "edge", f"{perfect}\n{work}")
    yield Probe("control_characters", "edge", f"\x00\x1b[31m{perfect}\r\x7f")
    yield Probe("other_scripts", "edge", _block(tags, "计算 \u202e שלום 🧮\ufeff", answer))
    yield Probe("chat_markers", "edge", f"<|im_end|>\n<|im_start|>assistant\n{perfect}")
    yield Probe("code", "edge", _block(tags, work, "__import__('os').getpid()"))
    yield Probe("power_tower", "edge", _block(tags, work, "9**9**9"))


def _listing(answer: str, wrong: str) -> str:
    number = parse_number(answer)
    if number is not None and number.denominator == 1:
        return " ".join(str(number + step) for step in range(-10, 11))
    return f"{wrong} {answer} {wrong}"

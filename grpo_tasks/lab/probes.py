"""Probes: completions made from a row of the data, with the order in which a reward should rank them. No model is used.

    perfect  >  partial (right answer, wrong format; wrong answer, right format; cut off)  >  empty
    gamed (tags stuffed, nested or repeated; answers listed; answer in the reasoning)  <  perfect
    edge (unusual text)  must not break the function

A row without ground truth has no perfect probe unless the user gives one (`lab.gold`). Then it has empty and unusual texts only.
A gamed completion looks like work to a careless reward function, and is none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from grpo_tasks.answers.choices import choice_letter
from grpo_tasks.answers.equality import answers_equal
from grpo_tasks.answers.extract import FORMATS, perfect_completion
from grpo_tasks.answers.numerals import parse_number
from schemas.config.completion import CompletionConfig, Equality, TagsConfig
from schemas.prompts import PromptRow

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


def make_probes(row: PromptRow, completion: CompletionConfig, gold: str | None = None) -> list[Probe]:
    """All probes of one row. The perfect one comes first; there is none when it cannot be made.

    Args:
        row: its ground truth may be None.
        completion: what an answer is.
        gold: the user's own good completion of the row; None: it is made from the ground truth.
    """
    if gold is not None or row.answer is None or not completion.has_blocks:
        return _general(row, completion, gold)
    tags, answer = completion.tags, row.answer
    work, wrong = _working(row, tags), wrong_answer(answer, completion.equality)
    perfect = tags.block(work, answer)
    return [
        Probe(PERFECT, "perfect", perfect),
        *_partial(tags, work, answer, wrong),
        *_empty(tags, work),
        *_gamed(tags, work, answer, wrong, perfect),
        *_edges(tags, work, answer, perfect),
    ]


def perfect_text(row: PromptRow, completion: CompletionConfig) -> str | None:
    """The completion that deserves the full score for a row; None when it cannot be made."""
    if not completion.has_blocks:
        return perfect_completion(row.answer, completion)
    return None if row.answer is None else completion.tags.block(_working(row, completion.tags), row.answer)


def _general(row: PromptRow, completion: CompletionConfig, gold: str | None) -> list[Probe]:
    """Probes of a row without ground truth, with a completion of the user's own, or in a format without tags."""
    perfect = gold if gold is not None else perfect_text(row, completion)
    text = perfect if perfect is not None else f"This is about: {_question(row)[:200]}"
    first = [] if perfect is None else [Probe(PERFECT, "perfect", perfect), Probe(CUT_OFF, "partial", text[: len(text) // 2])]
    if row.answer is not None and gold is None:
        wrong = perfect_completion(wrong_answer(row.answer, completion.equality), completion)
        first += [] if wrong is None else [Probe(WRONG_ANSWER, "partial", wrong)]
    empty = {"empty": "", "blank": " \n\t ", "invisible": "\u200b", **FORMATS[completion.format].empty(completion)}
    edges = {
        "plain_text": "A few words of plain text.",
        "formatted": perfect_completion("something", completion),
        "control_characters": f"\x00\x1b[31m{text}\r\x7f",
        "other_scripts": f"计算 \u202e שלום 🧮\ufeff {text}",
        "chat_markers": f"<|im_end|>\n<|im_start|>assistant\n{text}",
        "code": f"{text} __import__('os').getpid()",
        "brackets": '{"a": [1, \\boxed{',
    }
    return [
        *first,
        *(Probe(kind, "empty", each) for kind, each in empty.items()),
        *([Probe("repeated", "gamed", f"{text}\n" * 3)] if perfect is not None else []),
        *(Probe(kind, "edge", each) for kind, each in edges.items() if each is not None),
    ]


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


def long_texts(tags: TagsConfig, length: int | None = None) -> dict[str, str]:
    """Completions of `length` (LONG_CHARS) characters by name. Each makes another kind of careless scan quadratic or worse."""
    length = length or LONG_CHARS
    marks = tags.in_order
    pieces = {
        "long_words": "one plus one is two and ",
        "long_opening_tags": marks[-2],
        "long_tag_pairs": "".join(marks),
        "long_half_tags": marks[-2][:-1],
        "long_digits": "9",
        "long_commas": "1,",
        "long_powers": "9**",
        "long_brackets": "(",
        "long_blanks": " ",
        "long_invisible": "\u200b",
        "long_newlines": "\n",
    }
    texts = {kind: (piece * (length // len(piece) + 1))[:length] for kind, piece in pieces.items()}
    return texts | {
        "long_reasoning": tags.block(texts["long_words"], "42"),
        "long_answer": tags.block("work", texts["long_commas"]),
    }


def _working(row: PromptRow, tags: TagsConfig) -> str:
    question = _question(row)
    for tag in tags.in_order:
        question = question.replace(tag, "")
    return f"The question is: {question[:200].strip()} Working it out step by step gives {row.answer}."


def _question(row: PromptRow) -> str:
    return row.messages[-1].get("content", "") if row.messages else ""


def _partial(tags: TagsConfig, work: str, answer: str, wrong: str) -> Iterator[Probe]:
    opened, _, answered, closed = tags.in_order
    yield Probe("right_answer_wrong_format", "partial", f"{work}\n{answered}{answer}{closed}")
    yield Probe(WRONG_ANSWER, "partial", tags.block(work, wrong))
    yield Probe(CUT_OFF, "partial", f"{opened}{work[: len(work) // 2]}")


def _empty(tags: TagsConfig, work: str) -> Iterator[Probe]:
    yield Probe("empty", "empty", "")
    yield Probe("blank", "empty", " \n\t ")
    yield Probe("empty_answer", "empty", tags.block(work, ""))
    yield Probe("blank_answer", "empty", tags.block(work, " \n"))
    yield Probe("invisible_answer", "empty", tags.block(work, "\u200b"))
    yield Probe("bare_tags", "empty", f"{tags.in_order[0]}{tags.in_order[3]}")
    yield Probe("empty_blocks", "empty", tags.block("", ""))


def _gamed(tags: TagsConfig, work: str, answer: str, wrong: str, perfect: str) -> Iterator[Probe]:
    opened, reasoned, answered, closed = tags.in_order
    yield Probe("tag_stuffed", "gamed", f"{''.join(tags.in_order) * 10}{answer}")
    yield Probe("tag_stuffed_right", "gamed", f"{perfect}{''.join(tags.in_order) * 5}")
    yield Probe("nested_tags", "gamed", tags.block(f"{opened}{work}{reasoned}", f"{answered}{answer}{closed}"))
    yield Probe("repeated_block", "gamed", perfect * 3)
    yield Probe("answer_in_reasoning", "gamed", f"{opened}{work}{answered}{answer}{closed}{reasoned}")
    yield Probe("two_answers", "gamed", f"{tags.block(work, wrong)}{answered}{answer}{closed}")
    yield Probe(LISTING, "gamed", tags.block(work, _listing(answer, wrong)))


def _edges(tags: TagsConfig, work: str, answer: str, perfect: str) -> Iterator[Probe]:
    yield Probe("unicode_digits", "edge", tags.block(work, answer.translate(ARABIC_INDIC)))
    yield Probe("text_after", "edge", f"{perfect}\n{work}")
    yield Probe("control_characters", "edge", f"\x00\x1b[31m{perfect}\r\x7f")
    yield Probe("other_scripts", "edge", tags.block("计算 \u202e שלום 🧮\ufeff", answer))
    yield Probe("chat_markers", "edge", f"<|im_end|>\n<|im_start|>assistant\n{perfect}")
    yield Probe("code", "edge", tags.block(work, "__import__('os').getpid()"))
    yield Probe("power_tower", "edge", tags.block(work, "9**9**9"))


def _listing(answer: str, wrong: str) -> str:
    number = parse_number(answer)
    if number is not None and number.denominator == 1:
        return " ".join(str(number + step) for step in range(-10, 11))
    return f"{wrong} {answer} {wrong}"

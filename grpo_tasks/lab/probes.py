"""Probes: completions made from a row of the data, with the order in which a reward should rank them. No model is used.

    perfect  >  partial (right answer, wrong format; wrong answer, right format; cut off)  >  empty
    gamed (tags stuffed, nested or repeated; answers listed; answer in the reasoning)  <  perfect
    edge (unusual text)  must not break the function

A row without ground truth has no perfect probe unless the user gives one (`lab.gold`). Then it has empty and unusual texts only.
A gamed completion looks like work to a careless reward function, and is none.
"""

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
    """All probes of one row. The perfect one comes first: the user's own (`gold`), or one that is made from the ground truth.

    There is none when it cannot be made.
    """
    if gold is not None or row.answer is None or not completion.has_blocks:
        made = _any_format(row, completion, gold)
    else:
        made = _blocks(row, row.answer, completion)
    return [Probe(kind, role, text) for role, texts in made.items() for kind, text in texts.items() if text is not None]


def perfect_text(row: PromptRow, completion: CompletionConfig) -> str | None:
    """The completion that deserves the full score for a row; None when it cannot be made."""
    if not completion.has_blocks:
        return perfect_completion(row.answer, completion)
    return None if row.answer is None else completion.tags.block(_working(row, completion.tags), row.answer)


def _any_format(row: PromptRow, completion: CompletionConfig, gold: str | None) -> dict[Role, dict[str, str | None]]:
    """Probes of a row without ground truth, with a completion of the user's own, or in a format without both blocks."""
    perfect, wrong = gold if gold is not None else perfect_text(row, completion), None
    text = perfect if perfect is not None else f"This is about: {_question(row)[:200]}"
    if row.answer is not None and gold is None:
        wrong = perfect_completion(wrong_answer(row.answer, completion.equality), completion)
    return {
        "perfect": {PERFECT: perfect},
        "partial": {CUT_OFF: None if perfect is None else text[: len(text) // 2], WRONG_ANSWER: wrong},
        "empty": {"empty": "", "blank": " \n\t ", "invisible": "\u200b", **FORMATS[completion.format].empty(completion)},
        "gamed": {"repeated": None if perfect is None else f"{text}\n" * 3},
        "edge": {
            "plain_text": "A few words of plain text.",
            "formatted": perfect_completion("something", completion),
            "control_characters": f"\x00\x1b[31m{text}\r\x7f",
            "other_scripts": f"计算 \u202e שלום 🧮\ufeff {text}",
            "chat_markers": f"<|im_end|>\n<|im_start|>assistant\n{text}",
            "code": f"{text} __import__('os').getpid()",
            "brackets": '{"a": [1, \\boxed{',
        },
    }


def _blocks(row: PromptRow, answer: str, completion: CompletionConfig) -> dict[Role, dict[str, str | None]]:
    """Probes in the format with a reasoning and an answer block."""
    tags, work, wrong = completion.tags, _working(row, completion.tags), wrong_answer(answer, completion.equality)
    perfect, every_tag = tags.block(work, answer), "".join(tags.in_order)
    opened, reasoned, answered, closed = tags.in_order
    number = parse_number(answer)
    listing = f"{wrong} {answer} {wrong}"
    if number is not None and number.denominator == 1:
        listing = " ".join(str(number + step) for step in range(-10, 11))
    return {
        "perfect": {PERFECT: perfect},
        "partial": {
            "right_answer_wrong_format": f"{work}\n{answered}{answer}{closed}",
            WRONG_ANSWER: tags.block(work, wrong),
            CUT_OFF: f"{opened}{work[: len(work) // 2]}",
        },
        "empty": {
            "empty": "",
            "blank": " \n\t ",
            "empty_answer": tags.block(work, ""),
            "blank_answer": tags.block(work, " \n"),
            "invisible_answer": tags.block(work, "\u200b"),
            "bare_tags": f"{opened}{closed}",
            "empty_blocks": tags.block("", ""),
        },
        "gamed": {
            "tag_stuffed": f"{every_tag * 10}{answer}",
            "tag_stuffed_right": f"{perfect}{every_tag * 5}",
            "nested_tags": tags.block(f"{opened}{work}{reasoned}", f"{answered}{answer}{closed}"),
            "repeated_block": perfect * 3,
            "answer_in_reasoning": f"{opened}{work}{answered}{answer}{closed}{reasoned}",
            "two_answers": f"{tags.block(work, wrong)}{answered}{answer}{closed}",
            LISTING: tags.block(work, listing),
        },
        "edge": {
            "unicode_digits": tags.block(work, answer.translate(ARABIC_INDIC)),
            "text_after": f"{perfect}\n{work}",
            "control_characters": f"\x00\x1b[31m{perfect}\r\x7f",
            "other_scripts": tags.block("计算 \u202e שלום 🧮\ufeff", answer),
            "chat_markers": f"<|im_end|>\n<|im_start|>assistant\n{perfect}",
            "code": tags.block(work, "__import__('os').getpid()"),
            "power_tower": tags.block(work, "9**9**9"),
        },
    }


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

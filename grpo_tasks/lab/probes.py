"""Probes: completions made from a row of the data, with the order in which a reward should rank them. No model is used.

    perfect  >  partial (right answer, wrong format; wrong answer, right format; cut off)  >  empty
    gamed (tags stuffed, nested or repeated; answers listed; copied; answer in the reasoning)  <  perfect
    edge (unusual text)  must not break the function

A row without ground truth has no perfect probe unless the user gives one (`lab.gold`). Then it has empty and unusual texts only.
A gamed completion looks like work to a careless reward function, and is none.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_tasks.answers.equality import answers_equal, choice_letter
from grpo_tasks.answers.extract import FORMATS, perfect_completion
from grpo_tasks.answers.numerals import parse_number
from grpo_tasks.content.conversations import Played, played_of
from grpo_tasks.content.places import row_place
from grpo_tasks.data.records import chat_message
from grpo_tasks.rewards.contract import ScoreBatch, batch_of, shorten
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.completion import CompletionConfig, Equality, TagsConfig
from schemas.config.rewards import LabConfig, RewardsConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.prompts import PromptRow
from schemas.results.data import LabCheck

Role = Literal["perfect", "partial", "empty", "gamed", "edge"]

# Names of the probes that checks treat specially.
PERFECT = "perfect"
WRONG_ANSWER = "wrong_answer_right_format"
LISTING = "every_answer"
COPIED = "copied_from_the_question"
REPEATED = "repeated"
CUT_OFF = "cut_off"
BOXED = "boxed"

MOST_NUMBERS = 50
"""Numbers of a question that are compared with its ground truth."""
ARABIC_INDIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")


@dataclass(frozen=True, slots=True)
class Probe:
    """One completion made for the lab."""

    kind: str
    role: Role
    text: str


def make_probes(
    row: PromptRow, completion: CompletionConfig, gold: str | None = None, *, form_suffices: bool = True
) -> list[Probe]:
    """All probes of one row; the perfect one first, where there is one: the user's own (`gold`), or made from the truth.

    `form_suffices`: without a truth, any completion in the format is perfect, as far as there is one.
    """
    if gold is not None or row.answer is None or not completion.has_blocks:
        perfect = gold if gold is not None or (row.answer is None and not form_suffices) else perfect_text(row, completion)
        made = _any_format(row, completion, perfect, own=gold is not None)
    else:
        made = _blocks(row, row.answer, completion)
    return [Probe(kind, role, text) for role, texts in made.items() for kind, text in texts.items() if text is not None]


def perfect_text(row: PromptRow, completion: CompletionConfig) -> str | None:
    """The completion that deserves the full score for a row; None when it cannot be made."""
    if not completion.has_blocks:
        return perfect_completion(row.answer, completion)
    return None if row.answer is None else completion.tags.block(_working(row, completion.tags), row.answer)


def _any_format(
    row: PromptRow, completion: CompletionConfig, perfect: str | None, *, own: bool
) -> dict[Role, dict[str, str | None]]:
    """Probes of a row without ground truth, with a perfect completion of the user's `own`, or in a format without both blocks."""
    wrong, copied = None, _copied(row, completion.equality)
    text = perfect if perfect is not None else f"This is about: {_question(row)[:200]}"
    if row.answer is not None and not own:
        wrong = perfect_completion(wrong_answer(row.answer, completion.equality), completion)
    return {
        "perfect": {PERFECT: perfect},
        "partial": {CUT_OFF: None if perfect is None else text[: len(text) // 2], WRONG_ANSWER: wrong},
        "empty": {"empty": "", "blank": " \n\t ", "invisible": "\u200b", **FORMATS[completion.format].empty(completion)},
        "gamed": {
            REPEATED: None if perfect is None else f"{text}\n" * 3,
            COPIED: None if own or copied is None else perfect_completion(copied, completion),
        },
        "edge": {
            "plain_text": "A few words of plain text.",
            "formatted": perfect_completion("something", completion),
            "control_characters": f"\x00\x1b[31m{text}\r\x7f",
            "other_scripts": f"计算 \u202e שלום 🧮\ufeff {text}",
            "chat_markers": f"<|im_end|>\n<|im_start|>assistant\n{text}",
            BOXED: None if row.answer is None or completion.format == "boxed" else f"{text} {_boxed(row.answer)}",
            "code": f"{text} __import__('os').getpid()",
            "brackets": '{"a": [1, \\boxed{',
        },
    }


def _blocks(row: PromptRow, answer: str, completion: CompletionConfig) -> dict[Role, dict[str, str | None]]:
    """Probes in the format with a reasoning and an answer block."""
    tags, work, wrong = completion.tags, _working(row, completion.tags), wrong_answer(answer, completion.equality)
    perfect, every_tag, copied = tags.block(work, answer), "".join(tags.in_order), _copied(row, completion.equality)
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
            COPIED: None if copied is None else tags.block(work, copied),
        },
        "edge": {
            "unicode_digits": tags.block(work, answer.translate(ARABIC_INDIC)),
            "text_after": f"{perfect}\n{work}",
            "control_characters": f"\x00\x1b[31m{perfect}\r\x7f",
            "other_scripts": tags.block("计算 \u202e שלום 🧮\ufeff", answer),
            "chat_markers": f"<|im_end|>\n<|im_start|>assistant\n{perfect}",
            BOXED: f"{work} {_boxed(answer)}",
            "code": tags.block(work, "__import__('os').getpid()"),
            "power_tower": tags.block(work, "9**9**9"),
        },
    }


def wrong_answer(answer: str, equality: Equality) -> str:
    """An answer of the same kind that does not equal the given one."""
    number, letter = parse_number(answer), choice_letter(answer)
    with suppress(ValueError):
        if isinstance(value := json.loads(answer), dict) and value:
            key = next(iter(value))
            return json.dumps(value | {key: f"{value[key]} and something else"}, ensure_ascii=False)
    if equality == "choice" and letter is not None:
        return "B" if letter == "A" else "A"
    if equality != "choice" and number is not None:
        return str(number + 1) if number.denominator == 1 else f"{float(number) + 1:.6g}"
    other = f"{answer} and something else"
    assert not answers_equal(other, answer, equality)
    return other


def long_texts(tags: TagsConfig, length: int) -> dict[str, str]:
    """Completions of `length` characters by name. Each makes another kind of careless scan quadratic or worse."""
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


def _copied(row: PromptRow, equality: Equality) -> str | None:
    """A number of the question that equals a ground truth which is an expression, as in `make 24 from 4, 6, 1`: the task is to
    find the expression, and the built-in `correctness` compares values."""
    if equality != "math" or row.answer is None or parse_number(row.answer) is not None:
        return None
    numbers = re.findall(r"\d+", _question(row))[:MOST_NUMBERS]
    return next((number for number in numbers if answers_equal(number, row.answer, equality)), None)


def _boxed(answer: str) -> str:
    return f"$\\boxed{{{answer}}}$"


def _question(row: PromptRow) -> str:
    return row.messages[-1].get("content", "") if row.messages else ""


BYTES_PER_TOKEN = 4
"""Probes are not tokenised. One stand-in token id for this many bytes gives functions that count tokens a plausible length."""
SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class GroupSample:
    """A group of completions that the base model sampled for one training prompt."""

    prompt_id: str
    completions: list[str]
    completion_ids: list[list[int]]
    conversations: list[str] = field(default_factory=list)
    """The column `conversation` of the samples, where tools or an environment answered."""


@dataclass(frozen=True, slots=True)
class ProbeSet:
    """The completions that functions are tried on."""

    completion: CompletionConfig
    rewards: RewardsConfig
    limits: LabConfig
    rows: Sequence[PromptRow]
    chosen: Sequence[PromptRow]
    """The rows that probes are made from."""
    probes: Sequence[Probe]
    """Those of all chosen rows, row by row."""
    groups: Sequence[range]
    batch: ScoreBatch
    base: ScoreBatch | None
    """The samples of the base model, group by group; None without samples."""
    base_rows: Sequence[PromptRow]
    base_sizes: Sequence[int]

    @property
    def played(self) -> bool:
        """Whether tools or an environment answer."""
        return self.base is not None and bool(self.base.played)

    @property
    def sizes(self) -> list[int]:
        """Number of probes of each chosen row."""
        return [len(group) for group in self.groups]

    def row(self, index: int) -> PromptRow:
        """The row of the probe with this index."""
        return next(row for row, group in zip(self.chosen, self.groups, strict=True) if index in group)

    def perfect(self, group: range) -> int | None:
        """Index of the perfect probe of a row; None when the row has none."""
        return group[0] if self.probes[group[0]].kind == PERFECT else None

    @property
    def num_perfect(self) -> int:
        """Number of chosen rows with a perfect probe."""
        return sum(self.perfect(group) is not None for group in self.groups)

    def finding(self, function: str, check: str, detail: str, index: int, *, warn: bool = False) -> LabCheck:
        """A check that found something in the probe with this index."""
        probe = self.probes[index]
        return finding(function, check, detail, self.row(index), probe=probe.kind, text=probe.text, warn=warn)


def passed(function: str, check: str, detail: str = "") -> LabCheck:
    """A check of a function, or of `stage:NAME`, without a finding."""
    return LabCheck(function=function, check=check, outcome="passed", detail=detail)


def finding(
    function: str, check: str, detail: str, row: PromptRow, *, probe: str = "", text: str = "", warn: bool = False
) -> LabCheck:
    """A check that found something, with the row and the completion as an example. It fails unless `warn` is set."""
    return LabCheck(
        function=function,
        check=check,
        outcome="warned" if warn else "failed",
        detail=detail,
        prompt_id=row.prompt_id,
        place=row_place(row.source, row.line),
        probe=probe,
        completion=shorten(text, SHOWN_CHARS),
    )


def choose_rows(rows: Sequence[PromptRow], num: int) -> list[PromptRow]:
    """The rows that probes are made from, by prompt_id. It is a hash, so the order of the rows does not matter."""
    assert rows, "no rows to make probes from"
    return sorted(rows, key=lambda row: row.prompt_id)[:num]


def own_golds(gold: str | None, chosen: Sequence[PromptRow], worker: RewardWorker) -> list[str | None]:
    """The user's own good completion of each row (`lab.gold`); ConfigError, RewardError: there is no such column or function."""
    if gold is None:
        return [None] * len(chosen)
    if ":" in gold:
        made = []
        for row in chosen:
            prompt = row.messages[0]["content"] if row.plain else [dict(message) for message in row.messages]
            made.append({**row.extra, "prompt": prompt, "answer": row.given_answer})
        return worker.gold_completions(gold, made)
    values = [row.extra.get(gold) for row in chosen]
    if all(value is None for value in values):
        columns = sorted({name for row in chosen for name in row.extra})
        raise ConfigError(
            f"the data have no column {gold}",
            place="lab.gold",
            fix=f"one of {', '.join(columns) or 'none: there are no further columns'}, or package.module:function",
        )
    # Texts, or chat messages of which the last one counts.
    last = [chat_message(value[-1] if isinstance(value, list) and value else value) for value in values]
    texts = [one.get("content") if isinstance(one, Mapping) else one for one in last]
    return [None if text is None else str(text) for text in texts]


def make_probe_set(
    config: RunConfig,
    rows: Sequence[PromptRow],
    chosen: Sequence[PromptRow],
    golds: Sequence[str | None],
    base_samples: Sequence[GroupSample] | None,
) -> ProbeSet:
    """Make the probes of the chosen rows, of which `golds` are the user's own good completions."""
    used = [resolved for stage in config.stages for name in stage.rewards if (resolved := config.rewards.resolve(name))]
    # What a user's function or a judge wants of a row without ground truth is not known.
    built_in = not any(one.judge is not None or ":" in (one.function or "") for one in used)
    made = [make_probes(row, config.completion, gold, form_suffices=built_in) for row, gold in zip(chosen, golds, strict=True)]
    probes = [probe for group in made for probe in group]
    starts = [sum(map(len, made[:number])) for number in range(len(made))]
    rows_of_probes = [row for row, group in zip(chosen, made, strict=True) for _ in group]
    samples, base = base_samples or [], None
    by_id = {row.prompt_id: row for row in rows}
    base_rows = [by_id[sample.prompt_id] for sample in samples for _ in sample.completions]
    if samples:
        base = batch_of(
            base_rows,
            [text for sample in samples for text in sample.completions],
            [ids for sample in samples for ids in sample.completion_ids],
            prompt_ids=[_prompt_stand_in(row) for row in base_rows],
            played=[played_of(text) for sample in samples for text in sample.conversations],
        )
    return ProbeSet(
        completion=config.completion,
        rewards=config.rewards,
        limits=config.lab,
        rows=rows,
        chosen=chosen,
        probes=probes,
        groups=[range(start, start + len(group)) for start, group in zip(starts, made, strict=True)],
        batch=probe_batch(
            rows_of_probes, [probe.text for probe in probes], played=any(sample.conversations for sample in samples)
        ),
        base=base,
        base_rows=base_rows,
        base_sizes=[len(sample.completions) for sample in samples],
    )


def probe_batch(rows: Sequence[PromptRow], texts: Sequence[str], *, played: bool = False) -> ScoreBatch:
    """The batch of made-up completions, `texts[i]` for `rows[i]`; with `played` each is a conversation that nobody answered."""
    ids, turns = list(map(_stand_in, texts)), []
    rest: dict[str, Any] = {"finish_reason": "stop", "reward": None, "calls": 0, "errors": 0, "info": {}}
    for row, text, own in zip(rows, texts, ids, strict=True) if played else ():
        turn = {"text": text, "start": 0, "end": len(own), **rest}
        turns.append(Played(row.messages, [{"role": "assistant", "content": text}], [turn], None, answered=False))
    return batch_of(rows, texts, ids, prompt_ids=[_prompt_stand_in(row) for row in rows], played=turns)


def _stand_in(text: str) -> list[int]:
    return list(text.encode(errors="surrogatepass")[::BYTES_PER_TOKEN])


def _prompt_stand_in(row: PromptRow) -> list[int]:
    return _stand_in("".join(message.get("content", "") for message in row.messages))

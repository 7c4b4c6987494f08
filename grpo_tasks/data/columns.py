"""What the columns of a data file are for, judged by what they hold: question, chat, ground truth, companions of the question.

Uniqueness, length, question marks, roles and the order of the columns decide; names are hints that add to it. Nothing is read
here, and no row is judged: proposal.py tries the choices.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from statistics import fmean

from grpo_tasks.data.records import CHAT_COLUMNS, OPTIONAL, PREFERRED, chat_message

QUESTIONS = ("question", "problem", "query", "instruction", "quiz", "input", "prompt", "task", "text", "source")
"""Usual names of a question's column."""
ANSWERS = (
    *("answer", "target", "final_answer", "expert_answer", "ground_truth", "label", "expected", "gold", "solution"),
    *("solution_text", "output", "response", "completion", "result", "correct", "truth", "reference", "key"),
)
"""Usual names of a ground truth's column, best first."""
CONTEXTS = ("body", "context", "passage", "premise", "input", "article", "paragraph", "document", "story", "background")
"""Columns that a question may refer to: SVAMP's Body, SQuAD's context, Alpaca's input."""
REPLIES = (PREFERRED, "rejected", "response", "completion", "generation", "reply")
WORKINGS = ("solution", "rationale", "explanation", "reasoning", "cot", "thought", "thinking", "steps", "hint", "proof")
ABOUT = (
    *("id", "idx", "index", "uuid", "source", "dataset", "split", "category", "type", "topic", "subject", "level", "difficulty"),
    *("language", "lang", "license", "author", "date", "year", "url", "score", "rating", "votes", "upvotes", "likes", "count"),
    *("length", "forms", "metadata", "version", "model", "num", "seed"),
)
"""Words of names whose columns describe a row."""
FILLED = 0.9
"""Share of rows in which a column must hold a value of its kind."""
MARKS = r"#### .|\\boxed\{|<answer>"
"""Marks of the final answer in a worked solution."""
_ID = re.compile(r"(?=[^\s]*[0-9])(?=[^\s]*[A-Za-z])[A-Za-z0-9][A-Za-z0-9_:.#-]*|[0-9a-f-]{16,}")
_PATH = re.compile(r"(?=.*[A-Za-z])(?:[A-Za-z]:\\[\w.\\~ -]+|[\w.:~-]*/[\w./:~%-]*)")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9:.]+(Z|[+-][0-9:]+)?)?|[0-9]{1,2}[./][0-9]{1,2}[./][0-9]{2,4}")
_NUMBER = re.compile(r"[-+\u2212]?[^\w\s]?\s?[0-9][0-9.,'\s]*[^\w\s]?")
_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f]")
_ASKS = re.compile(r"[?？؟;]\s*$|[?？؟]|[_]{3,}|=\s*$")
_SERIES = re.compile(r"(?:^|(?<=[_ -])|(?<=[a-z]))[0-9A-H]$|(?:^|(?<=[_ -]))[a-h]$")
_SENTENCE_END = ".:!?。：！？"
_SENTENCE_WORDS = 3
_LONG_WORDS = 5
_TOKEN_CHARS = 300

Rows = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """One way to read the rows of a file."""

    question: str | None
    """Column of the bare question; None when `chat` has the prompt."""
    chat: str | None
    """Column of chat messages."""
    answer: str | None
    """Column of the ground truth; None: the task has none, or the reply in the chat is it."""
    context: tuple[str, ...] = ()
    """Columns that are joined with the question, because it cannot be understood alone; `?` behind one that may be empty."""
    template: str | None = None
    """How they are joined."""
    reply: bool = False
    """Whether the last message of the chat is a reply."""
    no_truth: bool = False
    """Whether the user has said that there is no ground truth."""

    @property
    def reply_is_truth(self) -> bool:
        """Whether the reply in the chat is the ground truth."""
        return self.reply and self.answer is None and not self.no_truth and self.chat != PREFERRED


@dataclass(frozen=True, slots=True)
class Profile:
    """What a column holds in the first rows of a file."""

    name: str
    position: int
    kind: str
    """chat, text, number, truth (true or false), list, object (or anything else) or empty."""
    filled: float
    """Share of the rows with a value of this kind."""
    distinct: float
    """Different values among them, as a share."""
    constant: bool
    """Whether all rows, of several, have one value."""
    words: float = 0.0
    """In the mean."""
    asks: float = 0.0
    """Share of the texts with a question mark, a gap or an open equation."""
    marked: float = 0.0
    """Share of the texts with a mark of a final answer."""
    what: str = ""
    """a date, an identifier or a path, if all texts are such."""
    number: bool = False
    """Whether it holds numbers, perhaps as text with a currency or a percent sign."""
    ends: float = 0.0
    """Share of the texts that end like a sentence."""
    reply: bool = False
    """Whether its chats end with a reply."""
    example: str = ""

    def named(self, names: Sequence[str]) -> float:
        """1 for a name of the list, 0.5 for one that contains such a word, 0 for others; a little less for later ones."""
        plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.name.strip()).lower().replace(" ", "_").replace("-", "_")
        if plain in names:
            return 1 - names.index(plain) / (10 * len(names))
        parts = plain.split("_")
        return max((0.5 - at / (20 * len(names)) for at, name in enumerate(names) if name in parts), default=0.0)

    @property
    def is_sentence(self) -> bool:
        """Whether it holds language rather than a label."""
        return self.kind == "text" and not self.what and self.words >= _SENTENCE_WORDS


def profiles(rows: Rows) -> list[Profile]:
    """The columns of some rows, in the order of the file."""
    names = list(dict.fromkeys(str(column) for row in rows for column in row))
    return [_profile(name, at, [row.get(name) for row in rows]) for at, name in enumerate(names)]


def _profile(name: str, position: int, values: Sequence[object]) -> Profile:
    kinds = [_kind(value) for value in values]
    present = [kind for kind in kinds if kind != "empty"]
    if not present:
        return Profile(name, position, "empty", 0.0, 0.0, constant=False)
    kind = max(dict.fromkeys(present), key=present.count)
    mine = [value for value, found in zip(values, kinds, strict=True) if found == kind]
    texts = [str(value) for value in mine]
    share, number = len(mine) / len(values), len(set(texts))
    base = Profile(
        name,
        position,
        kind,
        filled=share,
        distinct=number / len(mine),
        constant=number == 1 < len(mine) and share >= FILLED,
        example=texts[0][:60],
        number=kind == "number",
    )
    if kind == "chat":
        last = [chat_message(value[-1]) for value in mine if isinstance(value, list)]
        replies = sum(isinstance(one, Mapping) and one["role"] == "assistant" for one in last)
        return replace(base, reply=2 * replies > len(mine))
    if kind != "text":
        return base

    def part(pattern: str | re.Pattern[str]) -> float:
        return sum(re.search(pattern, text) is not None for text in texts) / len(texts)

    # Longer texts are none of these, and would take the patterns long.
    short = [text.strip() if len(text) <= _TOKEN_CHARS else " " for text in texts]
    forms = {"a date": _DATE, "an identifier": _ID, "a path": _PATH}
    what = next((name for name, form in forms.items() if all(form.fullmatch(text) for text in short)), "")
    # Answers such as B2 recur; identifiers do not.
    if what == "an identifier" and base.distinct < FILLED:
        what = ""
    return replace(
        base,
        words=fmean(len(text.split()) + len(_WIDE.findall(text)) / 2 for text in texts),
        asks=part(_ASKS),
        marked=part(MARKS),
        what=what,
        number=all(_NUMBER.fullmatch(text) for text in short),
        ends=sum(text.rstrip()[-1:] in _SENTENCE_END for text in texts) / len(texts),
    )


def _kind(value: object) -> str:
    if value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, list) and not value):
        return "empty"
    if isinstance(value, list):
        if all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in map(chat_message, value)):
            return "chat"
        # Several true and false are one answer in parts, not several right answers.
        return "list" if all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in value) else "object"
    kinds = {str: "text", bool: "truth", int: "number", float: "number", Decimal: "number"}
    return kinds.get(type(value), "object")


def candidates(rows: Rows, *, question: str | None = None, answer: str | None = None) -> list[ColumnChoice]:
    """Every plausible way to read the rows, likelier ones first; empty when no column holds text or chats.

    `question` and `answer` are columns that the user has named; an empty answer: there is no ground truth.
    """
    columns = profiles(rows)
    usable = [one for one in columns if one.kind in ("chat", "text") and one.filled >= FILLED]
    # What is called as answers are asks only where nothing else can; what is always the same, where nothing varies.
    answers = [one for one in usable if one.kind == "text" and one.named(ANSWERS) >= FILLED > one.named(QUESTIONS)]
    others = [one for one in usable if one not in answers] or usable
    varied = any(not one.constant and _asks(one) > 0 for one in others)
    asking = [one for one in others if one.kind == "chat" or not (varied and one.constant)]
    asking = [one for one in asking if _asks(one) > 0] if question is None else [one for one in usable if one.name == question]
    found = []
    for one in sorted(asking, key=lambda one: (-_asks(one), one.position)):
        truth = _answer(one, columns, rows) if answer is None else next((each for each in columns if each.name == answer), None)
        name = (truth.name if truth else None) if answer is None else answer or None
        if one.kind == "chat":
            found.append(ColumnChoice(None, one.name, name, reply=one.reply, no_truth=answer == ""))
        else:
            context, template = _joined(one, truth, columns, rows)
            found.append(ColumnChoice(one.name, None, name, context, template))
    return found


def _asks(column: Profile) -> float:
    """How likely a column is the question; 0 for a reply."""
    if column.kind == "chat":
        plain = column.name.lower().strip()
        known = plain in (*CHAT_COLUMNS, "prompt")
        return 0.0 if plain == "rejected" else (4.0 if column.reply else 6.0) + known / 2 - (plain == PREFERRED)
    if column.named(REPLIES) > 0:
        return 0.0
    likely = 4 * column.named(QUESTIONS) + 2 * column.asks + 1.5 * column.distinct + min(column.words, 40) / 80
    likely += column.words >= _SENTENCE_WORDS
    unlikely = 2.5 * (column.named(ANSWERS) >= FILLED) + 2 * (column.named(WORKINGS) > 0) + 1.5 * column.marked
    unlikely += 3 * bool(column.what) + (column.named(CONTEXTS) > 0 and not column.named(QUESTIONS))
    unlikely += 1.5 * (column.named(ABOUT) > 0 and column.named(QUESTIONS) <= 0.5)
    return max(likely - unlikely, 0.05)


def _answer(question: Profile, columns: Sequence[Profile], rows: Rows) -> Profile | None:
    """The likeliest column of ground truths; None where no column is likely."""
    options = [one for one in _series(columns) if not one.named(ANSWERS)]
    fitting = [one for one in columns if one.kind in ("text", "number", "truth", "list") and one.filled >= FILLED]
    fitting = [one for one in fitting if one not in options]
    # What is always the same, or called as such columns are, describes the rows.
    about = (*ABOUT, *WORKINGS, *REPLIES, *CONTEXTS)
    others = [one for one in fitting if one is not question and not one.constant and not one.what and not one.named(about)]

    def likely(column: Profile) -> float:
        named = 0.0 if column.name == PREFERRED else column.named(ANSWERS)
        short = column.words <= _LONG_WORDS or column.marked > 0
        after = column.position > question.position
        score = 4 * named + short + column.number / 2 + 1.5 * (short and after and others == [column])
        score += 0.75 * (column.position == question.position + 1) + 0.5 * after
        # A solution is the ground truth only where no column has its result alone.
        working = column.named(WORKINGS) > 0 or column.marked > 0.5 or (column.kind == "text" and column.words > _LONG_WORDS)
        # `answer_type` and `model_answer` are no answers.
        describes = column.named(about) > 0 if not named else named < FILLED and column.named((*ABOUT, *REPLIES)) > 0
        score -= 3 * bool(column.what) + working + 3 * describes
        few = column.constant or (column.kind == "text" and column.distinct <= 0.2)
        return score - 1.5 * (few and not named)

    found = [one for one in fitting if one is not question and likely(one) > 1.5]
    # A column called as questions are is one, where its name is no answer's too. A reply is the truth, unless a name says so.
    found = [one for one in found if one.named(ANSWERS) or not (question.reply or one.named(QUESTIONS) >= FILLED)]
    best = max(found, key=likely, default=None)
    if best is None or not best.named(ANSWERS):
        # Objects are ground truths only by their name: what a row is about, is often an object too.
        objects = [one for one in columns if one.kind == "object" and one.filled >= FILLED and one.named(ANSWERS) >= FILLED]
        objects = [one for one in objects if all(isinstance(row.get(one.name), Mapping | None) for row in rows)]
        best = max(objects, key=lambda one: one.named(ANSWERS), default=best)
    if best is None or best.kind == "object" or best.number or best.named(ANSWERS):
        return best
    # What another column contains in every row, with more around it, is that one's result.
    later = (one for one in found if one.position > best.position and not one.named(about))
    return next((one for one in later if _tells(best, one, rows) and not _tells(one, best, rows)), best)


def _joined(
    question: Profile, answer: Profile | None, columns: Sequence[Profile], rows: Rows
) -> tuple[tuple[str, ...], str | None]:
    """The columns that stand with the question, and the template that joins them."""
    with_it: list[Profile] = []
    series = _series(columns)
    for one in columns:
        if one in series and one not in (question, answer) and not one.named((*REPLIES, *WORKINGS, *ABOUT)):
            with_it.append(one)
            continue
        if one in (question, answer) or one.kind != "text" or one.what or not one.filled:
            continue
        if one.named(REPLIES) or one.named(WORKINGS) or one.marked or (one.named(ANSWERS) >= FILLED and not one.constant):
            continue
        if one.named(CONTEXTS) > 0:
            with_it.append(one)
            continue
        repeated = one.constant or (one.distinct < 0.5 and one.filled >= FILLED)
        instructs = (
            repeated and one.is_sentence and (one.named(QUESTIONS) > 0 or one.ends >= 0.5) and not one.named(ABOUT) >= FILLED
        )
        before = one.position < question.position and one.words > _SENTENCE_WORDS and not one.named(ABOUT)
        if instructs or (before and not _tells(one, answer, rows)):
            with_it.append(one)
    if not with_it:
        return (), None
    options = [] if question in series else [one for one in with_it if one in series]
    last = question.asks >= 0.5

    def place(one: Profile) -> tuple[bool, bool, bool, int]:
        return one in options, not one.constant or one in series, last and one is question, one.position

    order = sorted([*with_it, question], key=place)
    names = {one.name: one.name if one.filled >= FILLED or one is question else f"{one.name}{OPTIONAL}" for one in order}
    labels = {one.name: f"{one.name[-1]}: " for one in options}
    template = "\n".join(f"{labels.get(plain, '')}{{{name}}}" for plain, name in names.items())
    # A name with a brace, a colon or a bracket cannot stand in a template.
    if any(set(name) & set("{}:![].") for name in names):
        return (), None
    return tuple(name for plain, name in names.items() if plain != question.name), template


def _series(columns: Sequence[Profile]) -> list[Profile]:
    """Columns that belong together by their names: the options A, B, C, D, or sentence1 and sentence2."""
    groups: dict[str, list[Profile]] = {}
    for one in columns:
        if one.kind in ("text", "number") and _SERIES.search(one.name):
            groups.setdefault(_SERIES.sub("", one.name), []).append(one)
    return [one for group in groups.values() if len(group) > 1 and group[0].name[-1] in "aA01" for one in group]


def _tells(column: Profile, answer: Profile | None, rows: Rows) -> bool:
    """Whether nearly every row's ground truth stands in this column: a solution, which no prompt may contain."""
    if answer is None:
        return False
    names = (answer.name, column.name)
    given = [[str(row[name]) for name in names] for row in rows if all(row.get(name) is not None for name in names)]
    pairs = [(re.sub(r"^\W+|\W+$", "", truth), text) for truth, text in given]
    shown = sum(bool(truth) and re.search(rf"(?<!\w){re.escape(truth)}(?!\w)", text) is not None for truth, text in pairs)
    return shown >= FILLED * max(len(pairs), 1)


def left_out(choice: ColumnChoice, rows: Rows, refused: Mapping[str, str]) -> list[tuple[str, str]]:
    """The columns that are neither prompt nor ground truth, each with the reason; `refused` has those that the rules refuse."""
    used = {choice.question, choice.chat, choice.answer, *(name.removesuffix(OPTIONAL) for name in choice.context)}
    return [(one.name, refused.get(one.name) or _why(one, choice)) for one in profiles(rows) if one.name not in used]


def _why(column: Profile, choice: ColumnChoice) -> str:
    few_words = column.words < _SENTENCE_WORDS or column.named(ABOUT) > 0 or choice.question is None
    reasons = {
        "always empty": column.kind == "empty",
        f"a list, such as {column.example}; a question that needs it, as for its options, has to contain it": column.kind
        == "list",
        f"objects, such as {column.example}; as ground truths: data.answer_column: {column.name} and completion: {{format: json, "
        "equality: json}": column.kind == "object" and column.named(ANSWERS) > 0,
        f"no text or number, but {column.example}": column.kind == "object",
        "a preferred reply, no ground truth: for `demonstrations: {column: chosen}` or `lab: {gold: chosen}`": column.name
        == PREFERRED,
        "replies, no question and no ground truth": column.kind == "chat"
        or (column.kind == "text" and column.named(REPLIES) > 0),
        f"holds {column.what}": bool(column.what),
        f"the same in every row: {column.example}": column.constant,
        f"a worked solution: for `demonstrations: {{column: {column.name}}}`": column.named(WORKINGS) > 0 or column.marked > 0,
        f"filled in {column.filled:.0%} of the rows only": column.filled < FILLED,
        "seems to describe the row; if it is the ground truth, name it with --answer": few_words,
    }
    whole = (choice.template or f"{{{choice.question}}}").replace("\n", " ")
    join = f"text next to the question; where it needs it, set data.question: '{{{column.name}}} {whole}'"
    return next((reason for reason, holds in reasons.items() if holds), join)

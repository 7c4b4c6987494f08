"""What makes a row bad: the table of all rules with reason code, meaning and fix, and how each is checked.

Rules of the scope `line` are found by jsonl.py, sources.py and records.py, those of a prompt also by judge.py, leaks by leaks.py,
all others here.

The order of the table is that of cause and effect: a rule stands before those that a row breaks as a consequence. A missing
prompt or answer breaks no rule about its content: the reason why it is missing has been recorded already.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import polars as pl

from grpo_tasks.data.leaks import asked_text, normalise_question
from grpo_tasks.data.normalise import SHOWN, normalise_column
from schemas.config.completion import TagsConfig
from schemas.config.data import PromptFormat
from schemas.errors import ConfigError
from schemas.prompts import PLAIN

Scope = Literal["line", "prompt", "answer", "table"]


ROLES = ["system", "user", "assistant"]
GENERIC_MARKERS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|end_of_turn|>", "<start_of_turn>",
    "<end_of_turn>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "<｜User｜>", "<｜Assistant｜>",
)  # fmt: skip
"""Template markers of well-known chat models; a prompt must contain none of them, whichever model is trained."""
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u0080-\u0084\u0086-\u009f]"
_TASK_NAME = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
_MAX_VALUE = 200
_MAX_CONTRADICTION = 400
_SHOWN_PROMPT = 80
_SHOWN_ANSWER = 30

_ROLES = pl.col("prompt").list.eval(pl.element().struct.field("role"))
_CONTENTS = pl.col("prompt").list.eval(pl.element().struct.field("content"))
_USER_TEXT = (
    pl.col("prompt")
    .list.eval(pl.element().filter(pl.element().struct.field("role").is_in(["user", PLAIN])).struct.field("content"))
    .list.join("\n")
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason to refuse a row."""

    name: str
    scope: Scope
    meaning: str
    fix: str
    ignorable: bool = True
    """Whether a row that breaks the rule could be used for training at all."""


def _required(name: str, scope: Scope, meaning: str, fix: str) -> Rule:
    return Rule(name, scope, meaning, fix, ignorable=False)


RULES: tuple[Rule, ...] = (
    _required("line_too_long", "line", "the line is longer than 4 MiB and was not read",
        "split the row, or check for a missing line break"),
    _required("encoding", "line", "the line is not UTF-8",
        "set the encoding of the source, for example cp1252, or convert the file: iconv -f LATIN1 -t UTF-8"),
    _required("unreadable_line", "line", "the line is not valid JSON or CSV, or is nested too deeply",
        "correct the line; JSONL has one complete object per line"),
    _required("not_an_object", "line", "the line is valid JSON, but not an object with columns", 'write {"column": value, ...}'),
    _required("cell_count", "line", "the line has more or fewer cells than the header",
        "quote cells that contain the delimiter, or set the delimiter of the source"),
    Rule("duplicate_key", "line", "a key occurs twice in one JSON object, so its value is ambiguous", "keep one of the two"),
    _required("prompt_missing", "prompt", "the row has neither a prompt nor a question",
        "fill the column, or set data.question_column or data.prompt_column"),
    _required("question_not_text", "prompt", "the question is not a string", "write it as a string"),
    _required("prompt_not_list", "prompt", "the prompt is neither a list of messages nor a string",
        "write a list of messages, or a string"),
    _required("messages_empty", "prompt", "the list of messages is empty", "add a user message"),
    _required("message_shape", "prompt", "a message is not an object with the strings role and content",
        'write {"role": "user", "content": "..."}'),
    _required("message_not_text", "prompt", "a message has a part that is not text, such as an image",
        "remove the part; only text is trained on"),
    Rule("media_with_text", "prompt", "the row has an image, a sound or a video next to its text; only text is trained on",
        "remove the column; where the text is complete without it, name this rule in validation.ignore_rules"),
    _required("mixed_forms", "prompt",
        "the prompt has another form than most of the data: a string among chats, or a chat among strings",
        "write all prompts in one form, or set data.format: conversational to ask strings as user messages"),
    Rule("message_extra_keys", "prompt", "a message has keys other than role and content, which the chat would silently lose",
        "move them to columns of the row"),
    Rule("unknown_role", "prompt", "a role is not one of system, user, assistant", "rename the role"),
    Rule("system_position", "prompt", "a system message is not the first message, or there are several",
        "join them into one at the beginning"),
    Rule("turn_order", "prompt", "user and assistant do not alternate, starting with user", "merge or reorder the messages"),
    Rule("last_not_user", "prompt", "the last message is not from the user, so there is nothing to answer",
        "remove the messages after the last question"),
    Rule("content_empty", "prompt", "a message is empty or blank", "fill or remove it"),
    Rule("control_characters", "prompt", "a message or the answer contains control characters (NUL, escape, ...)",
        "remove them; they are often left over from a terminal or a PDF"),
    Rule("template_markers", "prompt",
        "a message or the answer contains markers of a chat template, such as <|im_start|> or [INST]",
        "remove them; the tokenizer's chat template adds its own"),
    Rule("answer_in_prompt", "prompt", "a user message contains the ground truth inside an answer block",
        "remove the block, or use another example in the instructions"),
    _required("template_refused", "prompt", "the tokenizer's chat template refuses the messages",
        "write them as its message says: where it knows no system role, move the instruction into the question"),
    Rule("prompt_too_long", "prompt", "the prompt is longer than validation.max_prompt_length after the chat template",
        "shorten the prompt or raise the limit"),
    _required("answer_type", "answer", "the answer is no text, number, true or false, date, object, or list of these",
        "write it as a string, a number or an object"),
    _required("answer_missing", "answer", "the answer is missing or empty",
        "fill the column, or set data.answer_column; for a task without ground truth set data.tasks.NAME.answers: optional"),
    _required("answer_pattern", "answer", "data.answer_pattern does not occur in the answer",
        "correct the pattern or the answer"),
    Rule("answer_has_tags", "answer", "the ground truth contains one of the completion's own tags",
        "keep only the text between the tags, for example with data.answer_pattern: '<answer>(.*?)</answer>'"),
    _required("task_name", "line",
        "the task is missing, or is no name of at most 64 letters, digits, dots, dashes and underscores",
        "fill the column, or set data.task_column"),
    Rule("duplicate", "table", "an earlier row of the same split has the same prompt and answer", "keep one of them"),
    Rule("contradiction", "table", "the same prompt occurs in the same split with different answers",
        "decide which answer is right and remove the others"),
    Rule("leak_exact", "table", "the question is also in the eval split", "remove it from the training data"),
    Rule("leak_normalised", "table",
        "the question is also in the eval split, apart from case, whitespace, punctuation, accents or the form of numbers",
        "remove it from the training data"),
)  # fmt: skip

BY_NAME: dict[str, Rule] = {rule.name: rule for rule in RULES}


def check_ignored(names: Sequence[str]) -> frozenset[str]:
    """Raise `ConfigError` for a name of `validation.ignore_rules` that is no rule, or one that cannot be ignored."""
    for name in names:
        rule = BY_NAME.get(name)
        if rule is None:
            near = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(BY_NAME)}"
            raise ConfigError(f"no such rule: {name}", place="validation.ignore_rules", fix=fix)
        if not rule.ignorable:
            raise ConfigError(
                f"{name} cannot be ignored: a row that breaks it cannot be used for training",
                place="validation.ignore_rules",
                fix="remove it from the list; to allow more such rows raise validation.max_invalid_fraction",
            )
    return frozenset(names)


@dataclass(frozen=True, slots=True)
class RowRule:
    """How one rule about a single row is checked."""

    rule: str
    holds: pl.Expr
    """True where the row keeps it; null counts as kept."""
    value: pl.Expr
    """What the quarantine shows of a row that breaks it."""


def row_rules(tags: TagsConfig, markers: Sequence[str], form: PromptFormat = "conversational") -> list[RowRule]:
    """The rules about a single row. `markers` are the tokenizer's own special tokens, forbidden as GENERIC_MARKERS are.

    A prompt in the standard format has no turns, and may contain markers: no template adds any.
    """
    own_tags = tags.in_order
    forbidden = [marker for marker in dict.fromkeys((*GENERIC_MARKERS, *markers)) if marker and marker not in own_tags]
    mixed = RowRule("mixed_forms", ~pl.col("other_form"), pl.lit("chat messages" if form == "standard" else "a string"))
    task = pl.col("task")
    named = RowRule("task_name", pl.col("faulty_line") | (task.is_not_null() & task.str.contains(_TASK_NAME + "|^$")), task)
    turns = [] if form == "standard" else _turn_rules()
    return [mixed, *turns, *_content_rules(tags.answer, forbidden, form), *_answer_rules(own_tags), named]


def add_views(rows: pl.DataFrame) -> pl.DataFrame:
    """`rows` of `normalise.add_prompts` with roles, contents and answers joined, and whether reading left no line or answer."""
    return rows.with_columns(
        roles=_ROLES.list.join(","),
        text=_CONTENTS.list.join("\n"),
        truths=pl.coalesce(pl.col("answers").list.join("\n"), "answer"),
        faulty_line=_has_fault("line"),
        faulty_answer=_has_fault("answer"),
    )


def broken_row_rules(rows: pl.DataFrame, rules: Sequence[RowRule]) -> pl.DataFrame:
    """Columns row, rule, value: one line for each rule that a row breaks."""
    kept = rows.select(rule.holds.fill_null(value=True).alias(rule.rule) for rule in rules)
    found = []
    for rule in rules:
        value = rule.value.cast(pl.String).fill_null("null")
        shortened = pl.when(value.str.len_chars() > _MAX_VALUE).then(value.str.head(_MAX_VALUE - 1) + "…").otherwise(value)
        broken = rows.filter(~kept[rule.rule])
        found.append(broken.select("row", rule=pl.lit(rule.rule), value=shortened))
    return pl.concat(found)


def relation_keys(rows: pl.DataFrame) -> pl.DataFrame:
    """Three 64-bit hashes per prompt: of all messages, of all but the system message, and of the latter normalised.

    Comparing a million rows by hash takes a fraction of a second; the chance of a false match among them is about 3 in 10^8.
    """
    texts = rows.select(chat=pl.struct("roles", "text"), question=asked_text(), has_prompt=pl.col("prompt").is_not_null())
    keys = {
        "prompt_key": pl.col("chat"),
        "question_key": pl.col("question"),
        "normalised_key": normalise_question(pl.col("question")),
    }
    return texts.select(pl.when("has_prompt").then(text.hash()).alias(key) for key, text in keys.items())


def find_duplicates(keys: pl.DataFrame) -> pl.DataFrame:
    """Rows (in reading order, each with a prompt_id) that repeat an earlier one of their split: columns row, rule, value.

    Called before the pipeline's own split, which would separate copies.
    """
    shared = keys.filter(pl.col("prompt_id").is_duplicated())
    first = pl.concat_str(pl.col("source").first(), pl.lit(":"), pl.col("line").first()).over("split", "prompt_id")
    later = shared.with_columns(first=first).filter(~pl.col("prompt_id").is_first_distinct().over("split"))
    return later.select("row", rule=pl.lit("duplicate"), value=pl.concat_str(pl.lit("same as "), "first"))


def find_contradictions(keys: pl.DataFrame) -> pl.DataFrame:
    """Rows of one split with the same prompt and different answers. The value shows the prompt, and each answer with its row."""
    same_prompt = ["split", "prompt_key", "task"]
    # Only the few rows that share their prompt need the costly comparison.
    shared = keys.filter(pl.col("prompt_key").is_duplicated())
    conflicting = shared.filter(pl.col("prompt_id").n_unique().over(same_prompt) > 1)
    asked = pl.col("prompt").list.last().struct.field("content")
    prompt = pl.when(asked.str.len_chars() > _SHOWN_PROMPT).then(asked.str.head(_SHOWN_PROMPT - 1) + "…").otherwise(asked)
    answer = pl.coalesce(pl.col("answers").list.join(" or "), "answer").fill_null("no answer").str.head(_SHOWN_ANSWER)
    place = pl.concat_str(answer, pl.lit(" ("), "source", pl.lit(":"), "line", pl.lit(")"))
    shown = conflicting.with_columns(prompt=prompt.str.replace_all(r"\s+", " "), shown=place)
    # One row for each answer: the copies of a row say nothing new.
    each = pl.col("shown").filter(pl.col("prompt_id").is_first_distinct()).head(4).str.join(" | ").over(same_prompt)
    value = pl.concat_str("prompt", pl.lit(": "), each).str.head(_MAX_CONTRADICTION)
    return shown.select("row", rule=pl.lit("contradiction"), value=value)


def _has_fault(scope: Scope) -> pl.Expr:
    # An ignorable fault, such as a duplicate key, leaves a row that can be read.
    names = [rule.name for rule in RULES if rule.scope == scope and not rule.ignorable]
    return pl.col("faults").list.eval(pl.element().struct.field("rule").is_in(names)).list.any().fill_null(value=False)


def _turn_rules() -> list[RowRule]:
    roles = pl.col("roles")
    known = ~_ROLES.list.eval(~pl.element().is_in(ROLES)).list.any()
    turns = roles.str.replace_all("system,", "", literal=True).str.replace(",?system$", "")
    alternate = turns.str.contains("^(user(,assistant,user)*(,assistant)?)?$")
    # With an unknown role the order of turns is undefined, and only unknown_role is reported.
    return [
        RowRule("unknown_role", known, roles),
        RowRule("system_position", ~known | ~_ROLES.list.slice(1).list.contains("system"), roles),
        RowRule("turn_order", ~known | alternate, roles),
        RowRule("last_not_user", ~known | (_ROLES.list.last() == "user"), roles),
    ]


def _content_rules(answer_tag: str, markers: list[str], form: PromptFormat) -> list[RowRule]:
    text, answer = pl.col("text"), pl.col("truths").fill_null("")
    filled = _CONTENTS.list.eval(pl.element().str.contains(SHOWN)).list.all()
    both = pl.concat_str(text, answer, separator="\n")
    marked = both if form == "conversational" else answer
    block = rf"(?s)<{answer_tag}>.*?</{answer_tag}>"
    given = _USER_TEXT.str.extract_all(block).list.eval(
        normalise_column(pl.element().str.strip_prefix(f"<{answer_tag}>").str.strip_suffix(f"</{answer_tag}>"))
    )
    # Few prompts contain an answer block; the search for the literal tag keeps the regex from all the others.
    has_block = text.str.contains(f"<{answer_tag}>", literal=True)
    tells = given.list.set_intersection(pl.coalesce("answers", pl.concat_list("answer"))).list.len() > 0
    around = both.str.extract(f"(?s)(.{{0,20}}{_CONTROL}.{{0,20}})", 1)
    return [
        RowRule("content_empty", filled, pl.col("roles")),
        # As JSON, which escapes invisible characters.
        RowRule("control_characters", ~both.str.contains(_CONTROL), pl.struct(found=around).struct.json_encode()),
        RowRule(
            "template_markers",
            ~marked.str.contains_any(markers),
            marked.str.extract_many(markers).list.unique(maintain_order=True).list.join(" "),
        ),
        RowRule("answer_in_prompt", ~has_block | ~tells | (answer == ""), given.list.join(" | ")),
    ]


def _answer_rules(own_tags: list[str]) -> list[RowRule]:
    answer, pattern_found = pl.col("answer"), pl.col("pattern_found")
    already_reported = pl.col("faulty_line") | pl.col("faulty_answer")
    present = pattern_found.is_not_null() & answer.str.contains(SHOWN).fill_null(value=True)
    return [
        RowRule("answer_missing", already_reported | present | ~pl.col("needs_answer"), answer),
        RowRule("answer_pattern", already_reported | pattern_found, pl.col("raw_answer")),
        RowRule("answer_has_tags", ~pl.col("truths").str.contains_any(own_tags), pl.col("truths")),
    ]

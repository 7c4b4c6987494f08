"""What makes a row bad: the table of all rules, with the reason code, the meaning and the fix of each.

    scope     found by                                 compares
    line      jsonl.py, sources.py, records.py         the text of one line with its format
    prompt    records.py, checks.py, judge.py          the messages of one row
    answer    records.py, checks.py                    the ground truth of one row
    table     checks.py                                one row with the other rows

The order is that of cause and effect: a rule stands before those that a row breaks as a consequence. Reports, the quarantine and
`validation.ignore_rules` use these names.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from schemas.errors import ConfigError

Scope = Literal["line", "prompt", "answer", "table"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason to refuse a row."""

    name: str
    """The reason code."""
    scope: Scope
    """What the rule examines: the text of the line, the messages, the ground truth, or other rows as well."""
    meaning: str
    """What is wrong with a row that breaks it, as the quarantine table says it."""
    fix: str
    """What to do about such rows, as the report says it."""
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
    _required("answer_type", "answer", "the answer is no text, number, true or false, date, or list of these",
        "write it as a string or a number"),
    _required("answer_missing", "answer", "the answer is missing or empty",
        "fill the column, or set data.answer_column; for a task without ground truth set data.tasks.NAME.answers: optional"),
    _required("answer_pattern", "answer", "data.answer_pattern does not occur in the answer",
        "correct the pattern or the answer"),
    Rule("answer_has_tags", "answer", "the ground truth contains one of the completion's own tags",
        "keep only the text between the tags, for example with data.answer_pattern"),
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
    """The names of `validation.ignore_rules` as a set; raises `ConfigError` for an unknown rule or one that is not ignorable."""
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

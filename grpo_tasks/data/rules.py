"""The rules a row must keep: one table, read by the verdict, the report, the README and the check of `ignore_rules`.

The order is that of cause and effect: a reason that explains later ones stands before them. What breaks a rule is told by
`records` (structure, while reading), `row_rules` (one row), and `relations` (a row against the others).
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason to refuse a row."""

    name: str
    meaning: str
    """One sentence a user understands; what the quarantine says."""
    part: Literal["line", "prompt", "answer", "table"]
    """What it looks at: the whole line, the messages, the ground truth, or other rows."""
    ignorable: bool = True
    """Whether a row that breaks it could be trained on at all."""


def _needed(name: str, meaning: str, part: Literal["line", "prompt", "answer", "table"]) -> Rule:
    return Rule(name, meaning, part, ignorable=False)


RULES: tuple[Rule, ...] = (
    _needed("line_too_long", "the line is longer than 4 MiB and was not read", "line"),
    _needed("encoding", "the line is not UTF-8", "line"),
    _needed("unreadable_line", "the line is not valid JSON or CSV, or nested too deeply", "line"),
    _needed("not_an_object", "the line is JSON, but no object with columns", "line"),
    _needed("cell_count", "the line has more or fewer cells than the header", "line"),
    Rule("duplicate_key", "a key occurs twice in one JSON object, so it is unclear which value counts", "line"),
    _needed("prompt_missing", "the row has neither a prompt nor a question", "prompt"),
    _needed("question_not_text", "the question is not a string", "prompt"),
    _needed("prompt_not_list", "the prompt is not a list of messages (for bare text set data.question_column)", "prompt"),
    _needed("messages_empty", "the list of messages is empty", "prompt"),
    _needed("message_shape", "a message is not an object with the strings role and content", "prompt"),
    Rule("message_extra_keys", "a message has keys besides role and content, which the chat would silently lose", "prompt"),
    Rule("unknown_role", "a role is none of system, user, assistant", "prompt"),
    Rule("system_position", "a system message stands elsewhere than first, or there are several", "prompt"),
    Rule("turn_order", "user and assistant do not alternate, beginning with user", "prompt"),
    Rule("last_not_user", "the last message is not the user's, so there is nothing to answer", "prompt"),
    Rule("content_empty", "a message is empty or blank", "prompt"),
    Rule("control_characters", "a message or the answer holds control characters (NUL, escape, ...)", "prompt"),
    Rule(
        "template_markers", "a message or the answer holds markers of a chat template, such as <|im_start|> or [INST]", "prompt"
    ),
    Rule("answer_in_prompt", "the user's message holds the ground truth inside an answer block", "prompt"),
    _needed("template_refused", "the tokenizer's chat template refuses the messages", "prompt"),
    Rule("prompt_too_long", "the prompt is longer than validation.max_prompt_length after the chat template", "prompt"),
    _needed("answer_type", "the answer is neither a string nor a number", "answer"),
    _needed("answer_missing", "the answer is missing or empty", "answer"),
    _needed("answer_pattern", "data.answer_pattern does not occur in the answer", "answer"),
    Rule("answer_has_tags", "the ground truth holds one of the completion's own tags", "answer"),
    Rule("duplicate", "the same prompt with the same answer stood before on this side", "table"),
    Rule("contradiction", "the same prompt occurs on this side with different answers", "table"),
    Rule("leak_exact", "the question is also held out for evaluation", "table"),
    Rule("leak_normalised", "the question is also held out for evaluation, but for case, blanks or punctuation", "table"),
)

BY_NAME: dict[str, Rule] = {rule.name: rule for rule in RULES}


@dataclass(frozen=True, slots=True)
class Fault:
    """A rule that a row breaks, with what was found."""

    rule: str
    value: str


def shorten(text: str, limit: int = 200) -> str:
    """The text, or its beginning and an ellipsis, at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def check_ignored(names: Sequence[str]) -> frozenset[str]:
    """The names of `validation.ignore_rules` as a set; raises `ConfigError` for an unknown rule or one that must hold."""
    for name in names:
        rule = BY_NAME.get(name)
        if rule is None:
            near = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(BY_NAME)}"
            raise ConfigError(f"no such rule: {name}", place="validation.ignore_rules", fix=fix)
        if not rule.ignorable:
            raise ConfigError(
                f"{name} cannot be ignored: without it there is no row to train on",
                place="validation.ignore_rules",
                fix="take it out; to go on despite such rows raise validation.max_invalid_fraction",
            )
    return frozenset(names)

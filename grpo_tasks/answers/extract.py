"""Which text of a completion is its answer: the one definition that rewards, evaluation and the lab share.

    completion.format   what is read                                                          where
    tags                <answer>...</answer>, after <reasoning>...</reasoning>                  tags.py
    json                the value of a key of a JSON object                                   json_object.py
    regex               a group of the last match of a pattern                                pattern.py
    boxed               the last \\boxed{...}                                                  boxed.py
    none                free text: no answer                                                  here

An empty answer never earns anything. Blank text (only whitespace, control, format and filler characters) is never extracted and
equals nothing, and every built-in reward gives its lowest score when `Extraction.worthless` is set. Every reader takes time
linear in the text and never raises.
"""

from grpo_tasks.answers.boxed import read_boxed
from grpo_tasks.answers.extraction import Extraction, is_blank
from grpo_tasks.answers.json_object import read_json
from grpo_tasks.answers.json_rules import check_schema
from grpo_tasks.answers.pattern import check_pattern, read_pattern
from grpo_tasks.answers.tags import Tags, read_tags
from schemas.config.completion import CompletionConfig


def extract(text: str, completion: CompletionConfig) -> Extraction:
    """Read one completion in the format of the configuration. Never raises, whatever the text."""
    if completion.format == "json":
        return read_json(text, completion)
    if completion.format == "regex":
        return read_pattern(text, completion.pattern or "")
    if completion.format == "boxed":
        return read_boxed(text)
    if completion.format == "none":
        return _free_text(text)
    return read_tags(text, Tags.of(completion.tags))


def check_completion(completion: CompletionConfig) -> None:
    """Raise `ConfigError` for a pattern or a JSON Schema that cannot be used. Reading a config does not import what can tell."""
    if completion.pattern is not None:
        check_pattern(completion.pattern)
    if completion.json_schema is not None:
        check_schema(completion.json_schema)


def _free_text(text: str) -> Extraction:
    blank = is_blank(text)
    return Extraction(answer=None, strict_format=not blank, lenient_answer=None, empty_answer=blank)

"""How the families of models write calls. Each has a name (`interaction.call_format`), marks in its chat templates and a writer.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>                             Qwen 2.5 and 3, Hermes
    xml      <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>    Qwen 3.5, Qwen3-Coder, Nemotron
    glm      <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>        GLM 4.5 and later
    harmony  <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>    gpt-oss
    mistral  [TOOL_CALLS]NAME[ARGS]{...}, or [TOOL_CALLS] and a list as for hermes                Mistral, Ministral, Devstral
    llama    nothing but {"name": ..., "parameters": {...}}                                       Llama 3
    json     as hermes where the tag occurs; otherwise nothing but the object, or a list of such objects

All but the last two are response templates, the declarative form by which transformers reads replies. Its parser
(`transformers.utils.chat_parsing`) reads each call, by these or by the template that a tokenizer brings. calls.py reads turns.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from schemas.config.rollout import CallFormat
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate, ResponseTemplateField

ReadFormat = Literal["hermes", "xml", "glm", "harmony", "mistral", "llama", "json"]

_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_HARMONY_NAME = r"to=functions\.(?P<name>[^\s<]{1,200}+)"
# No pattern may take quadratic time: names are bounded, no repetition begins a pattern, and an argument that is not closed
# reaches to the end of the call. A name is optional, so that a call without one is a call with an error instead of text. A stop
# string may have replaced the closing tag at the end.
_TEMPLATES: Mapping[str, Mapping[str, Any]] = {
    "hermes": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        }
    },
    "xml": {
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*+(?:<function=(?P<name>[^<>\n]{1,200}+)>)?",
            "close_pattern": r"</function>\s*+(?:</tool_call>|\Z)",
            "content": "xml-inline",
            # One line break on each side belongs to the format; all other white space belongs to the value.
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^<>\n]{1,200}+)>\n?(?P<value>.*?)\n?(?:</parameter>|\Z)",
            },
            "transform": _NAMED,
        }
    },
    "glm": {
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*+(?P<name>[^\s<]{1,200}+)?",
            # Both begin alike, which the search for them needs to be fast. An argument may end with the call.
            "close_pattern": r"</(?:tool_call>|arg_value>\s*+\Z)",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>[^<]{1,200}+)</arg_key>\s*+<arg_value>(?P<value>.*?)(?:</arg_value>|\Z)",
            },
            "transform": _NAMED,
        }
    },
    "harmony": {
        "tool_calls": {
            # The model writes the channel first, its chat template the name.
            "open_pattern": rf"(?:<\|channel\|>commentary\s++{_HARMONY_NAME}|{_HARMONY_NAME}<\|channel\|>commentary)"
            r"(?:\s*+(?:<\|constrain\|>)?\w{1,20}+)?\s*+(?:<\|message\|>)?",
            "close": "<|call|>",
            "content": "json",
            "transform": _NAMED,
        },
        "thinking": {"open": "<|channel|>analysis", "close": "<|end|>"},
        "content": {"open": "<|channel|>final"},
    },
    "mistral": {
        "tool_calls": {
            "open_pattern": r"\[TOOL_CALLS\]\s*+(?P<name>[^\s\[{]{1,200}+)(?:\[CALL_ID\]\w{1,200}+)?(?:\[ARGS\])?",
            "content": "json",
            "transform": _NAMED,
        },
        "tool_calls_listed": {"open_pattern": r"\[TOOL_CALLS\](?!\s*+[^\s\[{])", "content": "json"},
        "thinking": {"open": "[THINK]", "close": "[/THINK]"},
    },
}
_MARKS: Mapping[str, ReadFormat] = {
    "<function=": "xml",
    "<arg_key>": "glm",
    "[TOOL_CALLS]": "mistral",
    "to=functions.": "harmony",
    "<|channel|>commentary": "harmony",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama",
    '"parameters"': "llama",
}
"""What a chat template writes calls with. The first one counts."""
_FOREIGN = ("tool▁call", "<|tool_call", "<start_function_call>", "<invoke name=", "<|START_ACTION|>")
"""What the chat templates of other families write calls with."""


@dataclass(frozen=True, slots=True, eq=False)
class CallField:
    """Where the calls of one form stand in a turn."""

    field: "ResponseTemplateField"
    alone: "ResponseTemplate"
    """Reads a text that begins with the opening as one call, to its end."""
    tag: Any = None
    """The pattern that finds the arguments in a call, compiled; None where they are no tags."""

    @property
    def is_plain_json(self) -> bool:
        """Whether the call is JSON without a dialect: then its own syntax says where it ends."""
        return self.field.content == "json" and not self.field.content_args


@dataclass(frozen=True, slots=True, eq=False)
class CallFields:
    """A response template, as far as it concerns calls."""

    calls: tuple[CallField, ...]
    others: tuple["ResponseTemplateField", ...]
    """Regions in which no call counts, such as reasoning."""
    strict: bool = False
    """Whether an opening inside a call means that the call was not closed."""


def call_format_of(
    call_format: CallFormat, chat_template: str, response_template: Mapping[str, Any] | None = None
) -> ReadFormat | CallFields:
    """The format that the configuration names, or (auto) the one of the tokenizer's response template, or of its chat template.

    Raises `ConfigError` for a damaged response template, and for a chat template that asks for no format or an unknown one.
    """
    if call_format != "auto":
        return call_format
    place = "interaction.call_format"
    if any(name.startswith("tool_calls") for name in dict((response_template or {}).get("fields") or {})):
        try:
            return load_fields(response_template or {})
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            fix = "correct response_template in tokenizer_config.json, or name the format of the family: call_format: hermes"
            raise ConfigError(f"the response template of the tokenizer cannot be used: {error}", place=place, fix=fix) from error
    found = family_of(chat_template)
    if found is not None:
        return found
    mark = next((mark for mark in _FOREIGN if mark in chat_template), None)
    if mark is not None:
        fix = "call_format: json, and a system prompt that says: a call is <tool_call>{JSON with name and arguments}</tool_call>"
        raise ConfigError(f"the chat template of the model writes calls with {mark}, which is not read", place=place, fix=fix)
    fix = "use a model whose chat template shows tools, or describe them in the system prompt and set call_format: json"
    raise ConfigError("the chat template of the model does not show tools", place=place, fix=fix)


def family_of(chat_template: str) -> ReadFormat | None:
    """The format that a chat template asks for; None: one that is not read, or none."""
    if any(mark in chat_template for mark in _FOREIGN):
        return None
    found = next((family for mark, family in _MARKS.items() if mark in chat_template), None)
    return found or ("json" if re.search(r"\btools\b", chat_template) else None)


@cache
def fields_of(family: ReadFormat) -> CallFields:
    """The response template of a family that has one; `json` has that of hermes."""
    fields = _TEMPLATES["hermes" if family == "json" else family]
    return replace(load_fields({"start_anchor": "<assistant>", "fields": fields}), strict=True)


def load_fields(response_template: Mapping[str, Any]) -> CallFields:
    """Load and compile a response template; raises ValueError, TypeError, AttributeError or KeyError where it is damaged."""
    # Imported here: it takes seconds, and rewards need only what a turn is.
    from transformers.utils.chat_parsing.response_templates import load_response_template

    template = load_response_template(dict(response_template))
    calls, others = [], []
    for name, field in template.fields.items():
        if field.open_re is None:
            continue
        if not name.startswith("tool_calls"):
            others.append(field)
            continue
        tag = field.content_args.get("tag_pattern")
        if field.content_args.get("value_parser", {}).get("name") == "xml-inline":
            raise ValueError(f"field {name} has a pattern inside a pattern, whose time cannot be limited")
        if tag is not None:
            fields = {"tag": {"open_pattern": tag, "transform": "{key}"}}
            tag = load_response_template({"start_anchor": "-", "fields": fields}).fields["tag"].open_re
        alone = replace(field, name=name, close_re=None, repeats=True, join=None, optional=True)
        calls.append(CallField(field, replace(template, defaults={}, fields={name: alone}, implicit=None), tag))
    if not calls:
        raise ValueError("no field of calls has an opening")
    return CallFields(tuple(calls), tuple(others))


def write_call(name: str, arguments: Mapping[str, Any], call_format: ReadFormat) -> str:
    """A call as an honest policy writes it."""
    written = json.dumps(dict(arguments), ensure_ascii=False)
    texts = {key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in arguments.items()}
    match call_format:
        case "xml":
            tags = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
            return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"
        case "glm":
            tags = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
            return f"<tool_call>{name}\n{tags}</tool_call>"
        case "harmony":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{written}<|call|>"
        case "mistral":
            return f"[TOOL_CALLS]{name}[ARGS]{written}"
        case "llama":
            return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": {written}}}'
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written}}}\n</tool_call>'

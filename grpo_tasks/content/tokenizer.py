"""A tokenizer and its chat template: what a run's settings change about them, and what they make of texts and turns.

`prepare` gives a published tokenizer model.added_tokens and its template the defaults of rollout.chat_template_kwargs; that of a
merged model also gets the system prompt of the training. Whoever loads a tokenizer prepares it here, and whoever tokenises does
it here, so that validation, sampling, training and the merged model agree. A merged model is saved with the changes, and needs no
settings of ours. Imports no torch.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from grpo_tasks.content.limited_model import BATCH, limited_model
from schemas.config.model import AddedToken, ModelConfig
from schemas.config.rollout import TEMPLATE_DATE, RolloutConfig
from schemas.errors import ConfigError, ModelError
from schemas.prompts import PLAIN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "\ufdd0\ufdd1"
"""Stands for what somebody says. Unicode reserves these code points for use inside a program."""
QUESTION = {"role": "user", "content": "Hi"}
_ANSWER = {"role": "assistant", "content": PLACEHOLDER}
_DIRECTIVES = [*(f"%-{letter}" for letter in "dmjHMI"), *(f"%{letter}" for letter in "aAbBcdDeFGhHIjkmMnprRSTuUVwWxXyY")]
"""What strftime puts in the place of a part of a date; the hour is midnight."""
_PERCENT = "\ufdd2"
"""Stands for a percent sign that begins no directive. Unicode reserves this code point for use inside a program."""
_SYSTEM_START, _SYSTEM_END = "{#- system prompt of the training -#}", "{#- end of the system prompt +#}"
"""Comments of the template around the part that `set_system_prompt` wrote."""
_OF_CALLERS = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "strftime_now"}
"""Variables of a chat template that no setting is for."""
_ASKED_FOR = re.compile(r"(?<![\w.])(\w+)(?: is (?:not )?(?:un)?defined\b| *\| *default\()")
_DEFAULTS = (
    re.compile(r"(?<![\w.])(\w+) is (?:not defined|undefined) *-?%}\s*{%-? *set +\1\b"),
    re.compile(r"\bset +(\w+) *= *\1(?: *\| *default\(| if \1 is defined)"),
)
"""How a template sets a variable only where nobody has set it (gpt-oss, Nemotron 3). All others that it sets are its own."""
_SYSTEM = (
    "{%- if not messages or messages[0]['role'] != 'system' %}"
    "{%- set messages = [{'role': 'system', 'content': PROMPT}] + messages %}"
    "{%- endif %}"
)
"""The same rule by which reading the data adds the system prompt: a conversation that begins with a system message keeps it."""


def added_tokens(model: ModelConfig) -> list[AddedToken]:
    """`model.added_tokens`; a bare string is an ordinary token."""
    return [AddedToken(token=given) if isinstance(given, str) else given for given in model.added_tokens]


def add_tokens(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[AddedToken]) -> list[int]:
    """Add tokens in place, in their order; the ids that are new. Those that the tokenizer has already keep their ids."""
    import tokenizers

    before = set(tokenizer.get_vocab())
    for token in tokens:
        if token.token in before and not token.special:
            continue
        # Not add_special_tokens, which replaces the special tokens that a tokenizer has. Not normalised: the text is found as is.
        added = tokenizers.AddedToken(token.token, special=token.special, normalized=False)
        tokenizer.add_tokens([added], special_tokens=token.special)
    return [token_id(tokenizer, token.token) for token in tokens if token.token not in before]


def starting_rows(
    tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[AddedToken], new_ids: Sequence[int]
) -> dict[int, list[int]]:
    """By new token id: the known tokens of the text that it starts out like (`added_tokens[].like`); `ConfigError` where none."""
    rows = {}
    for token in tokens:
        number = token_id(tokenizer, token.token)
        if token.like is None or number not in new_ids:
            continue
        known = [one for one in tokenizer.encode(token.like, add_special_tokens=False) if one not in new_ids]
        if not known:
            raise ConfigError(
                f"{token.like!r} has no token that the model knows",
                place=f"model.added_tokens {token.token}",
                fix="name a text of known tokens in like, or leave it out",
            )
        rows[number] = known
    return rows


def token_id(tokenizer: "PreTrainedTokenizerBase", token: str) -> int:
    """The id of a token; raises ConfigError where the tokenizer does not have it."""
    found = tokenizer.get_vocab().get(token)
    if found is not None:
        return int(found)
    # A byte-level vocabulary spells " the" in characters of its own.
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1 or tokenizer.decode(ids) != token:
        raise ConfigError(
            f"the tokenizer has no token {token!r}",
            place="rollout.stop_token_ids",
            fix="add it to model.added_tokens, or use rollout.stop for a string of several tokens",
        )
    return int(ids[0])


def stop_token_ids(tokenizer: "PreTrainedTokenizerBase", given: Iterable[int | str]) -> frozenset[int]:
    """Token ids of `rollout.stop_token_ids`, which names tokens by id or by text; raises as `token_id`."""
    return frozenset(token_id(tokenizer, token) if isinstance(token, str) else token for token in given)


def set_template_defaults(tokenizer: "PreTrainedTokenizerBase", values: Mapping[str, Any]) -> None:
    """Give variables of the chat template a default, in place: rendering equals `apply_chat_template(..., **values)`.

    A caller may still pass another value. The value of strftime_now is a day (schemas/config/rollout.py TEMPLATE_DATE).
    """
    if not values:
        return
    template = tokenizer.chat_template
    if values.get("tools") and isinstance(template, dict) and "tool_use" in template:
        # transformers takes the template of this name only where a caller passes the tools.
        tokenizer.chat_template = {**template, "default": template["tool_use"]}
    # "+%}" keeps the line break that may follow: trim_blocks would remove one from the beginning of the template.
    opening = "".join(
        _today(value)
        if name == TEMPLATE_DATE
        # apply_chat_template always passes tools, as none if the caller has not given any; an empty list means no tools.
        else f"{{%- if {name} is not defined{' or tools is none' if name == 'tools' else ''} %}}"
        f"{{%- set {name} = {_literal(value)} %}}{{%- endif +%}}"
        for name, value in sorted(values.items())
    )

    def opened(template: str) -> str:
        system, own = _split_system(template)
        # A tokenizer that was saved with a merged model has the defaults already.
        return system + (own if own.startswith(opening) else opening + _own_line(own))

    _change_templates(tokenizer, opened)


def template_variables(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Variables that the chat template does without where nobody sets them, such as enable_thinking."""
    template = tokenizer.chat_template or ""
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    own = set(re.findall(r"\b(?:set|for) +(\w+)", text)) - set().union(*(pattern.findall(text) for pattern in _DEFAULTS))
    return sorted(set(_ASKED_FOR.findall(text)) - own - _OF_CALLERS)


def _today(date: str) -> str:
    """A function strftime_now of the template that always writes this date. Of two, the first one counts."""
    day = datetime.fromisoformat(date)
    steps = [("%%", _PERCENT), *((directive, day.strftime(directive)) for directive in _DIRECTIVES), (_PERCENT, "%")]
    filters = "".join(f" | replace({_literal(old)}, {_literal(new)})" for old, new in steps)
    return (
        "{%- if date_of_the_training is not defined %}"
        f"{{%- set date_of_the_training = {_literal(date)} %}}"
        f"{{%- macro {TEMPLATE_DATE}(format) %}}{{{{- format{filters} -}}}}{{% endmacro %}}"
        "{%- endif +%}"
    )


def set_system_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> None:
    """Make the chat template begin conversations without a system message with this string, in place of an earlier one."""
    opening = _SYSTEM_START + _SYSTEM.replace("PROMPT", _literal(prompt)) + _SYSTEM_END
    _change_templates(tokenizer, lambda template: opening + _own_line(_split_system(template)[1]))


def _change_templates(tokenizer: "PreTrainedTokenizerBase", change: Callable[[str], str]) -> None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        tokenizer.chat_template = {name: change(text) for name, text in template.items()}
    elif template:
        tokenizer.chat_template = change(template)


def prepare(tokenizer: "PreTrainedTokenizerBase", model: ModelConfig, rollout: RolloutConfig) -> None:
    """Apply the settings of a run to the tokenizer of its base model, in place."""
    add_tokens(tokenizer, added_tokens(model))
    set_template_defaults(tokenizer, rollout.chat_template_kwargs)


def _split_system(template: str) -> tuple[str, str]:
    """What `set_system_prompt` wrote, empty if nothing, and the rest of the template."""
    if not template.startswith(_SYSTEM_START):
        return "", template
    # The prompt itself may contain the end marker, as a string; the template that follows never does.
    at = template.rindex(_SYSTEM_END) + len(_SYSTEM_END)
    return template[:at], template[at:]


def _own_line(template: str) -> str:
    """Without the spaces that lstrip_blocks would remove if nothing stood before them on their line."""
    return re.sub(r"^[ \t]+(?=\{[%#](?!\+))", "", template)


def _literal(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    # JSON and Jinja write strings, numbers and booleans alike; Jinja reads a string's escapes as Python does.
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """The tokens that `skip_special_tokens=True` leaves out when decoding, by token id."""
    # Not all_special_tokens: it lists only those with a role, and add_special_tokens removes others from that list.
    return {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def contains_special(text: str, special: Iterable[str]) -> bool:
    """Whether the text contains one of the special tokens."""
    return any(token in text for token in special)


class RefusedError(Exception):
    """The chat template cannot render these messages."""


def rendered(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], *, opened: bool) -> str:
    """Text of a chat by the tokenizer's template; with `opened` up to the beginning of the assistant's turn.

    Raises RefusedError where the template refuses the messages, ModelError where that of a strange model exceeds its limits.
    """
    [text] = rendered_all(tokenizer, [messages], opened=opened)
    if isinstance(text, RefusedError):
        raise text
    return text


def rendered_all(
    tokenizer: "PreTrainedTokenizerBase", chats: Sequence[Sequence[Mapping[str, Any]]], *, opened: bool
) -> list[str | RefusedError]:
    """As `rendered`, for many chats. Inside `limited_templates`, a process with limits renders them."""
    limited, found = limited_model(), list[str | RefusedError]()
    if limited is None:
        for chat in chats:
            messages = [dict(message) for message in chat]
            try:
                found.append(str(tokenizer.apply_chat_template(messages, add_generation_prompt=opened, tokenize=False)))
            except Exception as error:  # a template is a program: what it does not expect in a message can fail in any way
                found.append(_refusal(str(error)))
        return found
    template, special = tokenizer.get_chat_template(), tokenizer.special_tokens_map
    for start in range(0, len(chats), BATCH):
        texts, refused = limited.render(template, special, chats[start : start + BATCH], opened=opened)
        found += [_refusal(refused[index]) if index in refused else text for index, text in enumerate(texts)]
    return found


def _refusal(reason: str) -> RefusedError:
    return RefusedError(f"the chat template refuses the messages: {reason}"[:300])


def answered(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str] | None:
    """What the template writes before and behind the assistant's words; None if it leaves them out."""
    if not tokenizer.chat_template:
        return None
    try:
        text = rendered(tokenizer, [QUESTION, _ANSWER], opened=False)
    except RefusedError:
        return None
    before, found, behind = text.rpartition(PLACEHOLDER)
    return (before, behind) if found else None


def end_marker(tokenizer: "PreTrainedTokenizerBase", text: str) -> str | None:
    """The special token that ends a turn in its text: the end-of-text token, or else the first one."""
    if tokenizer.eos_token and tokenizer.eos_token in text:
        return str(tokenizer.eos_token)
    found = [token for token in special_tokens(tokenizer).values() if token in text]
    return min(found, key=text.index) if found else None


def turn_end(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """The special token that ends the assistant's turn in the chat template; None if the template writes none."""
    around = answered(tokenizer)
    return None if around is None else end_marker(tokenizer, around[1])


def text_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts that a model is to continue.

    What the tokenizer writes before any text, such as BOS, stands there once: a rendered prompt brings its own. Nothing is
    written behind the text: a model that has read EOS begins another one.
    """
    before, _ = surroundings(tokenizer)
    found = []
    for ids in tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]:
        # A text brings all of it, none, or the end of it.
        brought = next((count for count in range(len(before), 0, -1) if ids[:count] == before[-count:]), 0)
        missing = [] if ids[:1] == before[:1] else before[: len(before) - brought]
        found.append(missing + ids)
    return found


def surroundings(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer writes before and behind any text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    start = next(at for at in range(len(ids)) if ids[at : at + len(bare)] == bare)
    return ids[:start], ids[start + len(bare) :]


def prompt_ids(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a prompt up to the beginning of the assistant's turn; ModelError for a chat without a chat template."""
    if messages[0]["role"] == PLAIN:
        return text_ids(tokenizer, [messages[0]["content"]])[0]
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template", place=str(tokenizer.name_or_path), fix="use an instruct model, or plain prompts"
        )
    # The template writes special tokens such as BOS itself; the tokenizer must not add them a second time.
    text = tokenizer.apply_chat_template([dict(message) for message in messages], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def completion_text(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int], *, special: bool = False) -> str:
    """Text with its whitespace unchanged; with `special` it includes special tokens (end of turn, padding)."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def end_token_ids(tokenizer: "PreTrainedTokenizerBase", generation_eos: int | Sequence[int] | None) -> frozenset[int]:
    """Token ids that end a turn: the tokenizer's, those of the model's generation config, and the one of the chat template."""
    end = turn_end(tokenizer)
    listed = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    # A model that was tuned with this template ends with its token, whatever the other two name.
    ends = [tokenizer.eos_token_id, None if end is None else tokenizer.convert_tokens_to_ids(end), *listed]
    return frozenset(number for number in ends if number is not None)

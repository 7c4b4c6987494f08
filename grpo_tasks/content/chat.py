"""What a tokenizer and its chat template make of texts and turns, in one place, so that all who tokenise agree. Imports no torch.

text   --text_ids--> token ids of a prompt: one BOS, no EOS
chat   --rendered--> text by the template
turn   --turn_end--> the special token that the template writes behind what the assistant says
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_tasks.content.limited_model import BATCH, limited_model
from grpo_tasks.content.tokenizer import special_tokens
from schemas.config.rollout import TEMPLATE_DATE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "\ufdd0\ufdd1"
"""Stands for what somebody says. Unicode reserves these code points for use inside a program."""
QUESTION = {"role": "user", "content": "Hi"}
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_ANSWER = {"role": "assistant", "content": PLACEHOLDER}


class RefusedError(Exception):
    """The chat template cannot render these messages."""


def rendered(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], *, opened: bool) -> str:
    """Text of a chat by the tokenizer's template; with `opened` up to the beginning of the assistant's turn.

    Raises:
        RefusedError: the template refuses the messages.
        ModelError: the template of a strange model exceeds its limits.
    """
    [text] = rendered_all(tokenizer, [messages], opened=opened)
    if isinstance(text, RefusedError):
        raise text
    return text


def rendered_all(
    tokenizer: "PreTrainedTokenizerBase", chats: Sequence[Sequence[Mapping[str, Any]]], *, opened: bool
) -> list[str | RefusedError]:
    """As `rendered`, for many chats. Inside `limited_templates`, a process with limits renders them."""
    limited = limited_model()
    if limited is None:
        return [_rendered_here(tokenizer, chat, opened=opened) for chat in chats]
    template, special = tokenizer.get_chat_template(), tokenizer.special_tokens_map
    found: list[str | RefusedError] = []
    for start in range(0, len(chats), BATCH):
        texts, refused = limited.render(template, special, chats[start : start + BATCH], opened=opened)
        found += [_refusal(refused[index]) if index in refused else text for index, text in enumerate(texts)]
    return found


def _rendered_here(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], *, opened: bool
) -> str | RefusedError:
    try:
        chat = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(chat, add_generation_prompt=opened, tokenize=False))
    except Exception as error:  # a template is a program: what it does not expect in a message can fail in any way
        return _refusal(str(error))


def _refusal(reason: str) -> RefusedError:
    return RefusedError(f"the chat template refuses the messages: {reason}"[:300])


def answered(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str] | None:
    """What the template writes before and behind the assistant's words; None if it leaves them out or refuses the chat."""
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


def generation_eos(path: str, revision: str | None) -> int | list[int] | None:
    """End tokens of a model's generation config, by its files: without one, those of config.json, as transformers takes them."""
    from transformers.utils.hub import cached_file

    for name in ("generation_config.json", "config.json"):
        file = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            config = json.loads(Path(file).read_text(encoding="utf-8"))
            found: int | list[int] | None = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
            return found
    return None


def asks_for_date(path: str, revision: str | None) -> bool:
    """Whether a chat template of the model, by its files, writes the day on which it is rendered."""
    folder = Path(path)
    if folder.is_dir():
        files = [*(folder / name for name in _TEMPLATE_FILES), *sorted(folder.glob("additional_chat_templates/*.jinja"))]
    else:
        from transformers.utils.hub import cached_file

        found = []
        # What is wrong with a model says who loads it.
        with suppress(OSError):
            found = [
                cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
                for name in _TEMPLATE_FILES
            ]
        files = [Path(file) for file in found if file is not None]
    return any(TEMPLATE_DATE in file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())


def text_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts that a model is to continue.

    A text begins with what the tokenizer writes before any text, such as BOS, once: a prompt that a chat template has rendered
    brings its own. Nothing is written behind it: a model that has read EOS begins another text.
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

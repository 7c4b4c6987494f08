"""Chat messages to token ids, and completions back to text. The text of a completion is never tokenised again."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.tokenizer import special_tokens
from schemas.errors import ModelError
from schemas.prompts import PLAIN

Message = Mapping[str, str]


class RefusedError(Exception):
    """The chat template cannot render these messages."""


def rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, opened: bool) -> str:
    """Text of a chat by the tokenizer's template; with `opened` up to the beginning of the assistant's turn.

    Raises:
        RefusedError: the template refuses the messages.
    """
    try:
        chat = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(chat, add_generation_prompt=opened, tokenize=False))
    # A template is a program: what it does not expect in a message can fail in many ways.
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise RefusedError(f"the chat template refuses the messages: {error}"[:300]) from error


def end_marker(tokenizer: PreTrainedTokenizerBase, text: str) -> str | None:
    """The special token that ends a turn in its text: the end-of-text token, or else the first one."""
    if tokenizer.eos_token and tokenizer.eos_token in text:
        return str(tokenizer.eos_token)
    found = [token for token in special_tokens(tokenizer).values() if token in text]
    return min(found, key=text.index) if found else None


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a prompt.

    A chat is rendered by the tokenizer's template up to the beginning of the assistant's turn. A plain prompt is tokenised as it
    stands, with the special tokens that the tokenizer adds to any text, such as BOS.

    Raises:
        ModelError: the prompt is a chat and the tokenizer has no chat template.
    """
    if messages[0]["role"] == PLAIN:
        return tokenizer(messages[0]["content"])["input_ids"]
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template", place=str(tokenizer.name_or_path), fix="use an instruct model, or plain prompts"
        )
    # The template writes special tokens such as BOS itself; the tokenizer must not add them a second time.
    text = tokenizer.apply_chat_template([dict(message) for message in messages], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def completion_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, special: bool = False) -> str:
    """Text of a completion with its whitespace unchanged; with `special` it includes special tokens (end of turn, padding)."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def end_token_ids(tokenizer: PreTrainedTokenizerBase, generation_eos: int | Sequence[int] | None) -> frozenset[int]:
    """Token ids that end a turn: the tokenizer's and those of the model's generation config."""
    eos = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    if tokenizer.eos_token_id is not None:
        eos.append(tokenizer.eos_token_id)
    return frozenset(eos)

"""A prompt and the turns that continue it -> token ids, and which of them the assistant wrote.

    prompt | said <end> | \n user ... assistant | said <end>
             1   1   1    0  0        0           1    1   1      trained

The chat template is the only one that writes markers. The prompt is tokenised as sampling does it, and each later part by itself,
so what is trained on follows the prompt as a completion would. An assistant's turn includes its end marker: the policy learns to
stop. Whatever the template writes behind the marker belongs to the next turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_tasks.policy.chat import RefusedError, end_marker, prompt_ids, rendered
from schemas.prompts import PLAIN

Turn = Mapping[str, Any]
"""A chat message: role and content, and what else a template knows, such as tool_calls."""


class UnusableError(Exception):
    """A demonstration cannot be trained on: the name of the reason, and a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What continues a prompt, as tokens."""

    prompt: list[int]
    """Token ids of the prompt."""
    token_ids: list[int]
    """Token ids of everything after the prompt."""
    trained: list[bool]
    """For each of them whether the assistant wrote it."""
    text: str
    """What the assistant wrote, its turns joined by a blank line."""


def encode_turns(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[Turn], turns: Sequence[Turn]) -> Demonstration:
    """Tokens of a prompt and the turns that follow it.

    Raises:
        UnusableError: the chat template refuses the turns, or does not leave earlier turns as they were.
        ModelError: the prompt is a chat and the tokenizer has no chat template.
    """
    said = [str(turn.get("content") or "") for turn in turns if turn["role"] == "assistant"]
    ids, trained = [], []
    if prompt[0]["role"] == PLAIN:
        ids = tokenizer("".join(said), add_special_tokens=False)["input_ids"] + _end(tokenizer)
        trained = [True] * len(ids)
    else:
        for text, mine in _parts(tokenizer, prompt, turns):
            more = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
            # A template without an end marker leaves the policy without a way to stop.
            more += _end(tokenizer) if mine and not end_marker(tokenizer, text) else []
            ids += more
            trained += [mine] * len(more)
    return Demonstration(prompt_ids(tokenizer, prompt), ids, trained, "\n\n".join(said))


def _parts(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[Turn], turns: Sequence[Turn]) -> list[tuple[str, bool]]:
    """Texts after the prompt in order, each with whether the assistant wrote it; nothing after its last turn."""
    written = _render(tokenizer, prompt, opened=True)
    parts: list[tuple[str, bool]] = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before = _render(tokenizer, [*prompt, *turns[:index]], opened=True)
        after = _render(tokenizer, [*prompt, *turns[: index + 1]], opened=False)
        if not before.startswith(written) or not after.startswith(before):
            raise UnusableError("template", "the chat template writes earlier turns differently once more follow")
        said = after[len(before) :]
        marker = end_marker(tokenizer, said)
        if marker:
            said = said[: said.index(marker) + len(marker)]
        parts += [(before[len(written) :], False), (said, True)]
        written = before + said
    return parts


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Turn], *, opened: bool) -> str:
    try:
        return rendered(tokenizer, messages, opened=opened)
    except RefusedError as error:
        raise UnusableError("template", str(error)) from error


def _end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]

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

from grpo_tasks.content.chat import RefusedError, end_marker, rendered, turn_end
from grpo_tasks.policy.chat import prompt_ids
from schemas.prompts import PLAIN

_SHOWN = 80
"""Characters of a text that an error shows."""
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
    written, end = _render(tokenizer, prompt, opened=True), turn_end(tokenizer)
    parts: list[tuple[str, bool]] = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before = _render(tokenizer, [*prompt, *turns[:index]], opened=True)
        after = _render(tokenizer, [*prompt, *turns[: index + 1]], opened=False)
        if not before.startswith(written):
            raise UnusableError("template", "the chat template writes earlier turns differently once more follow")
        if not after.startswith(before):
            opening = before.removeprefix(_render(tokenizer, [*prompt, *turns[:index]], opened=False))
            raise UnusableError("template", _otherwise_opened(opening))
        said = after[len(before) :]
        marker = end if end is not None and end in said else end_marker(tokenizer, said)
        if marker:
            said = said[: said.index(marker) + len(marker)]
        _check_complete(turn, said)
        parts += [(before[len(written) :], False), (said, True)]
        written = before + said
    return parts


def _check_complete(turn: Turn, said: str) -> None:
    """Refuse a turn whose text the template does not write in full; only whitespace may differ."""
    content = str(turn.get("content") or "")
    if _compact(content) in _compact(said):
        return
    thought, tag, answer = content.rpartition("</think>")
    keeps_answer = bool(tag and thought) and _compact(answer) in _compact(said)
    what = f"what stands before {tag}" if keeps_answer else "a part"
    raise UnusableError(
        "cut_by_template",
        f"the chat template leaves out {what}: of {len(content):,} characters it writes {_short(said)}; use a template that "
        "keeps them, for example by rollout.chat_template_kwargs, or demonstrations without them",
    )


def _otherwise_opened(opening: str) -> str:
    """Why a demonstration cannot follow its prompt."""
    return (
        f"the chat template itself opens the turn with {_short(opening)}, and begins a finished turn otherwise, so the "
        "demonstration would not follow its prompt; use a template that writes both alike"
    )


def _compact(text: str) -> str:
    return "".join(text.split())


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…")


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Turn], *, opened: bool) -> str:
    try:
        return rendered(tokenizer, messages, opened=opened)
    except RefusedError as error:
        raise UnusableError("template", str(error)) from error


def _end(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]

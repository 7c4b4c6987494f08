"""Messages -> the tokens that continue a conversation behind the policy's turn. What was sampled is never tokenised again.

    template: ... <start>assistant \n PLACEHOLDER <end> \n <start>tool \n 42 <end> \n <start>assistant \n
    tokens:   ............ as sampled ............ <end> \n <start>tool \n 42 <end> \n <start>assistant \n
                                                         |------------- new, not written by the policy ---|

The chat template is the only one that writes markers. A marker inside a message stays text: it is taken out before the template
is rendered, and its characters come back as ordinary tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.chat import PLACEHOLDER, RefusedError, rendered, turn_end
from grpo_tasks.content.tokenizer import special_tokens
from grpo_tasks.environments.calls import END_MARKS
from grpo_tasks.rollout.conversations.record import Message
from schemas.errors import ModelError

_STAND_IN, _FIRST = "\ufdd2", 0xE000
"""As PLACEHOLDER, taken out of every message."""


class TurnTokens:
    """Token ids of prompts and of what follows a turn.

    Raises:
        ModelError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            fix = "use an instruct model: messages of tools and environments need a chat template"
            raise ModelError("the tokenizer has no chat template", place=str(tokenizer.name_or_path), fix=fix)
        self._tokenizer = tokenizer
        special = special_tokens(tokenizer)
        self._special_ids = frozenset(special)
        # The longest first: a marker may begin with another one.
        self._markers = sorted(special.values(), key=len, reverse=True)
        self._end = turn_end(tokenizer) or ""
        # The limit of its length may cut a turn behind any other special token, such as the opening of a turn.
        ends = {*END_MARKS, self._end, tokenizer.eos_token}
        self._end_ids = frozenset(number for number, marker in special.items() if marker in ends)

    def closed(self, token_ids: Sequence[int]) -> bool:
        """True if the policy wrote the end of its turn."""
        return bool(token_ids) and token_ids[-1] in self._end_ids

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a prompt, up to the beginning of the policy's turn."""
        return self._encode(self._render([self._safe(message) for message in messages], opened=True))

    def after(self, before: Sequence[Message], turn: Message, answers: Sequence[Message], *, closed: bool) -> list[int]:
        """Token ids between two turns of the policy: the end of the first one if it is missing, the answers, the next opening.

        Args:
            before: all messages before the first turn.
            turn: the first turn.
            answers: what was said after it.
            closed: whether the policy wrote the end of its turn.
        """
        history = [self._safe(message) for message in before]
        said = [self._safe(message) for message in answers]
        text = self._continued(history, self._safe(turn), said)
        if self._end:
            text = text[text.index(self._end) + len(self._end) :]
        return self._encode(text if closed else self._end_text() + text)

    def _continued(self, history: Sequence[Message], turn: Message, said: Sequence[Message]) -> str:
        """What the template writes behind the policy's words."""
        plain = {"role": "assistant", "content": PLACEHOLDER}
        try:
            text = rendered(self._tokenizer, [*history, plain, *said], opened=True)
        except RefusedError:
            # Some templates accept the answer of a tool only after a turn with calls.
            text = self._render([*history, {**turn, "content": PLACEHOLDER}, *said], opened=True)
        _, found, behind = text.rpartition(PLACEHOLDER)
        if not found or (self._end and self._end not in behind):
            raise self._refused("the chat template leaves out the assistant's turn before an answer")
        return behind

    def _end_text(self) -> str:
        return self._end or str(self._tokenizer.eos_token or "")

    def _render(self, messages: Sequence[Message], *, opened: bool) -> str:
        try:
            return rendered(self._tokenizer, messages, opened=opened)
        except RefusedError as error:
            raise self._refused(str(error)) from error

    def _refused(self, reason: str) -> ModelError:
        fix = "use a model whose template knows the roles of the conversation (tool, user), or change the environment's messages"
        return ModelError(reason, place=str(self._tokenizer.name_or_path), fix=fix)

    def _safe(self, message: Message) -> dict[str, Any]:
        """The message with a stand-in for each marker in its texts, names of arguments included."""
        return {str(self._without_markers(key)): self._without_markers(value) for key, value in message.items()}

    def _without_markers(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            # Keys too: a template may write the arguments of a call, whose names the policy has chosen.
            return {str(self._without_markers(key)): self._without_markers(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._without_markers(item) for item in value]
        if not isinstance(value, str):
            return value
        # Halves of surrogate pairs have no form in UTF-8, which tokenizers read.
        text = value.encode(errors="replace").decode()
        for reserved in (*PLACEHOLDER, _STAND_IN):
            text = text.replace(reserved, "\ufffd")
        for index, marker in enumerate(self._markers):
            text = text.replace(marker, _STAND_IN + chr(_FIRST + index) + _STAND_IN)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(text.split(_STAND_IN)):
            # Every second part is the number of a marker that a message held.
            ids += self._as_text(self._markers[ord(part) - _FIRST]) if index % 2 else self._tokens(part)
        return ids

    def _tokens(self, text: str, **settings: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, **settings)["input_ids"]) if text else []

    def _as_text(self, marker: str) -> list[int]:
        """A marker's characters as ordinary tokens."""
        ids = self._tokens(marker, split_special_tokens=True)
        if self._special_ids.intersection(ids):
            ids = [token for character in marker for token in self._tokens(character)]
        return [token for token in ids if token not in self._special_ids]

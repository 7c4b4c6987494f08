"""What was said in a conversation, turn by turn: for rewards, metrics and tables. The trainer reads the tokens only."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = Mapping[str, Any]
"""A chat message: role and content, and what else a template knows, such as tool_calls and name."""
Ending = Literal["done", "turns", "tokens", "error"]
"""done: the environment ended it. turns, tokens: it ran out of them. error: a fault of the environment."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy."""

    start: int
    """Index of its first token in the completion."""
    end: int
    """Index behind its last token."""
    text: str
    finish_reason: Literal["stop", "length"]
    message: Message
    """The turn as a message, with its calls as they were understood."""
    answers: Sequence[Message] = ()
    """What was said after it."""
    reward: float | None = None
    """What the environment gave for it."""
    calls: int = 0
    """Calls of tools, refused ones included."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What else the environment told."""

    @property
    def errors(self) -> int:
        """Calls that were answered with an error."""
        return sum(answer.get("role") == "tool" and _is_error(answer.get("content")) for answer in self.answers)

    def for_rewards(self) -> dict[str, Any]:
        """What a reward function gets of the turn."""
        said = {"text": self.text, "start": self.start, "end": self.end, "finish_reason": self.finish_reason}
        return said | {"reward": self.reward, "calls": self.calls, "errors": self.errors, "info": dict(self.info)}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that is over."""

    prompt_ids: Sequence[int]
    """Token ids of its prompt."""
    prompt: Sequence[Message]
    """The messages of its prompt."""
    turns: Sequence[Turn]
    ending: Ending
    error: str | None = None
    """Why it ended, where that was a fault of the environment."""
    final_reward: float | None = None
    """What the environment gave for the whole of it after a limit had ended it; 0 where it gave nothing then."""

    @property
    def said(self) -> list[dict[str, Any]]:
        """All messages after the prompt."""
        return [dict(message) for turn in self.turns for message in (turn.message, *turn.answers)]

    @property
    def reward(self) -> float | None:
        """Sum of what the environment gave; None if it gave nothing."""
        given = [reward for reward in (*(turn.reward for turn in self.turns), self.final_reward) if reward is not None]
        return sum(given) if given else None

    @property
    def calls(self) -> int:
        """Calls of tools, refused ones included."""
        return sum(turn.calls for turn in self.turns)

    @property
    def errors(self) -> int:
        """Calls that were answered with an error."""
        return sum(turn.errors for turn in self.turns)

    def as_json(self) -> str:
        """The conversation as one JSON object, for tables."""
        turns = [turn.for_rewards() | {"message": turn.message, "answers": list(turn.answers)} for turn in self.turns]
        ended = {"ending": self.ending, "error": self.error, "reward": self.reward}
        shown = {"prompt": list(self.prompt), "turns": turns, **ended}
        # Text of a policy may hold halves of surrogate pairs, which UTF-8 has no form for: escapes are plain ASCII.
        return json.dumps(shown, default=str)


def _is_error(content: object) -> bool:
    if not isinstance(content, str) or not content.lstrip().startswith("{"):
        return False
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and "error" in found

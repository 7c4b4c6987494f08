"""The two forms of a prompt, which are TRL's: chat messages (conversational), or one plain string (standard). And its samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PLAIN = "plain"
"""Role of the only message of a prompt in the standard format. Its content is tokenised as it stands, without a chat template,
and reward functions receive the prompt and the completions as strings."""

GREEDY = -1
"""Number of the greedy completion among the samples of a held-out prompt; the others count from 0."""

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One accepted row (schemas/tables.py Prompts), from the table to the rewards."""

    prompt_id: str
    source: str
    line: int
    messages: tuple[Message, ...]
    answer: str | None
    """Ground truth, normalised; the first of several."""
    prompt_tokens: int
    extra: Mapping[str, Any]
    """Other columns, which reward functions get as keyword arguments."""
    answers: tuple[str, ...] | None = None
    """Every ground truth where the data lists several."""
    task: str = ""
    pass_rate: float | None = None
    """Share of completions that solve the prompt, measured before training, with its interval; None where unknown."""
    pass_rate_low: float | None = None
    pass_rate_high: float | None = None

    @property
    def truths(self) -> tuple[str, ...]:
        """The right answers; empty for a row without ground truth."""
        return self.answers or (() if self.answer is None else (self.answer,))

    @property
    def given_answer(self) -> Any:
        """What a user's function receives as `answer`: the ground truth, or a list of several. Objects, and the column `answer`
        of a row without ground truth, are given as they stand in the data."""
        own = self.extra.get("answer")
        holds_object = any(isinstance(one, Mapping) for one in (own if isinstance(own, list) else [own]))
        if holds_object or self.answer is None:
            return own
        return self.answer if self.answers is None else list(self.answers)

    @property
    def plain(self) -> bool:
        """Whether the prompt is a string in TRL's standard format, and not chat messages."""
        return self.messages[0]["role"] == PLAIN

"""The column `conversation` of a table: for reward functions, whose processes have no polars, and as text, turn by turn."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, slots=True)
class Played:
    """What a conversation adds to its completion."""

    prompt: Sequence[Mapping[str, Any]]
    said: Sequence[Mapping[str, Any]]
    """All messages after the prompt."""
    turns: Sequence[Mapping[str, Any]]
    """The policy's turns, as functions get them; `start` and `end` are token indices."""
    reward: float | None
    """Sum of what the environment gave."""
    failed: bool = False
    """A fault of the environment ended it. No function is called for it; `charge_faults` says what it gets."""
    answered: bool = True
    """False for a completion that the lab has made up: there is no environment that could be asked about it."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First token of each turn, and the one behind its last."""
        return [(turn["start"], turn["end"]) for turn in self.turns]


def played_of(text: str) -> Played:
    """The conversation of a table's column `conversation`."""
    found = json.loads(text)
    turns = found["turns"]
    said = [message for turn in turns for message in (turn.pop("message"), *turn.pop("answers"))]
    return Played(found["prompt"], said, turns, found["reward"], found["error"] is not None)


def fault_of(text: str) -> str | None:
    """The fault that ended the conversation of a table's column `conversation`; None if there was none."""
    error = json.loads(text)["error"]
    return None if error is None else str(error)


def turn_by_turn(table: "pl.DataFrame") -> "pl.DataFrame":
    """The table with whole conversations in the column `completion`, where it has the column `conversation`."""
    import polars as pl

    if "conversation" not in table.columns:
        return table
    shown = pl.col("conversation").map_elements(spoken, return_dtype=pl.String)
    return table.with_columns(shown.fill_null(pl.col("completion")).alias("completion")).drop("conversation")


def spoken(conversation: str) -> str:
    """The text of one conversation (rollout/engine.py); raises ValueError for what is no JSON."""
    found = json.loads(conversation)
    lines = []
    for number, turn in enumerate(found["turns"], start=1):
        given = "" if turn["reward"] is None else f" (reward {turn['reward']:g})"
        lines.append(f"[turn {number}{given}] {turn['text']}")
        lines += [f"[{answer.get('role', '')}] {answer.get('content', '')}" for answer in turn["answers"]]
    endings = {"turns": "out of turns", "tokens": "out of tokens", "error": f"error: {found['error']}"}
    if found["ending"] in endings:
        lines.append(f"[{endings[found['ending']]}]")
    # Half of a surrogate pair, which JSON can hold, has no form in UTF-8.
    return "\n".join(lines).encode(errors="replace").decode()

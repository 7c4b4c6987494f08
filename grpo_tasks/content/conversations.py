"""Conversations of a table as text for people, turn by turn."""

import json

import polars as pl


def turn_by_turn(table: pl.DataFrame) -> pl.DataFrame:
    """The table with whole conversations in the column `completion`, where it has the column `conversation`."""
    if "conversation" not in table.columns:
        return table
    shown = pl.col("conversation").map_elements(spoken, return_dtype=pl.String)
    return table.with_columns(shown.fill_null(pl.col("completion")).alias("completion")).drop("conversation")


def spoken(conversation: str) -> str:
    """The text of one conversation (rollout/conversations/record.py).

    Raises:
        ValueError: the text is no JSON.
    """
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

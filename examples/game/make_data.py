"""Writes data.jsonl: 500 games, each with a number of sticks from which the first player can win."""

import json
from pathlib import Path

STICKS = (3, 5, 6, 7, 9, 10, 11, 13, 14, 15)


def games(count: int) -> list[dict[str, str | int]]:
    """`count` games. The number of a game decides how its opponent plays where every move loses."""
    return [
        {"question": f"Game {number}. {sticks} left.", "sticks": sticks, "game": number}
        for number in range(1, count + 1)
        for sticks in [STICKS[number % len(STICKS)]]
    ]


if __name__ == "__main__":
    lines = [json.dumps(game) for game in games(500)]
    Path(__file__).with_name("data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

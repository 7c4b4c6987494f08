"""Writes data.jsonl: 200 requests for a short text. There is no ground truth."""

import json
import random
from pathlib import Path

KINDS = ("a sentence", "a slogan", "a wish", "a rhyme", "a note")
THINGS = ("the sea", "a lamp", "the rain", "an old map", "a friend", "the harbour", "a clock", "the garden")
MOODS = ("calm", "glad", "brave", "tired", "proud")


def requests(count: int, seed: int = 5) -> list[dict[str, str]]:
    """`count` different requests."""
    random_numbers = random.Random(seed)
    every = [f"Write {kind} about {thing}, in a {mood} voice." for kind in KINDS for thing in THINGS for mood in MOODS]
    return [{"prompt": text} for text in random_numbers.sample(every, count)]


if __name__ == "__main__":
    lines = [json.dumps(request) for request in requests(200)]
    Path(__file__).with_name("data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

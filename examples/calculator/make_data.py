"""Writes data.jsonl: 1000 products of two numbers from 320 to 999, so that each has six digits."""

import json
import random
from pathlib import Path


def products(count: int, seed: int = 7) -> list[dict[str, str]]:
    """`count` different questions. In every fourth row the demonstration is an estimate: both numbers are rounded."""
    random_numbers, found = random.Random(seed), {}
    while len(found) < count:
        left, right = random_numbers.randint(320, 999), random_numbers.randint(320, 999)
        expression = f"{left} * {right}"
        estimate = str(round(left, -2) * round(right, -2)) if len(found) % 4 == 3 else ""
        found[expression] = {
            "question": f"What is {expression}?",
            "expression": expression,
            "answer": str(left * right),
            "estimate": estimate,
        }
    return list(found.values())


if __name__ == "__main__":
    lines = [json.dumps(row) for row in products(1000)]
    Path(__file__).with_name("data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

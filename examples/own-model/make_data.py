"""Writes data.jsonl: 300 sums and differences of two numbers, the one thing the model inside the project has seen."""

import json
import random
from pathlib import Path


def sums(count: int, seed: int = 4) -> list[dict[str, str]]:
    """`count` different questions; the answer is between 0 and 198."""
    random_numbers, found = random.Random(seed), {}
    while len(found) < count:
        right, left = sorted(random_numbers.choices(range(10, 100), k=2))
        sign = random_numbers.choice("+-")
        question = f"What is {left} {sign} {right}?"
        found[question] = {"question": question, "answer": str(left + right if sign == "+" else left - right)}
    return list(found.values())


if __name__ == "__main__":
    lines = [json.dumps(row) for row in sums(300)]
    Path(__file__).with_name("data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

"""Writes data.jsonl: 300 sums of two numbers, each with a worked solution in the format that the rewards ask for."""

import json
import random
from pathlib import Path


def worked(left: int, right: int) -> str:
    """The calculation digit by digit, and the answer that follows from it."""
    ones = left % 10 + right % 10
    tens = left // 10 + right // 10 + ones // 10
    carry = "+1" if ones > 9 else ""
    steps = f"ones {left % 10}+{right % 10}={ones}, tens {left // 10}+{right // 10}{carry}={tens}"
    return f"<reasoning>{steps}</reasoning><answer>{10 * tens + ones % 10}</answer>"


def sums(count: int, seed: int = 4) -> list[dict[str, str]]:
    """`count` different questions; the answer is between 20 and 198."""
    random_numbers, found = random.Random(seed), {}
    while len(found) < count:
        left, right = random_numbers.choices(range(10, 100), k=2)
        question = f"What is {left} + {right}?"
        found[question] = {"question": question, "answer": str(left + right), "solution": worked(left, right)}
    return list(found.values())


if __name__ == "__main__":
    lines = [json.dumps(row) for row in sums(300)]
    Path(__file__).with_name("data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

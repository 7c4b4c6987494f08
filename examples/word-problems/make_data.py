"""Writes data.jsonl: 300 word problems about two numbers, each with its working and, after `####`, its answer."""

import json
import random
from pathlib import Path

NAMES = ("Anna", "Ben", "Clara", "David", "Elif", "Femi", "Grace", "Hugo")
THINGS = ("apples", "stamps", "marbles", "cards", "pencils", "shells")
GAIN = "{name} has {left} {things} and finds {right} more. How many {things} does {name} have now?"
LOSS = "{name} has {left} {things} and gives away {right}. How many {things} does {name} have left?"


def problems(count: int, seed: int = 1) -> list[dict[str, str]]:
    """`count` different problems; the answer is between 10 and 198."""
    random_numbers, found = random.Random(seed), {}
    while len(found) < count:
        small, large = sorted(random_numbers.choices(range(10, 100), k=2))
        gain = random_numbers.random() < 0.5
        if not gain and large - small < 10:
            continue
        left, right, sign = (small, large, "+") if gain else (large, small, "-")
        result = left + right if gain else left - right
        name, things = random_numbers.choice(NAMES), random_numbers.choice(THINGS)
        question = (GAIN if gain else LOSS).format(name=name, things=things, left=left, right=right)
        found[question] = {"question": question, "answer": f"{left} {sign} {right} = {result}\n#### {result}"}
    return list(found.values())


if __name__ == "__main__":
    lines = [json.dumps(problem) for problem in problems(300)]
    Path(__file__).with_name("data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

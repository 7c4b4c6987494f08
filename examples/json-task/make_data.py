"""Writes data.jsonl: 240 sentences about purchases, each with the JSON object that a reply should hold."""

import json
import random
from pathlib import Path

NAMES = ("Anna", "Ben", "Clara", "David", "Elif", "Femi", "Grace", "Hugo")
ITEMS = ("apples", "stamps", "pencils", "shells", "cups", "ropes")


def orders(count: int, seed: int = 3) -> list[dict[str, str | int]]:
    """`count` different sentences, each with the item and the number of pieces."""
    random_numbers, found = random.Random(seed), {}
    while len(found) < count:
        name, item, quantity = random_numbers.choice(NAMES), random_numbers.choice(ITEMS), random_numbers.randrange(2, 100)
        question = f"{name} buys {quantity} {item}. Which item, and how many?"
        found[question] = {"question": question, "answer": quantity, "item": item}
    return list(found.values())


if __name__ == "__main__":
    lines = [json.dumps(order) for order in orders(240)]
    Path(__file__).with_name("data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

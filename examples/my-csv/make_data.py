"""Writes data.csv: 240 price questions with the answer and the currency in columns of their own."""

import csv
import random
from pathlib import Path

THINGS = ("pens", "mugs", "lamps", "hats", "books", "chairs", "maps", "kites")
CURRENCIES = ("euros", "dollars", "pounds", "yen")


def rows(count: int, seed: int = 2) -> list[dict[str, str]]:
    """`count` different questions about the price of several equal things."""
    random_numbers, found = random.Random(seed), {}
    while len(found) < count:
        amount, price = random_numbers.randint(2, 9), random_numbers.randint(2, 19)
        things, currency = random_numbers.choice(THINGS), random_numbers.choice(CURRENCIES)
        question = f"One of the {things} costs {price} {currency}. What do {amount} {things} cost?"
        found[question] = {"question": question, "expert_answer": str(amount * price), "currency": currency}
    return list(found.values())


if __name__ == "__main__":
    with Path(__file__).with_name("data.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["question", "expert_answer", "currency"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows(240))

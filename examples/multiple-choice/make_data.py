"""Writes data.jsonl: 240 questions with four options each; the answer is the letter of the right one."""

import json
import random
from pathlib import Path

LETTERS = "ABCD"
ASKED = {"largest": max, "smallest": min}


def questions(count: int, seed: int = 3) -> list[dict[str, str]]:
    """`count` different questions for the largest or smallest of four different numbers."""
    random_numbers, found = random.Random(seed), {}
    while len(found) < count:
        numbers = random_numbers.sample(range(10, 100), k=4)
        word = random_numbers.choice(sorted(ASKED))
        options = "\n".join(f"({letter}) {number}" for letter, number in zip(LETTERS, numbers, strict=True))
        question = f"Which number is the {word}?\n{options}"
        found[question] = {"question": question, "answer": LETTERS[numbers.index(ASKED[word](numbers))]}
    return list(found.values())


if __name__ == "__main__":
    lines = [json.dumps(question) for question in questions(240)]
    Path(__file__).with_name("data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

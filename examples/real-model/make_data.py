"""Writes train.jsonl and test.jsonl: messages of customers to a shop, with what a reply has to name.

Names, items, faults and phrases are put together by chance. The held-out messages have customers and items of their own.
"""

import json
import random
from pathlib import Path

NAMES = [
    "Alma", "Anton", "Bella", "Bram", "Carla", "Cyrus", "Dario", "Dora", "Edith", "Emil", "Felix", "Flora", "Gideon",
    "Greta", "Helga", "Hugo", "Irma", "Ivan", "Jonas", "Judith", "Karin", "Klaus", "Lena", "Lydia", "Marek", "Milo",
    "Nadia", "Nora", "Oskar", "Otto", "Paula", "Petra", "Quinn", "Rosa", "Rufus", "Silas", "Sonja", "Tilda", "Tomas",
    "Ugo", "Ursula", "Vera", "Viktor", "Wanda", "Wilma", "Xenia", "Yara", "Yusuf", "Zeno", "Zora",
]  # fmt: skip
ITEMS = [
    "alarm clock", "baking tray", "beach towel", "bike helmet", "board game", "bread knife", "camping tent",
    "coffee grinder", "desk fan", "desk lamp", "door mat", "fishing rod", "garden hose", "hair dryer", "kitchen scale",
    "laptop stand", "leather belt", "mirror cabinet", "music box", "night light", "office chair", "paper lantern",
    "phone case", "picture frame", "rain jacket", "salad bowl", "sewing kit", "shower curtain", "snow shovel",
    "soup bowl", "spice rack", "tea kettle", "tool bag", "travel mug", "wall clock", "water bottle", "winter scarf",
    "wool blanket", "yoga mat",
]  # fmt: skip
FAULTS = [
    "arrived broken", "arrived twice", "came without a manual", "does not look like the picture", "has not arrived",
    "has the wrong color", "is missing a part", "is scratched", "is too small", "smells strange",
    "stopped working after two days", "was left at the wrong door",
]  # fmt: skip
MESSAGES = (
    "Hello, this is {name}. The {item} from my order {order} {fault}. What can I do?",
    "My {item} {fault}. Order {order}. Please help me. {name}",
    "Hi! I ordered the {item} last week (number {order}), but it {fault}. Regards, {name}",
    "I am not happy: order {order}, the {item}, {fault}. My name is {name}.",
    "Good morning, {name} here. It is about order number {order}. The {item} {fault}, and I need it soon.",
    "{name} writes: the {item} {fault}! The order was {order}.",
)
HELD_OUT_NAMES, HELD_OUT_ITEMS = 10, 8


def messages(count: int, names: list[str], items: list[str], chance: random.Random) -> list[dict[str, str]]:
    """`count` rows."""
    rows = []
    for _ in range(count):
        facts = {"name": chance.choice(names), "item": chance.choice(items), "order": str(chance.randint(10_000, 99_999))}
        rows.append({"message": chance.choice(MESSAGES).format(**facts, fault=chance.choice(FAULTS)), **facts})
    return rows


if __name__ == "__main__":
    chance = random.Random(0)
    names, items = chance.sample(NAMES, len(NAMES)), chance.sample(ITEMS, len(ITEMS))
    train = messages(600, names[HELD_OUT_NAMES:], items[HELD_OUT_ITEMS:], chance)
    test = messages(200, names[:HELD_OUT_NAMES], items[:HELD_OUT_ITEMS], chance)
    for name, rows in (("train.jsonl", train), ("test.jsonl", test)):
        lines = [json.dumps(row) for row in rows]
        Path(__file__).with_name(name).write_text("\n".join(lines) + "\n", encoding="utf-8")

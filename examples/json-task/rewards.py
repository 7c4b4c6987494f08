"""A reward function of our own: does the JSON object of a reply name the item of the row?"""

import json


def names_item(prompts, completions, item, **columns):
    """1.0 for a JSON object whose `item` is that of the row, 0.5 for one with another item, else 0.0.

    Args:
        prompts: the chats, not used here.
        completions: one reply each, as a list of messages; the last message is the assistant's.
        item: the column `item` of the rows, one value for each completion.
        columns: every other column of the rows, and what else the trainer passes.
    """
    return [score(completion[-1]["content"], wanted) for completion, wanted in zip(completions, item, strict=True)]


def score(reply: str, wanted: str) -> float:
    """The score of one reply."""
    try:
        found = json.loads(reply)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(found, dict) or not isinstance(found.get("item"), str):
        return 0.0
    return 1.0 if found["item"].strip().lower() == wanted else 0.5

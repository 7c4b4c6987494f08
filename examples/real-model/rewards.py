"""What the shop asks of a text message. Each rule is a reward function, so a reply that keeps some of them earns something."""

import re

LONGEST = 160
"""Characters of a text message."""
COPIED = 6
"""Words in a row that a reply may not have in common with the message."""


def short(completions, **columns):
    """1.0 up to 160 characters, and less the longer a reply is; 0.0 for an empty one."""
    return [min(1.0, LONGEST / len(text(each))) if text(each) else 0.0 for each in completions]


def asks(completions, **columns):
    """1.0 for a reply that ends with a question."""
    return [float(text(each).endswith("?")) for each in completions]


def apologizes(completions, **columns):
    """1.0 for a reply that says sorry."""
    return [float(re.search(r"\b(sorry|apolog)", text(each).lower()) is not None) for each in completions]


def own_words(prompts, completions, **columns):
    """1.0 for a reply that does not repeat six words of the message in a row; 0.0 for an empty one."""
    pairs = [(text(completion), text(prompt)) for prompt, completion in zip(prompts, completions, strict=True)]
    return [float(bool(reply) and not copies(reply, message)) for reply, message in pairs]


def names_customer(completions, name, **columns):
    """1.0 for a reply with the name of the customer."""
    return [float(wanted in text(each)) for each, wanted in zip(completions, name, strict=True)]


def names_item(completions, item, **columns):
    """1.0 for a reply with the item."""
    return [float(wanted in text(each).lower()) for each, wanted in zip(completions, item, strict=True)]


def names_order(completions, order, **columns):
    """1.0 for a reply with the order number."""
    return [float(wanted in text(each)) for each, wanted in zip(completions, order, strict=True)]


def complete(prompts, completions, name, item, order, **columns):
    """1.0 for a reply that keeps all rules."""
    rules = (
        short(completions), asks(completions), apologizes(completions), own_words(prompts, completions),
        names_customer(completions, name), names_item(completions, item), names_order(completions, order),
    )  # fmt: skip
    return [float(min(scores) == 1.0) for scores in zip(*rules, strict=True)]


def copies(reply, message):
    """Whether a reply has six words in a row that the message has, too."""
    runs = [words_in_a_row(each) for each in (reply, message)]
    return not runs[0].isdisjoint(runs[1])


def words_in_a_row(written):
    """All runs of six words of a text."""
    words = re.findall(r"\w+", written.lower())
    return {tuple(words[start : start + COPIED]) for start in range(len(words) - COPIED + 1)}


def text(messages):
    """The text of the last message: of a reply, or of what the customer wrote."""
    return messages[-1]["content"].strip()

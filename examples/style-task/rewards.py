"""Two reward functions for a style: plain letters, and a length that suits a short text. Neither needs a ground truth."""

SHORT_CHARS, LONG_CHARS = 20, 80


def plain_letters(prompts, completions, **columns):
    """Share of lower-case letters, spaces, commas and full stops among the characters; 0.0 for an empty text.

    The prompts of this example are plain strings, so the completions are plain strings too.
    """
    return [
        sum(letter in " ,." or letter.islower() for letter in text) / len(text) if text.strip() else 0.0 for text in completions
    ]


def plain_share(text):
    """The share for one text."""
    return sum(letter in " ,." or letter.islower() for letter in text) / len(text) if text.strip() else 0.0


def suitable_length(completions, **columns):
    """1.0 for 20 to 80 characters, and less the further a text is from that."""
    return [length_score(len(text.strip())) for text in completions]


def length_score(length: int) -> float:
    """1.0 within the limits; below and above them it falls in proportion."""
    if length < SHORT_CHARS:
        return length / SHORT_CHARS
    return min(1.0, LONG_CHARS / length)

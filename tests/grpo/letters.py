"""A reward that tells any two texts apart, for models with random weights."""


def letters(completions, **_):
    """The mean code of the characters, in hundreds."""
    return [sum(map(ord, text)) / (100 * max(1, len(text))) for text in completions]

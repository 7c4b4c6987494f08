"""Reward functions of tests."""


def letters(completions, **_):
    """The mean code of the characters, in hundreds: it tells any two texts apart, for models with random weights."""
    return [sum(map(ord, text)) / (100 * max(1, len(text))) for text in completions]


def shape(prompts, completions, messages, turns, environment_reward, completion_ids, **columns):
    """1 where everything that a function gets of a conversation fits together."""
    scores = []
    for before, after, whole, each, reward, ids in zip(
        prompts, completions, messages, turns, environment_reward, completion_ids, strict=True
    ):
        fits = whole == before + after and [one["role"] for one in after] == ["assistant", "tool"] * 3
        fits = fits and abs(sum(turn["reward"] for turn in each) - reward) < 1e-9 and each[-1]["end"] == len(ids)
        scores.append(float(fits and [turn["info"]["count"] for turn in each] == [1, 2, 3]))
    return scores


def by_turn(completions, **columns):
    """One number for each of three turns."""
    return [[0.0, 3.0, 6.0] for _ in completions]

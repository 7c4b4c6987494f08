"""The built-in reward functions: plain functions with TRL's signature, linear in the text. The configuration holds their weights.

Section `completion` decides what the format and the answer are (answers/extract.py). A worthless completion (its answer is empty
or a tag is repeated) earns 0, and -1 from `style`.
"""

# ruff: noqa: ARG001 - by TRL's contract every function receives more arguments than it uses

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from grpo_tasks.answers.equality import equals_any
from grpo_tasks.answers.extract import extract
from grpo_tasks.answers.extraction import Extraction
from grpo_tasks.environments.calls import spoken
from grpo_tasks.judging.frame import TranscriptMessage
from grpo_tasks.judging.judge import Case, Judge
from schemas.config.completion import CompletionConfig
from schemas.errors import RewardError

Completion = str | Sequence[Mapping[str, str]]
"""Plain text, or chat messages; the last one of the assistant counts."""
Turns = Sequence[Sequence[Mapping[str, Any]]]
"""The policy's turns of N conversations."""
FULL_SCORES: dict[str, float] = {"repetition": 0.0, "soft_overlong": 0.0}
"""Best score of the functions whose best score is not 1."""
TRAILING_PENALTY = 0.001
SHORT_ANSWER_CHARS = 100
REPETITION_WINDOW = 100_000
"""Characters at the end that are searched for repetition: a degenerate model loops there. It keeps 1 MB below 100 ms."""
MAX_WORD_CHARS, PIECE_CHARS = 32, 8
"""A longer word is split into pieces of this length: a run without spaces would be a single word that never repeats."""


def completion_text(completion: Completion) -> str:
    """The text of one completion in either form."""
    if isinstance(completion, str):
        return completion
    # An environment may have the last word.
    own = [message for message in completion if message.get("role") == "assistant"] or completion[-1:]
    return (own[-1].get("content") or "") if own else ""


def format(prompts: object, completions: Sequence[Completion], *, completion: CompletionConfig, **columns: object) -> list[float]:
    """1.0 for a completion in the strict format, 0.0 otherwise. For tags: a reasoning block, an answer block, no more."""
    return [float(found.strict_format) for found in _extractions(completions, completion)]


def incremental_format(
    prompts: object, completions: Sequence[Completion], *, completion: CompletionConfig, **columns: object
) -> list[float]:
    """0 .. 1: an equal share for each tag in order, so that a base model that knows only some of them already sees a difference,
    minus a penalty for each character after the closing answer tag."""
    credit = 0.25 if completion.tags.reasoning is not None else 0.5
    return [
        0.0 if found.worthless else max(0.0, credit * found.ordered_tags - TRAILING_PENALTY * found.trailing_chars)
        for found in _extractions(completions, completion)
    ]


def correctness(
    prompts: object,
    completions: Sequence[Completion],
    *,
    answer: Sequence[str | Sequence[str] | None],
    completion: CompletionConfig,
    **columns: object,
) -> list[float | None]:
    """1.0 when the answer by the strict rules equals the ground truth, or one of several; None for a row without ground truth."""
    found = _extractions(completions, completion)
    truths = [(truth,) if isinstance(truth, str) else truth for truth in answer]
    return [
        None if not truth else float(one.answer is not None and equals_any(one.answer, truth, completion.equality))
        for one, truth in zip(found, truths, strict=True)
    ]


def length(
    prompts: object,
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]] | None = None,
    turns: Turns | None = None,
    *,
    completion: CompletionConfig,
    min_length: int = 10,
    max_length: int = 1_000,
    unit: Literal["characters", "tokens"] = "characters",
    **columns: object,
) -> list[float]:
    """1.0 from `min_length` to `max_length`; below, the share of `min_length`; above, falling to 0 at twice `max_length`.

    The unit characters counts those of the reasoning: of the completion unless it has exactly one reasoning block, or text before
    the answer where the format has no such block. The unit tokens counts those of the completion that the policy has written.
    `ValueError` where the range or the unit is invalid.
    """
    if not 0 < min_length <= max_length or unit not in ("characters", "tokens"):
        raise ValueError(
            f"length requires 0 < min_length <= max_length, unit characters or tokens; got {min_length}, {max_length}, {unit}"
        )
    found = _extractions(completions, completion)
    if unit == "tokens":
        if completion_ids is None:
            raise ValueError("length with the unit tokens requires completion_ids")
        sizes = [sum(lengths) for lengths in _turn_lengths(completion_ids, turns)]
    else:
        sizes = [
            len((completion_text(given) if one.reasoning is None else one.reasoning).strip())
            for one, given in zip(found, completions, strict=True)
        ]
    scores = [size / min_length if size < min_length else max(0.0, min(1.0, 2.0 - size / max_length)) for size in sizes]
    return [0.0 if one.worthless else score for one, score in zip(found, scores, strict=True)]


def repetition(prompts: object, completions: Sequence[Completion], *, ngram: int = 3, **columns: object) -> list[float]:
    """-1 .. 0, minus the share of word n-grams that occur earlier in the completion."""
    if ngram < 1:
        raise ValueError(f"repetition requires an ngram of at least 1, not {ngram}")
    scores = []
    for completion in completions:
        words: list[str] = []
        for word in completion_text(completion)[-REPETITION_WINDOW:].split():
            size = PIECE_CHARS if len(word) > MAX_WORD_CHARS else len(word)
            words += [word[start : start + size] for start in range(0, len(word), size)]
        grams = list(zip(*(words[start:] for start in range(ngram)), strict=False))
        scores.append(len(set(grams)) / len(grams) - 1.0 if grams else 0.0)
    return scores


def style(prompts: object, completions: Sequence[Completion], *, completion: CompletionConfig, **columns: object) -> list[float]:
    """Mean of four signs (1 or -1): nothing after the answer, short answer, reasoning longer than the answer, printable text."""
    scores = []
    for text in map(completion_text, completions):
        found = extract(text, completion)
        answer, reasoning = found.answer or "", found.reasoning or ""
        signs = (
            found.answer is not None and found.trailing_chars == 0,
            0 < len(answer) <= SHORT_ANSWER_CHARS and "\n" not in answer,
            len(reasoning.strip()) > len(answer),
            all(letter.isprintable() or letter in "\n\t" for letter in set(text)),
        )
        scores.append(-1.0 if found.worthless else fmean(1.0 if sign else -1.0 for sign in signs))
    return scores


def soft_overlong(
    prompts: object,
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    turns: Turns | None = None,
    *,
    max_completion_length: int,
    soft_punish_cache: int,
    **columns: object,
) -> list[float]:
    """0.0 up to `max_completion_length - soft_punish_cache` tokens, then falling to -1.0 at `max_completion_length` (DAPO,
    arXiv:2503.14476 eq. 13). The limit is that of a turn, so in a conversation the longest one counts."""
    if not 0 < soft_punish_cache <= max_completion_length:
        raise ValueError(
            "soft_overlong requires 0 < soft_punish_cache <= max_completion_length, "
            f"not {soft_punish_cache} and {max_completion_length}"
        )
    free = max_completion_length - soft_punish_cache
    sizes = [max(lengths, default=0) for lengths in _turn_lengths(completion_ids, turns)]
    return [max(-1.0, min(0.0, (free - size) / soft_punish_cache)) for size in sizes]


def environment(
    prompts: object, completions: object, *, environment_reward: Sequence[float | None] | None = None, **columns: object
) -> list[float | None]:
    """The sum of what the environment gave for the conversation. Where it gave nothing: 0 if the conversation ran out of turns or
    tokens, else None."""
    if environment_reward is None:
        raise ValueError("the reward environment requires interaction.environment")
    return list(environment_reward)


def _turn_lengths(completion_ids: Sequence[Sequence[int]], turns: Turns | None) -> list[list[int]]:
    if turns is None:
        return [[len(ids)] for ids in completion_ids]
    return [[turn["end"] - turn["start"] for turn in each] for each in turns]


def judge(
    prompts: Sequence[Completion],
    completions: Sequence[Completion],
    turns: Turns | None = None,
    *,
    judge: Judge,
    **columns: Any,
) -> list[float | None]:
    """0 .. 1, what a language model thinks of the completion by the rubric; None where there is nothing to compare it with.

    Where tools or an environment answer, it is shown the whole conversation.
    """
    column = judge.settings.reference_column
    if column is not None and column not in columns:
        raise RewardError(f"the data have no column {column}", place="judge.reference_column", fix="name a column of the data")
    references = columns[column] if column is not None else [None] * len(completions)
    said: Iterable[str | list[TranscriptMessage]] = (
        map(completion_text, completions) if turns is None else map(_played, completions, turns)
    )
    cases = []
    for prompt, completion, given in zip(prompts, said, references, strict=True):
        # The judge sees the question, without the instructions for the format.
        messages = [] if isinstance(prompt, str) else [one for one in prompt if one.get("role") != "system"]
        asked = prompt if isinstance(prompt, str) else "\n\n".join(one.get("content") or "" for one in messages)
        reference = given[0] if isinstance(given, list) and given else given
        cases.append(Case(asked, completion, None if reference is None else str(reference)))
    found = judge.score(cases)
    for name in ("asked", "cached", "malformed", "manipulations", "unjudged", "cost"):
        columns["log_metric"](name, float(getattr(found.tally, name)))
    columns["log_extra"]("note", found.notes)
    return found.scores


def _played(messages: Completion, turns: Sequence[Mapping[str, Any]]) -> str | list[TranscriptMessage]:
    """What was said after the prompt. A turn counts as the policy wrote it: calls that nobody could read are part of it."""
    if isinstance(messages, str):
        return messages
    written = iter(spoken(turn["text"]) for turn in turns)
    speakers: dict[str, Literal["policy", "tool"]] = {"assistant": "policy", "tool": "tool"}
    said = [
        TranscriptMessage(
            speakers.get(message["role"], "environment"),
            next(written, "") if message["role"] == "assistant" else message.get("content") or "",
        )
        for message in messages
    ]
    return said if len(said) > 1 else "".join(one.text for one in said)


def _extractions(completions: Iterable[Completion], completion: CompletionConfig) -> list[Extraction]:
    return [extract(completion_text(given), completion) for given in completions]


BUILTIN: dict[str, Callable[..., Sequence[float | None]]] = {
    function.__name__: function
    for function in (format, incremental_format, correctness, length, repetition, style, soft_overlong, environment)
}
"""The functions by their name in the configuration; a judge needs settings of its own."""

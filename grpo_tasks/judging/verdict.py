"""The reply of a judge -> a verdict, or nothing: strictly one JSON object that fits the schema of its question."""

import json
from dataclasses import dataclass
from statistics import median
from typing import Any

from jsonschema import Draft202012Validator

from grpo_tasks.judging.frame import CRITERIA, MANIPULATION, MANIPULATORS, POINTS, WINNER, Question
from schemas.config.rewards import JudgeConfig

MAX_REPLY_CHARS = 1_000_000
"""Longest reply that is read. A longer one is no verdict."""


class MalformedError(Exception):
    """A reply that is no verdict on its question."""


@dataclass(frozen=True, slots=True)
class JudgeVerdict:
    """What a judge decided about one question."""

    value: float
    """mode absolute: weighted mean of the points, between 0 and 1. mode pairwise: 1 if a wins, 0.5 for a tie, 0 if b wins."""
    manipulators: frozenset[str]
    """Completions that tried to talk to the judge: a, b, or both; the only one of mode absolute is a."""


def parse(reply: str, question: Question, judge: JudgeConfig) -> JudgeVerdict:
    """The verdict in a reply.

    Raises:
        MalformedError: it is no JSON object, has other keys or values than the schema, or another marker.
    """
    if len(reply) > MAX_REPLY_CHARS:
        raise MalformedError(f"{len(reply):,} characters")
    try:
        found = json.loads(reply, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not one JSON object: {error}"[:200]) from error
    fault = next(Draft202012Validator(question.schema).iter_errors(found), None)
    # True is an integer to Python, and 2.0 to JSON schema.
    if fault is not None or any(type(one.get(POINTS, 0)) is not int for one in found[CRITERIA].values()):
        raise MalformedError(f"it does not fit the schema: {fault.message if fault else 'points are not whole numbers'}"[:200])
    weights = {criterion.name: criterion.weight for criterion in judge.rubric}
    total = sum(weight * _share(found[CRITERIA][name], judge) for name, weight in weights.items()) / sum(weights.values())
    if judge.mode == "pairwise":
        total = 0.5 if abs(total - 0.5) < 1e-9 else float(total > 0.5)
    return JudgeVerdict(total, MANIPULATORS[judge.mode][found[MANIPULATION]])


def combined(verdicts: list[JudgeVerdict]) -> JudgeVerdict | None:
    """Several votes as one: the median of the values, and the manipulators that most votes name; None without votes.

    The median of 0, 0.5 and 1 is the majority where there is one.
    """
    if not verdicts:
        return None
    accused = [label for label in ("a", "b") if 2 * sum(label in one.manipulators for one in verdicts) > len(verdicts)]
    return JudgeVerdict(float(median(verdict.value for verdict in verdicts)), frozenset(accused))


def _share(criterion: dict[str, Any], judge: JudgeConfig) -> float:
    if judge.mode == "absolute":
        return float(criterion[POINTS]) / judge.max_points
    return {"a": 1.0, "tie": 0.5, "b": 0.0}[criterion[WINNER]]


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # The last of two equal keys would win, and the schema would never see the first.
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found

"""Reward functions of single tasks: a function is never called with completions of a task that does not list it.

batch --the rows of its tasks--> call --None for the others--> FunctionScores | Fault of the whole batch
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from grpo_tasks.rewards.contract import Fault, FunctionScores, ScoreBatch

TaskRewards = Mapping[str, Collection[str] | None]
"""Names of the functions that apply to each task. None, or a task that is missing: every function of the stage."""


def applicable(name: str, batch: ScoreBatch, tasks: TaskRewards) -> list[int]:
    """Indices of the completions that a function applies to, by the tasks of their rows."""
    if not batch.tasks:
        return list(range(len(batch)))
    listed = {task: tasks.get(task) for task in set(batch.tasks)}
    open_to = {task for task, names in listed.items() if names is None or name in names}
    return [index for index, task in enumerate(batch.tasks) if task in open_to]


def spread(outcome: FunctionScores | Fault, indices: Sequence[int], num: int) -> FunctionScores | Fault:
    """The outcome for the completions `indices` as the outcome for all `num` completions; the others have None."""
    if isinstance(outcome, Fault):
        return replace(outcome, index=None if outcome.index is None else indices[outcome.index])
    scores: list[float | None] = [None] * num
    for index, score in zip(indices, outcome.scores, strict=True):
        scores[index] = score
    extra = {}
    for column, values in outcome.extra.items():
        known = dict(zip(indices, values, strict=True))
        extra[column] = [known.get(index) for index in range(num)]
    tokens = {indices[index]: values for index, values in outcome.tokens.items()}
    return replace(outcome, scores=scores, tokens=tokens, extra=extra)

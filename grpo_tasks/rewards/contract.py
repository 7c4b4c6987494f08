"""The reward contract, which is TRL's: what a reward function receives, what it may return, and what counts as a fault.

    def my_reward(prompts, completions, answer, **kwargs): return [float(...) for each completion]      # or async def

    prompts         N lists of chat messages: [..., {"role": "user", "content": "What is 15 + 27?"}]
    completions     N lists of one message: [{"role": "assistant", "content": "... 42"}]
                    Both are N strings when the data are in the standard format, or as_text is set for the function.
                    Where tools or an environment answer, they are N lists of all messages after the prompt, and a string is the
                    policy's last turn.
    completion_ids  N lists of token ids
    prompt_ids      N lists of token ids, where the engine knows them (not in engine: trl)
    answer          N ground truths: a string, a list where the data list several, an object where the data hold one. For a row
                    without ground truth its column `answer` as it stands, or None
    task            N names of tasks, when the data have several tasks
    messages        N lists of messages, the prompt's and those after it, where tools or an environment answer
    turns           N lists of the policy's turns there: text, start and end in completion_ids, finish_reason, reward, calls,
                    errors, info
    environment_reward  N sums of what the environment gave there. Where it gave nothing: 0 if a conversation ran out of turns or
                    tokens, else None
    environments    N objects there with the public attributes that an environment written for TRL had after its last turn
    ...             every other column of the data arrives under its own name, also with N values
    trainer_state   .global_step and .max_steps of the stage
    log_metric      log_metric(name, value) records the mean over the update as the metric logged/FUNCTION/NAME
    log_extra       log_extra(name, values) adds a column with N values to the table of completions: logged_FUNCTION_NAME
    returns         N finite numbers, or None where the function does not apply to the completion. A list of numbers, one for
                    each token of the completion, scores it token by token; the completion's score is then their mean. A list of
                    numbers, one for each of several turns, scores it turn by turn in the same way.

A function without **kwargs receives the arguments that it names. In code: a `ScoreBatch` goes in, `FunctionScores` or a
`RewardFault` comes out. A fault is data until the suite applies the function's `on_error`; `reward_error` words it for the user.
"""

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat

from grpo_tasks.content.conversations import Played
from grpo_tasks.content.places import row_place
from schemas.errors import RewardError
from schemas.prompts import PromptRow

SHOWN_CHARS = 200
PLAYED = frozenset({"messages", "turns", "environment_reward", "environments"})
ARGUMENTS = (
    frozenset({"prompts", "completions", "completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric"}) | PLAYED
)
"""Arguments of a call that are no columns of the data."""
RESERVED = ARGUMENTS | {"answer"}
"""Extra columns with these names are left out, and the lab warns about them."""

# What one call may pass to log_metric and log_extra: metrics, characters of a name, columns, characters of a value.
MAX_METRICS, MAX_METRIC_CHARS, MAX_EXTRAS, MAX_EXTRA_CHARS = 64, 100, 8, 300
MAX_GOLD_CHARS = 100_000
"""Characters kept of a completion that a user's function makes for the lab."""
MAX_TEXT_CHARS = 4_000

Extra = float | str | None
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
MetricName = Annotated[str, Field(max_length=MAX_METRIC_CHARS)]
ReportedExtra = Annotated[str, Field(max_length=MAX_EXTRA_CHARS)] | FiniteFloat | None

TaskRewards = Mapping[str, Collection[str] | None]
"""Names of the functions that apply to each task. None, or a task that is missing: every function of the stage."""

ONE_EACH = "return a list with one score per completion"


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """N completions to score, each with its prompt and columns."""

    prompts: Sequence[Sequence[Mapping[str, str]]]
    """N prompts as chat messages; the prompt of a group is repeated for each of its completions."""
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    """Columns of the data by name, N values each. `answer` is the ground truth."""
    step: int = 0
    """Number of the update. Functions see it as trainer_state.global_step."""
    origins: Sequence[str] = field(default=())
    """Where each of the N rows comes from, for error messages. This and what follows may be empty."""
    prompt_ids: Sequence[Sequence[int]] = field(default=())
    tasks: Sequence[str] = field(default=())
    """Task of each of the N rows, when the data have several."""
    played: Sequence[Played] = field(default=())
    """The N conversations, when completions are more than one turn each."""
    given_answers: Sequence[Any] = field(default=())
    """What a user's functions receive as `answer`, where that is not the column; built-in ones compare text."""

    def __post_init__(self) -> None:
        sizes = {len(self.prompts), len(self.completions), len(self.completion_ids), *map(len, self.columns.values())}
        optional = (self.origins, self.prompt_ids, self.tasks, self.played, self.given_answers)
        sizes |= {len(values) for values in optional if values}
        assert len(sizes) == 1, f"the columns of a batch differ in length: {sorted(sizes)}"

    def __len__(self) -> int:
        return len(self.completions)

    def take(self, indices: Sequence[int]) -> "ScoreBatch":
        """The batch of these completions, in this order."""

        def of(values: Sequence[Any]) -> list[Any]:
            return [values[index] for index in indices] if values else []

        names = ("prompts", "completions", "completion_ids", "origins", "prompt_ids", "tasks", "played", "given_answers")
        taken: dict[str, Any] = {name: of(getattr(self, name)) for name in names}
        return replace(self, columns={name: of(values) for name, values in self.columns.items()}, **taken)


def batch_of(
    rows: Sequence[PromptRow],
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    *,
    prompt_ids: Sequence[Sequence[int]] = (),
    step: int = 0,
    played: Sequence[Played] = (),
) -> ScoreBatch:
    """The batch in which `completions[i]` answers `rows[i]`, with every column of any row; None where a row lacks it."""
    names = sorted({name for row in rows for name in row.extra} - RESERVED)
    columns = {name: [row.extra.get(name) for row in rows] for name in names}
    columns["answer"] = [row.answer if row.answers is None else list(row.answers) for row in rows]
    given = [row.given_answer for row in rows]
    tasks = [row.task for row in rows] if any(row.task for row in rows) else []
    return ScoreBatch(
        prompts=[one.prompt for one in played] if played else [row.messages for row in rows],
        completions=completions,
        completion_ids=completion_ids,
        columns=columns | ({"task": tasks} if tasks else {}),
        step=step,
        origins=[f"{row_place(row.source, row.line)} (prompt_id {row.prompt_id})" for row in rows],
        prompt_ids=prompt_ids,
        tasks=tasks,
        played=played,
        given_answers=given if given != columns["answer"] else [],
    )


@dataclass(frozen=True, slots=True)
class FunctionScores:
    """The checked result of one call of a function, as the worker sends it."""

    scores: list[FiniteFloat | None]
    """One per completion; None where the function does not apply."""
    seconds: Annotated[NonNegativeFloat, Field(allow_inf_nan=False)]
    tokens: dict[int, list[FiniteFloat]] = field(default_factory=dict)
    """Scores of single tokens, by index of the completion, for completions that the function scored token by token."""
    metrics: Annotated[dict[MetricName, FiniteFloat], Field(max_length=MAX_METRICS)] = field(default_factory=dict)
    """What the function passed to log_metric, averaged over the call."""
    extra: Annotated[dict[MetricName, list[ReportedExtra]], Field(max_length=MAX_EXTRAS)] = field(default_factory=dict)
    """What the function passed to log_extra: N values by column."""
    computing_s: Annotated[NonNegativeFloat, Field(allow_inf_nan=False)] = 0.0
    """Of `seconds`, those in which the process and the children that it has ended computed: waiting does not count, nor what
    else runs on the machine."""


@dataclass(frozen=True, slots=True)
class RewardFault:
    """One failed call of a function, as the worker sends it."""

    kind: Literal["raised", "hung", "died", "broken", "unavailable"]
    detail: Text
    """What happened. It completes a sentence that begins with the name of the function."""
    source: Text = ""
    index: int | None = None
    fix: Text = ""
    """What to do. Empty: the general advice of `reward_error`."""
    arguments: Text = ""


def applicable(name: str, batch: ScoreBatch, tasks: TaskRewards) -> list[int]:
    """Indices of the completions that a function applies to, by the tasks of their rows; no conversation that failed."""
    sound = [index for index in range(len(batch)) if not (batch.played and batch.played[index].failed)]
    if not batch.tasks:
        return sound
    listed = {task: tasks.get(task) for task in set(batch.tasks)}
    open_to = {task for task, names in listed.items() if names is None or name in names}
    return [index for index in sound if batch.tasks[index] in open_to]


def spread(outcome: FunctionScores | RewardFault, indices: Sequence[int], num: int) -> FunctionScores | RewardFault:
    """The outcome for the completions `indices` as the outcome for all `num` completions; the others have None."""
    if isinstance(outcome, RewardFault):
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


class ContractError(Exception):
    """A returned value that breaks the contract."""

    def __init__(self, detail: str, fix: str, index: int | None = None) -> None:
        super().__init__(detail)
        self.fault = RewardFault("broken", detail, index=index, fix=fix)


def check_result(
    result: Any, lengths: Sequence[int], turns: Sequence[Sequence[tuple[int, int]]] = ()
) -> tuple[list[float | None], dict[int, list[float]]]:
    """N scores, and those of single tokens by index of the completion, of what a function returned; raises ContractError.

    `lengths` has the number of tokens of each of the N completions, `turns` for each the first token of each turn of the policy
    and the one behind its last. Empty: they are one turn.
    """
    result, num = _as_list(result), len(lengths)
    if not isinstance(result, list | tuple):
        fix = ONE_EACH
        if callable(result):
            fix = "it is a factory: name what it returns, with a line such as my_reward = factory(...) in your module"
        elif isinstance(result, numbers.Real):
            fix = f"{ONE_EACH}; a function for a single completion needs a loop over completions"
        raise ContractError(f"returned {_kind(result)} instead of a list of {num} scores", fix)
    if len(result) != num:
        first_without = len(result) if len(result) < num else None
        raise ContractError(f"returned {len(result)} scores for {num} completions", ONE_EACH, first_without)
    scores: list[float | None] = []
    tokens: dict[int, list[float]] = {}
    for index, value in enumerate(map(_as_list, result)):
        if not isinstance(value, list | tuple):
            scores.append(None if value is None else _number(value, index))
            continue
        spans, length = turns[index] if turns else [(0, lengths[index])], lengths[index]
        by_turn = bool(turns) and len(value) == len(spans) != length
        if not by_turn and len(value) != length:
            fix = "return one number per id of completion_ids, or one number for the whole completion"
            raise ContractError(f"returned {len(value)} numbers for a completion of {length} tokens", fix, index)
        given = [_number(one, index) for one in value]
        # The mean is over turns, whatever their lengths, or over the policy's tokens.
        own = given if by_turn else [given[at] for start, end in spans for at in range(start, end)]
        scores.append(sum(own) / len(own) if own else 0.0)
        if by_turn:
            # The number of each turn at each of its tokens; what was said after a turn goes with it and has no loss.
            ends = [*(start for start, _ in spans[1:]), length]
            given = [one for one, (start, _), end in zip(given, spans, ends, strict=True) for _ in range(start, end)]
        tokens[index] = given
    return scores, tokens


def reward_error(name: str, fault: RewardFault, batch: ScoreBatch) -> RewardError:
    """The fault as an error for the user: function, row, completion and fix."""
    where, index = [fault.source], fault.index or 0
    if len(batch):
        # Without an index the call failed as a unit. The first completion then stands for the batch.
        prefix = "" if fault.index is not None or len(batch) == 1 else f"{len(batch)} completions, the first of them "
        question = batch.prompts[index][-1].get("content", "") if batch.prompts[index] else ""
        unknown = f"completion {index} of the batch, question {shorten(question, 120)!r}"
        row = batch.origins[index] if batch.origins else unknown
        where.append(f"{prefix}{row}, completion {shorten(batch.completions[index])!r}")
    if fault.arguments:
        where.append(f"called with {fault.arguments}")
    fix = fault.fix or "fix the function, or set on_error: zero | skip for it"
    return RewardError(f"reward {name} {fault.detail}", place="; ".join(filter(None, where)), fix=fix)


def shorten(text: str, limit: int = SHOWN_CHARS) -> str:
    """The text itself, or its beginning and end when it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 30) // 2
    return f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"


def _number(value: Any, index: int) -> float:
    if not isinstance(value, numbers.Real):
        raise ContractError(f"returned {_kind(value)} instead of a number", "return a float or None per completion", index)
    if not math.isfinite(value):
        fix = "guard the division or logarithm it comes from"
        raise ContractError(f"returned {float(value)}, which is not finite", fix, index)
    return float(value)


def _as_list(value: Any) -> Any:
    # Arrays and tensors of any library become lists and their scalars become numbers, without an import of the library.
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _kind(value: Any) -> str:
    if callable(value):
        return f"a function ({getattr(value, '__qualname__', type(value).__name__)})"
    return "None" if value is None else f"{type(value).__name__} {shorten(repr(value), 60)}"

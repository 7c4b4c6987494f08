"""The reward contract, which is TRL's: what a reward function receives, what it may return, and what counts as a fault.

    def my_reward(prompts, completions, answer, **kwargs): return [float(...) for each completion]      # or async def

    prompts         N lists of chat messages: [..., {"role": "user", "content": "What is 15 + 27?"}]
    completions     N lists of one message: [{"role": "assistant", "content": "... 42"}]
    completion_ids  N lists of token ids
    answer          N ground truths; every other column of the data arrives under its own name, also with N values
    trainer_state   .global_step and .max_steps of the stage
    log_metric      log_metric(name, value) records the mean over the update as the metric logged/FUNCTION/NAME
    log_extra       accepted, and ignored: no extra columns are stored
    returns         N finite numbers, or None where the function does not apply to the completion. A list of numbers, one for
                    each token of the completion, scores it token by token; the completion's score is then their mean.

In code: a `ScoreBatch` goes in, `FunctionScores` or a `Fault` comes out. A fault is data until the suite applies the function's
`on_error`; `reward_error` words it for the user.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from schemas.errors import RewardError

SHOWN_CHARS = 300
"""Characters of a completion shown in an error."""
RESERVED = frozenset({"answer", "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
"""Arguments that every function receives. Extra columns with these names are left out, and the lab warns about them."""

MAX_METRICS = 64
"""Maximum number of metrics that one call may pass to log_metric."""
MAX_METRIC_CHARS = 100
"""Maximum length of the name of such a metric."""


class Row(Protocol):
    """What rewards need of a row of the data. `grpo_tasks.data.table.PromptRow` has more."""

    @property
    def prompt_id(self) -> str:
        """First 16 hex digits of the row's hash."""
        ...

    @property
    def source(self) -> str:
        """File or hub id of the data set."""
        ...

    @property
    def line(self) -> int:
        """Line in that file."""
        ...

    @property
    def messages(self) -> Sequence[Mapping[str, str]]:
        """Chat messages of the prompt."""
        ...

    @property
    def answer(self) -> str | None:
        """Ground truth; the first one of several; None for a row without ground truth."""
        ...

    @property
    def answers(self) -> Sequence[str] | None:
        """Every ground truth where the data lists them; None otherwise."""
        ...

    @property
    def task(self) -> str:
        """Task of the row; empty when the data has a single task."""
        ...

    @property
    def extra(self) -> Mapping[str, Any]:
        """Other columns of the data."""
        ...


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
    """Where each of the N rows comes from, for error messages. May be empty."""

    def __post_init__(self) -> None:
        sizes = {len(self.prompts), len(self.completions), len(self.completion_ids), *map(len, self.columns.values())}
        assert len(sizes) == 1, f"the columns of a batch differ in length: {sorted(sizes)}"

    def __len__(self) -> int:
        return len(self.completions)

    def take(self, indices: Sequence[int]) -> "ScoreBatch":
        """The batch of these completions, in this order."""
        return ScoreBatch(
            prompts=[self.prompts[index] for index in indices],
            completions=[self.completions[index] for index in indices],
            completion_ids=[self.completion_ids[index] for index in indices],
            columns={name: [values[index] for index in indices] for name, values in self.columns.items()},
            step=self.step,
            origins=[self.origins[index] for index in indices] if self.origins else (),
        )


def batch_of(
    rows: Sequence[Row], completions: Sequence[str], completion_ids: Sequence[Sequence[int]], *, step: int = 0
) -> ScoreBatch:
    """The batch in which `completions[i]` answers `rows[i]`. The trainer and the lab both build their batches here.

    Args:
        rows: N rows; a row may occur several times.
        completions: N texts.
        completion_ids: N lists of token ids.
        step: number of the update.

    The columns are `answer` and every extra column of any row, with None where a row lacks it. Reserved names are left out.
    """
    names = sorted({name for row in rows for name in row.extra} - RESERVED)
    return ScoreBatch(
        prompts=[row.messages for row in rows],
        completions=completions,
        completion_ids=completion_ids,
        columns={"answer": [row.answer for row in rows], **{name: [row.extra.get(name) for row in rows] for name in names}},
        step=step,
        origins=[origin_of(row) for row in rows],
    )


def origin_of(row: Row) -> str:
    """Where a row comes from, for a person: file, line and prompt_id."""
    return f"{row.source}:{row.line} (prompt_id {row.prompt_id})"


@dataclass(frozen=True, slots=True)
class FunctionScores:
    """The checked result of one call of one function."""

    scores: list[float | None]
    """One per completion; None where the function does not apply."""
    seconds: float
    """Time inside the function."""
    tokens: dict[int, list[float]] = field(default_factory=dict)
    """Scores of single tokens, by index of the completion, for completions that the function scored token by token."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the function passed to log_metric, averaged over the call."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed call of a function."""

    kind: Literal["raised", "hung", "died", "broken"]
    detail: str
    """What happened. It completes a sentence that begins with the name of the function."""
    source: str = ""
    """File, line and function of the exception, when known."""
    index: int | None = None
    """Index of the completion in the batch, when known."""
    fix: str = ""
    """What to do. Empty: the general advice of `reward_error`."""


class ContractError(Exception):
    """A returned value that breaks the contract. Carries the fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


def check_result(result: Any, lengths: Sequence[int]) -> tuple[list[float | None], dict[int, list[float]]]:
    """Check the return value of a function.

    Args:
        result: what the function returned. NumPy arrays and torch tensors are accepted too.
        lengths: number of tokens of each of the N completions.

    Returns:
        N scores, and the scores of single tokens by index of the completion.

    Raises:
        ContractError: wrong count, wrong type, or a number that is not finite.
    """
    result, num = _as_list(result), len(lengths)
    if not isinstance(result, list | tuple):
        raise _breach(f"returned {_kind(result)} instead of a list of {num} scores", "return one score per completion")
    if len(result) != num:
        first_without = len(result) if len(result) < num else None
        raise _breach(f"returned {len(result)} scores for {num} completions", "return one score per completion", first_without)
    tokens = {
        index: _token_scores(value, index, lengths[index])
        for index, value in enumerate(map(_as_list, result))
        if isinstance(value, list | tuple)
    }
    scores = [_mean(tokens[index]) if index in tokens else _score(value, index) for index, value in enumerate(result)]
    return scores, tokens


def reward_error(name: str, fault: Fault, batch: ScoreBatch) -> RewardError:
    """The fault as an error for the user: function, row, completion and fix."""
    where = [fault.source]
    index = fault.index or 0
    if len(batch):
        # Without an index the call failed as a unit. The first completion then stands for the batch.
        prefix = "" if fault.index is not None or len(batch) == 1 else f"{len(batch)} completions, the first of them "
        where.append(f"{prefix}{_row(batch, index)}, completion {shorten(batch.completions[index])!r}")
    fix = fault.fix or "fix the function, or set on_error: zero | skip for it"
    return RewardError(f"reward {name} {fault.detail}", place="; ".join(filter(None, where)), fix=fix)


def shorten(text: str, limit: int = SHOWN_CHARS) -> str:
    """The text itself, or its beginning and end when it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 30) // 2
    return f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"


def _row(batch: ScoreBatch, index: int) -> str:
    if batch.origins:
        return batch.origins[index]
    question = batch.prompts[index][-1].get("content", "") if batch.prompts[index] else ""
    return f"completion {index} of the batch, question {shorten(question, 120)!r}"


def _score(value: Any, index: int) -> float | None:
    value = _as_list(value)
    return None if value is None else _number(value, index)


def _token_scores(values: Sequence[Any], index: int, length: int) -> list[float]:
    if len(values) != length:
        fix = "return one number per id of completion_ids, or one number for the whole completion"
        raise _breach(f"returned {len(values)} numbers for a completion of {length} tokens", fix, index)
    return [_number(value, index) for value in values]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _number(value: Any, index: int) -> float:
    if not isinstance(value, numbers.Real):
        raise _breach(f"returned {_kind(value)} instead of a number", "return a float or None per completion", index)
    if not math.isfinite(value):
        raise _breach(f"returned {float(value)}, which is not finite", "guard the division or logarithm it comes from", index)
    return float(value)


def _as_list(value: Any) -> Any:
    # Arrays and tensors of any library become lists and their scalars become numbers, without an import of the library.
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def _kind(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {shorten(repr(value), 60)}"


def _breach(detail: str, fix: str, index: int | None = None) -> ContractError:
    return ContractError(Fault("broken", detail, index=index, fix=fix))

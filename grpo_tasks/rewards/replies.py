"""What a worker's answer must look like. Reward functions run in the process that answers, so nothing in it is taken on trust.

bytes -> JSON of exactly this shape -> answers this request -> as many scores as completions -> FunctionScores | Fault
"""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeFloat, ValidationError

from grpo_tasks.processes.framing import MAX_TEXT
from grpo_tasks.processes.link import MalformedReplyError
from grpo_tasks.rewards.contract import Fault, FunctionScores
from schemas.errors import UserError

ANSWER_BYTES = 2**16
"""An answer's size without its numbers."""
NUMBER_BYTES = 48
"""A number's, with its key where it stands in a list of a completion's tokens."""
LOADED_BYTES = 2**20

Text = Annotated[str, Field(max_length=MAX_TEXT)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Scores(_Strict):
    scores: list[FiniteFloat | None]
    seconds: Annotated[NonNegativeFloat, Field(allow_inf_nan=False)]
    tokens: dict[int, list[FiniteFloat]]


class _Fault(_Strict):
    kind: Literal["raised", "broken"]
    detail: Text
    source: Text
    index: int | None
    fix: Text


class _Answer(_Strict):
    request: str


class _Scored(_Answer):
    values: _Scores | None = None
    fault: _Fault | None = None


class _Loaded(_Answer):
    loaded: list[str] | None = None
    error: str | None = None


Answer = TypeVar("Answer", bound=_Answer)


def max_bytes(lengths: Sequence[int]) -> int:
    """The most that an answer about completions of so many tokens can have."""
    return ANSWER_BYTES + NUMBER_BYTES * (len(lengths) + sum(lengths))


def read_scores(payload: bytes, request: str, lengths: Sequence[int]) -> FunctionScores | Fault:
    """The answer to a call.

    Args:
        payload: the frame's.
        request: number of the call.
        lengths: tokens of each completion.

    Raises:
        MalformedReplyError: it is anything else.
    """
    answer = _parsed(_Scored, payload, request)
    values, fault = answer.values, answer.fault
    if (values is None) == (fault is None):
        raise MalformedReplyError("gave an answer without scores")
    if fault is not None:
        if fault.index is not None and not 0 <= fault.index < len(lengths):
            raise MalformedReplyError(f"blamed completion {fault.index} of {len(lengths)}")
        return Fault(fault.kind, fault.detail, fault.source, fault.index, fault.fix)
    assert values is not None
    if len(values.scores) != len(lengths):
        raise MalformedReplyError(f"gave an answer with {len(values.scores)} scores for {len(lengths)} completions")
    for index, tokens in values.tokens.items():
        if not 0 <= index < len(lengths) or len(tokens) != lengths[index]:
            raise MalformedReplyError(f"gave an answer with {len(tokens)} scores for the tokens of completion {index}")
    return FunctionScores(values.scores, values.seconds, values.tokens)


def read_loaded(payload: bytes, request: str, names: Sequence[str]) -> UserError | None:
    """The answer to the request to load functions: None, or why they cannot be loaded; `MalformedReplyError` for anything else."""
    answer = _parsed(_Loaded, payload, request)
    if answer.error is None:
        if answer.loaded != list(names):
            raise MalformedReplyError("gave an answer that names other functions")
        return None
    try:
        return UserError.from_json(answer.error)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise MalformedReplyError("gave an answer of the wrong shape (error)") from None


def _parsed(shape: type[Answer], payload: bytes, request: str) -> Answer:
    try:
        answer = shape.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise MalformedReplyError(f"gave an answer of the wrong shape ({where + ': ' if where else ''}{first['msg']})") from None
    if answer.request != request:
        raise MalformedReplyError("gave an answer to another request")
    return answer

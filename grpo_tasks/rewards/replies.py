"""Which replies of a worker are accepted. Untrusted functions run in the process that replies, so the parent checks all of it.

bytes -> JSON of exactly this shape -> replies to this request -> as many scores as completions -> FunctionScores | RewardFault
"""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeFloat, ValidationError

from grpo_tasks.processes.framing import MAX_TEXT_CHARS
from grpo_tasks.processes.link import MalformedReplyError
from grpo_tasks.rewards.contract import (
    MAX_EXTRA_CHARS,
    MAX_EXTRAS,
    MAX_GOLD_CHARS,
    MAX_METRIC_CHARS,
    MAX_METRICS,
    FunctionScores,
    RewardFault,
)
from schemas.errors import UserError

BASE_REPLY_BYTES = 2**17
"""Maximum size of a reply without its scores: the texts of a fault, or the metrics that the function reported."""
SCORE_BYTES = 48
"""Maximum size of one score in JSON, with its key when it belongs to a token."""
EXTRA_BYTES = MAX_EXTRAS * (12 * MAX_EXTRA_CHARS + 8)
"""Maximum size in JSON of what log_extra received for one completion: a character may become two escapes of six bytes."""
GOLD_BYTES = 12 * MAX_GOLD_CHARS + 8
"""Maximum size in JSON of one gold completion."""
MAX_LOADED_BYTES = 2**20
"""Maximum size of the reply to the request to load functions."""

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
MetricName = Annotated[str, Field(max_length=MAX_METRIC_CHARS)]
ExtraText = Annotated[str, Field(max_length=MAX_EXTRA_CHARS)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Scores(_Strict):
    scores: list[FiniteFloat | None]
    seconds: Annotated[NonNegativeFloat, Field(allow_inf_nan=False)]
    tokens: dict[int, list[FiniteFloat]]
    metrics: Annotated[dict[MetricName, FiniteFloat], Field(max_length=MAX_METRICS)]
    extra: Annotated[dict[MetricName, list[ExtraText | FiniteFloat | None]], Field(max_length=MAX_EXTRAS)]


class _Fault(_Strict):
    kind: Literal["raised", "broken", "unavailable"]
    detail: Text
    source: Text
    index: int | None
    fix: Text
    arguments: Text


class _Reply(_Strict):
    request: str


class _Scored(_Reply):
    scores: _Scores | None = None
    fault: _Fault | None = None


class _Golds(_Reply):
    completions: list[Annotated[str, Field(max_length=2 * MAX_GOLD_CHARS)] | None] | None = None
    error: str | None = None


class _Loaded(_Reply):
    loaded: list[str] | None = None
    error: str | None = None


Reply = TypeVar("Reply", bound=_Reply)


def max_reply_bytes(lengths: Sequence[int]) -> int:
    """Maximum size in bytes of the reply about completions with these numbers of tokens."""
    return BASE_REPLY_BYTES + SCORE_BYTES * (len(lengths) + sum(lengths)) + EXTRA_BYTES * len(lengths)


def read_scores(payload: bytes, request: str, lengths: Sequence[int]) -> FunctionScores | RewardFault:
    """Read the reply to a call.

    Args:
        payload: payload of the frame.
        request: id of the request.
        lengths: number of tokens of each completion.

    Raises:
        MalformedReplyError: the payload is not a valid reply to this request.
    """
    reply = _parsed(_Scored, payload, request)
    found, fault = reply.scores, reply.fault
    if (found is None) == (fault is None):
        raise MalformedReplyError("sent a reply without scores")
    if fault is not None:
        if fault.index is not None and not 0 <= fault.index < len(lengths):
            raise MalformedReplyError(f"blamed completion {fault.index} of {len(lengths)}")
        return RewardFault(fault.kind, fault.detail, fault.source, fault.index, fault.fix, fault.arguments)
    assert found is not None
    if len(found.scores) != len(lengths):
        raise MalformedReplyError(f"sent a reply with {len(found.scores)} scores for {len(lengths)} completions")
    for index, tokens in found.tokens.items():
        if not 0 <= index < len(lengths) or len(tokens) != lengths[index]:
            raise MalformedReplyError(f"sent a reply with {len(tokens)} scores for the tokens of completion {index}")
    for column, values in found.extra.items():
        if len(values) != len(lengths):
            raise MalformedReplyError(f"sent a reply with {len(values)} values of {column} for {len(lengths)} completions")
    return FunctionScores(found.scores, found.seconds, found.tokens, found.metrics, dict(found.extra))


def read_golds(payload: bytes, request: str, num: int) -> list[str | None] | UserError:
    """Read the reply to the request for `num` gold completions: the completions, or the error that says why there are none.

    Raises:
        MalformedReplyError: the payload is not a valid reply to this request.
    """
    reply = _parsed(_Golds, payload, request)
    if reply.error is not None:
        return _error_of(reply.error)
    if reply.completions is None or len(reply.completions) != num:
        raise MalformedReplyError("sent a reply without completions")
    return reply.completions


def read_loaded(payload: bytes, request: str, names: Sequence[str]) -> UserError | None:
    """Read the reply to the request to load functions: None, or the error that says why they cannot be loaded.

    Raises:
        MalformedReplyError: the payload is not a valid reply to this request.
    """
    reply = _parsed(_Loaded, payload, request)
    if reply.error is None:
        if reply.loaded != list(names):
            raise MalformedReplyError("sent a reply that names other functions")
        return None
    return _error_of(reply.error)


def _error_of(text: str) -> UserError:
    try:
        return UserError.from_json(text)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise MalformedReplyError("sent a reply of the wrong shape (error)") from None


def _parsed(shape: type[Reply], payload: bytes, request: str) -> Reply:
    try:
        reply = shape.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise MalformedReplyError(f"sent a reply of the wrong shape ({where + ': ' if where else ''}{first['msg']})") from None
    if reply.request != request:
        raise MalformedReplyError("sent a reply to another request")
    return reply

"""Which replies of a worker are accepted. A user's code runs in the process that replies, so the parent checks all of it.

bytes -> JSON of exactly this shape -> a reply to this request -> within the limits
"""

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, ValidationError

from grpo_tasks.environments.texts import MAX_MESSAGES
from grpo_tasks.processes.link import MalformedReplyError
from schemas.errors import UserError

BASE_BYTES = 2**18
"""Maximum size of a reply without its texts: info, the attributes of an environment, an error."""
MAX_LOADED_BYTES = 2**22
MAX_OPENING_BYTES = 2**26
MAX_PERFECT_BYTES = 2**24
_MARK_CHARS = 200
"""More than the mark of a cut answer takes."""


class Reply(BaseModel):
    """What every reply has."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    request: str


class Loaded(Reply):
    """The worker has imported what the configuration names."""

    form: Literal["tools", "methods", "steps"] | None = None
    schemas: list[dict[str, JsonValue]] = Field(default_factory=list)
    own_calls: bool = False
    rewards_at_end: bool = False
    error: str | None = None


class EnvironmentMessage(BaseModel):
    """A message."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    role: Annotated[str, Field(max_length=40)]
    content: JsonValue = ""


class Opened(Reply):
    """A conversation has begun."""

    messages: list[EnvironmentMessage] = Field(default_factory=list)
    state: dict[str, JsonValue] = Field(default_factory=dict)
    error: str | None = None


class Answered(Reply):
    """A tool has answered."""

    text: str
    failed: bool
    state: dict[str, JsonValue]


class Stepped(Reply):
    """An environment has answered."""

    messages: Annotated[list[EnvironmentMessage], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    done: bool = False
    reward: FiniteFloat | None = None
    info: dict[str, JsonValue] = Field(default_factory=dict)
    error: str | None = None


class Final(Reply):
    """The reward of a whole conversation."""

    reward: FiniteFloat | None = None
    error: str | None = None


class Perfect(Reply):
    """The turns of a perfect player."""

    turns: list[str] | None = None
    error: str | None = None


class Ended(Reply):
    """Conversations are over."""


Shape = TypeVar("Shape", bound=Reply)


def reader(shape: type[Shape]) -> Callable[[bytes, str], Shape]:
    """A function that makes a reply of this shape of a payload and the id of its request.

    It raises MalformedReplyError for any other payload.
    """

    def read(payload: bytes, request: str) -> Shape:
        try:
            reply = shape.model_validate_json(payload)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            said = f"{where + ': ' if where else ''}{first['msg']}"
            raise MalformedReplyError(f"sent a reply of the wrong shape ({said})") from None
        if reply.request != request:
            raise MalformedReplyError("sent a reply to another request")
        return reply

    return read


def max_bytes(num_texts: int, max_chars: int) -> int:
    """Maximum size of a reply with as many texts: a character may become two escapes of six bytes."""
    return BASE_BYTES + num_texts * 12 * (max_chars + _MARK_CHARS)


def error_of(text: str, place: str) -> UserError:
    """The error that a worker reports; one about the report when it is none."""
    try:
        return UserError.from_json(text)
    except (ValueError, KeyError, TypeError, AttributeError):
        fix = "import its module in a Python session, and see what it does to the modules json and os"
        return UserError("the worker process sent an error that cannot be read", place=place, fix=fix)

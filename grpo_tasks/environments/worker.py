"""The process that tools and environments run in, seen from the parent: how it is asked, and which replies are accepted."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue

from grpo_tasks.environments.forms import MAX_MESSAGES
from grpo_tasks.processes.worker_process import MalformedReplyError, Reply, ReportedError, Shape, WorkerFault, WorkerProcess
from schemas.config.rollout import InteractionConfig
from schemas.errors import UserError

LOAD_LIMIT_S = 300.0
MIB = 2**20
BASE_BYTES = 2**18
"""Maximum size of a reply without its texts: info, the attributes of an environment, an error."""
MAX_LOADED_BYTES, MAX_OPENING_BYTES, MAX_PERFECT_BYTES = 2**22, 2**26, 2**24


def max_bytes(num_texts: int, max_chars: int) -> int:
    """Maximum size of a reply with as many texts: a character may become two escapes of six bytes."""
    mark_chars = 200  # more than the mark of a cut answer takes
    return BASE_BYTES + num_texts * 12 * (max_chars + mark_chars)


class Loaded(Reply):
    """The worker has imported what the configuration names, or cannot."""

    form: Literal["tools", "methods", "steps", ""] = ""
    schemas: list[dict[str, JsonValue]] = Field(default_factory=list)
    own_calls: bool = False
    rewards_at_end: bool = False
    error: ReportedError | None = None

    def _check(self, message: Mapping[str, Any]) -> None:  # noqa: ARG002 - it holds for every request
        if self.error is None and not self.form:
            raise MalformedReplyError("sent a reply without a form")


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
    state: dict[str, JsonValue]


class Stepped(Reply):
    """An environment has answered a turn, or rewards the whole conversation."""

    messages: Annotated[list[EnvironmentMessage], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    done: bool = False
    reward: FiniteFloat | None = None
    info: dict[str, JsonValue] = Field(default_factory=dict)
    error: str | None = None


class Perfect(Reply):
    """The turns of a perfect player."""

    turns: list[str] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """The process has ended, and with it every environment that it held."""

    reason: str
    """Completes a sentence that begins with the name of what was called."""


class EnvironmentWorker(WorkerProcess):
    """One child process that holds the environments of several conversations. A hang, a crash or too much memory ends it."""

    def __init__(self, config: InteractionConfig, *, log: Path | None = None) -> None:
        # Sets of texts then have the same order in every worker.
        fixed = {"PYTHONHASHSEED": "0"}
        super().__init__("grpo_tasks.environments.serve", config.memory_mb * MIB, log=log, environment=fixed)
        self.config = config
        self.loaded = Loaded(request="")
        """What the process has imported."""
        self.generation = 0
        """How many processes it has had. An environment lives in one of them."""

    def load(self, *, with_schemas: bool) -> list[dict[str, Any]]:
        """Start the process unless it runs, and import what the configuration names; `UserError` where that fails, or ends it.

        Returns the schemas of the tools if they are wanted and the process was started.
        """
        # What ended it between two calls, such as a thread, is not the fault of the next conversation.
        if self.link is not None and not self.link.has_ended() and not self.link.has_unread_bytes():
            return []
        self.close()
        self.start()
        self.generation += 1
        message = {"config": self.config.model_dump(mode="json"), "with_schemas": with_schemas}
        loaded = self._ask("load", message, Loaded, LOAD_LIMIT_S, MAX_LOADED_BYTES, "loading")
        if isinstance(loaded, Lost):
            place = "interaction.environment" if self.config.environment else "interaction.tools"
            fix = "import its module in a Python session to find what ends the process"
            raise UserError(f"importing the tools or the environment {loaded.reason}", place=place, fix=fix)
        if loaded.error is not None:
            self.close()
            raise loaded.error
        self.loaded = loaded
        return [dict(one) for one in loaded.schemas]

    def ask(self, what: str, message: Mapping[str, Any], shape: type[Shape], max_bytes: int) -> Shape | Lost:
        """The reply of the process to a request, of this shape and at most as many bytes."""
        label = f"{message.get('name', what)} in conversation {message.get('conversation', '')}".strip()
        return self._ask(what, message, shape, self.config.timeout_s, max_bytes, label.replace("\n", " ")[:200])

    def _ask(
        self, what: str, message: Mapping[str, Any], shape: type[Shape], limit_s: float, max_bytes: int, label: str
    ) -> Shape | Lost:
        reply = self.exchange(what, message, shape, limit_s=limit_s, max_bytes=max_bytes, label=label)
        return Lost(reply.reason(limit_s, f"{self.config.memory_mb} MiB")) if isinstance(reply, WorkerFault) else reply

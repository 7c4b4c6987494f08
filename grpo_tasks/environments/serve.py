"""`python -P -m grpo_tasks.environments.serve FD`: the process that tools and environments run in. pool.py starts it.

It imports what the configuration names, then answers one request after another (processes/worker_main.py). A user's code is
called with the generators of `random`, numpy and torch seeded by conversation and turn, so that a conversation goes the same way
in every worker. torch is seeded once the user's code has imported it: nothing else here needs it, and importing it takes seconds.
"""

import json
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy

from grpo_tasks.environments.forms import (
    MAX_INFO_CHARS,
    ShapeError,
    as_text,
    call_reset,
    close,
    cut,
    describe,
    import_all,
    is_ours,
    public_tools,
    read_opening,
    read_reward,
    read_step,
    takes_calls,
)
from grpo_tasks.processes.worker_main import answer_requests, awaited
from schemas.config.rollout import InteractionConfig

Request = Mapping[str, Any]
Handler = Callable[["Conversations", Request], dict[str, Any]]
FAULTS = (Exception, SystemExit, KeyboardInterrupt)
"""What a user's code may raise: a library that calls sys.exit must not look like a crash of the worker."""


@dataclass(frozen=True, slots=True)
class Played:
    """A conversation with its environment."""

    instance: Any
    tools: Mapping[str, Callable[..., Any]]


def blames(method: str) -> Callable[[Handler], Handler]:
    """A request whose reply is {"error": ...} where the user's `method` fails."""

    def decorate(handler: Handler) -> Handler:
        @wraps(handler)
        def answer(table: "Conversations", request: Request) -> dict[str, Any]:
            try:
                return handler(table, request)
            except FAULTS as error:
                _print(error)
                said = str(error) if isinstance(error, ShapeError) else f"raised {describe(error)[:500]}"
                return {"error": f"{method} {said}"}

        return answer

    return decorate


class Conversations:
    """The conversations of this process, and a method for each kind of request."""

    def __init__(self) -> None:
        self._played: dict[int, Played] = {}

    def load(self, request: Request) -> dict[str, Any]:
        """Import what the configuration names."""
        config = InteractionConfig.model_validate(request["config"])
        # At the end of the path, so that a file in one of these folders cannot replace an installed library.
        sys.path.extend(str(folder.resolve()) for folder in config.module_dirs())
        self._imported, schemas = import_all(config, with_schemas=request["with_schemas"])
        self._limit = config.max_answer_chars
        flags = {name: getattr(self._imported, name) for name in ("form", "own_calls", "rewards_at_end")}
        return {"schemas": schemas, **flags}

    @blames("reset")
    def begin(self, request: Request) -> dict[str, Any]:
        """Start a conversation: {"messages", "state"}."""
        self._seed(request)
        imported, row, conversation = self._imported, request["row"], request["conversation"]
        if imported.make is None:
            self._played[conversation] = Played(None, imported.tools)
            return {}
        messages = [dict(one) for one in row.get("messages") or []]
        instance = imported.make()
        opening = read_opening(call_reset(instance, row, request["seed_of_row"], imported.form), messages)
        tools = {tool.__name__: tool for tool in public_tools(instance, imported.form)}
        self._played[conversation] = Played(instance, tools)
        return {"messages": opening, "state": self._state(instance)}

    def call(self, request: Request) -> dict[str, Any]:
        """Execute a call: {"text", "state"}."""
        played, name = self._seed(request), request["name"]
        try:
            if name not in played.tools:
                raise LookupError(f"there is no tool {name}")
            text = as_text(awaited(played.tools[name](**request["arguments"])), self._limit)
        except FAULTS as error:
            _print(error)
            # As TRL has it.
            text = json.dumps({"error": cut(describe(error), self._limit)}, ensure_ascii=False)
        return {"text": text, "state": self._state(played.instance)}

    @blames("step")
    def step(self, request: Request) -> dict[str, Any]:
        """The environment's step: {"messages", "done", "reward", "info"}."""
        instance = self._seed(request).instance
        return read_step(awaited(instance.step(request["turn" if takes_calls(instance) else "text"])), self._limit)

    @blames("get_reward")
    def final(self, request: Request) -> dict[str, Any]:
        """What `get_reward` gives for the whole conversation: {"reward"}."""
        return {"reward": read_reward(awaited(self._seed(request).instance.get_reward()))}

    @blames("perfect")
    def perfect(self, request: Request) -> dict[str, Any]:
        """The turns of a perfect player, by the environment's method `perfect(row)`: {"turns"}, None without one."""
        instance = self._seed(request).instance
        if not is_ours(instance, "perfect"):
            return {"turns": None}
        turns = awaited(instance.perfect(request["row"]))
        turns = [turns] if isinstance(turns, str) else list(turns)
        if not all(isinstance(turn, str) for turn in turns):
            raise ShapeError("returned something that is no text: return a list of turns")
        return {"turns": turns}

    def end(self, request: Request) -> dict[str, Any]:
        """Conversations are over."""
        for conversation in request["conversations"]:
            if conversation in self._played:
                close(self._played.pop(conversation).instance)
        return {}

    def _seed(self, request: Request) -> Any:
        """Seed the generators that a user's code may draw from without one of its own; the conversation, once it has begun."""
        random.seed(request["seed"])
        numpy.random.seed(request["seed"] % 2**32)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(request["seed"])
        return self._played.get(request["conversation"])

    def _state(self, instance: Any) -> dict[str, Any]:
        """Public attributes of an environment that are JSON values. Rewards written for TRL read them after the conversation."""
        kept: dict[str, Any] = {}
        if self._imported.form != "methods":
            return kept
        room = MAX_INFO_CHARS
        for name, value in sorted(getattr(instance, "__dict__", {}).items()):
            with suppress(TypeError, ValueError, RecursionError):
                if not name.startswith("_"):
                    text = json.dumps(value, allow_nan=False)
                    if len(text) <= room:
                        kept[name] = json.loads(text)
                        room -= len(text)
        return kept


def _print(error: BaseException) -> None:
    with suppress(Exception):
        traceback.print_exception(error, file=sys.stderr)


if __name__ == "__main__":
    table = Conversations()
    requests = (table.load, table.begin, table.call, table.step, table.final, table.perfect, table.end)
    answer_requests({handler.__name__: handler for handler in requests})

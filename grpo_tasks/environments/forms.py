"""The forms in which a user writes tools and environments. Runs in the worker process: all of this is the user's code.

    tools    functions; nothing is kept between two calls
    methods  a class with reset(**columns) and public methods, which are its tools (TRL's `environment_factory`)
    steps    a class with reset(row, seed) and step(completion), which takes one argument; further tools may stand in its
             attribute `tools`. One that has an attribute `schemas` executes its calls itself: its step receives the turn as a
             message, with tool_calls

Functions and methods may be async. They are called with the generators of `random`, numpy and torch seeded by conversation and
turn, so that a conversation goes the same way in every worker. torch is seeded once the user's code has imported it: nothing else
here needs it, and importing it takes seconds.
"""

import asyncio
import inspect
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from grpo_tasks.content.modules import import_object
from grpo_tasks.environments.texts import (
    MAX_INFO_CHARS,
    ShapeError,
    as_text,
    describe,
    failure,
    read_opening,
    read_reward,
    read_step,
)
from schemas.config.learning.interaction import InteractionConfig
from schemas.errors import ConfigError, UserError

Schema = dict[str, Any]

_EXAMPLE = 'a description, then "Args:" with a line "    NAME: what it is" for each argument'

# One loop for all calls: a client that a method opened in one call still works in the next.
_LOOP = asyncio.Runner()


def tool_schemas(tools: Iterable[Callable[..., Any]], *, place: str) -> list[Schema]:
    """The schemas of these tools, in their order.

    Args:
        tools: functions or bound methods.
        place: where they are named, for error messages.

    Raises:
        ConfigError: a tool without types or docstring, or two tools of one name.
    """
    schemas: dict[str, Schema] = {}
    for tool in tools:
        schema = tool_schema(tool, place=place)
        name = schema["function"]["name"]
        if name in schemas:
            raise ConfigError(f"two tools are named {name}", place=place, fix="rename one of them")
        schemas[name] = schema
    return list(schemas.values())


def tool_schema(tool: Callable[..., Any], *, place: str) -> Schema:
    """The schema of one tool: {"type": "function", "function": {"name", "description", "parameters", "return"}}.

    transformers reads the types and the docstring (its page "Tool use"). Here only the messages are ours.

    Raises:
        ConfigError: it has no docstring, an argument has no type or no description, or takes what JSON cannot hold.
    """
    # Imported here: only a worker that is asked for schemas needs it.
    from transformers.utils import chat_template_utils as library

    place = f"{place}; {_line_of(tool)}"
    name = getattr(tool, "__name__", "")
    if not name.isidentifier():
        fix = "write def NAME(...) with types and a docstring"
        raise ConfigError(f"{type(tool).__name__} has no name, so the policy cannot call it", place=place, fix=fix)
    if not (inspect.getdoc(tool) or "").strip():
        raise ConfigError(f"the tool {name} has no docstring", place=place, fix=f"add one: {_EXAMPLE}")
    for parameter in inspect.signature(tool).parameters.values():
        _check(parameter, name, place)
    try:
        # Without these, a question about images and tensors would import torch: seconds, and hundreds of megabytes.
        with patch.object(library, "is_torch_available", bool), patch.object(library, "is_vision_available", bool):
            schema: Schema = library.get_json_schema(tool)
    except library.DocstringParsingException as error:
        raise ConfigError(f"the docstring of {name} does not describe every argument", place=place, fix=_EXAMPLE) from error
    except library.TypeHintParsingException as error:
        message = f"{name}: {' '.join(map(str, error.args))}"
        raise ConfigError(
            message, place=place, fix="use str, int, float, bool, list, dict, Literal or unions of these"
        ) from error
    except (NameError, AttributeError, TypeError, ValueError, RecursionError) as error:
        message = f"the types of {name} cannot be read: {type(error).__name__}: {error}"
        raise ConfigError(message, place=place, fix="correct its annotations, or the choices in its docstring") from error
    if not schema["function"].get("description"):
        raise ConfigError(f"the docstring of {name} does not say what it does", place=place, fix=f"add it: {_EXAMPLE}")
    return schema


def public_methods(instance: object) -> list[Callable[..., Any]]:
    """The methods of an environment that the policy may call, as in TRL: all but reset, get_reward and those with _.

    Nor is `perfect(row)` or `close()` one, which we call: see `is_ours`.
    """
    # Of the class: getmembers of an instance would evaluate its properties.
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    found = [name for name in names if name not in ("reset", "get_reward") and not name.startswith("_")]
    return [getattr(instance, name) for name in found if not is_ours(instance, name)]


def is_ours(instance: object, name: str) -> bool:
    """Whether a method called step, perfect or close is the one that we call, by its parameters, and no tool of this name.

    step(completion)    one parameter, whatever its name
    perfect(row)        one parameter without a type, or called row; every argument of a tool has a type
    close()             no parameter
    """
    method = getattr(instance, name, None)
    if not callable(method) or name not in ("step", "perfect", "close"):
        return False
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return True  # some callables of C code have no signature
    if name == "close":
        return not parameters
    positional = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.KEYWORD_ONLY)]
    if not positional or sum(one.default is one.empty for one in parameters if one.kind is not one.VAR_KEYWORD) > 1:
        return False
    first = positional[0]
    return name == "step" or first.name == "row" or first.annotation is first.empty


def _check(parameter: inspect.Parameter, name: str, place: str) -> None:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if parameter.kind not in named:
        fix = "give every argument a name of its own"
        raise ConfigError(f"{name} takes {parameter}, and a call names its arguments", place=place, fix=fix)
    if parameter.annotation is inspect.Parameter.empty:
        fix = f"annotate it: {parameter.name}: str, int, float, bool, list or dict"
        raise ConfigError(f"the argument {parameter.name} of {name} has no type", place=place, fix=fix)


def _line_of(tool: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(tool), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else getattr(tool, "__qualname__", type(tool).__name__)


@dataclass(frozen=True, slots=True)
class ImportedObjects:
    """What the configuration names, imported."""

    config: InteractionConfig
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Tools that belong to no environment."""
    make: Callable[[], Any] | None = None
    """Makes an environment."""
    steps: bool = False
    """Whether its form is steps."""
    own_calls: bool = False
    """Whether it executes the calls of a turn itself."""
    rewards_at_end: bool = False
    """Whether it has a method get_reward."""


@dataclass(slots=True)
class Played:
    """A conversation with its environment."""

    loaded: ImportedObjects
    instance: Any = None
    tools: dict[str, Callable[..., Any]] = field(default_factory=dict)


def load(config: InteractionConfig, folders: Sequence[Path], *, with_schemas: bool) -> tuple[ImportedObjects, list[Schema]]:
    """Import what the configuration names, and make the schemas of its tools if they are wanted.

    Raises:
        ConfigError: it cannot be imported or made, has no reset, or a tool has no types or docstring.
    """
    if config.environment is None:
        found = [import_object(path, folders, place=f"interaction.tools.{index}") for index, path in enumerate(config.tools)]
        schemas = tool_schemas(found, place="interaction.tools") if with_schemas else []
        return ImportedObjects(config, {tool.__name__: tool for tool in found}), schemas
    place = "interaction.environment"
    maker = import_object(config.environment, folders, place=place)

    def make() -> Any:
        return maker(**config.settings)

    instance = _probe(make, maker, config, place)
    steps = is_ours(instance, "step")
    if not callable(getattr(instance, "reset", None)):
        fix = "add def reset(self, row, seed), which returns messages, text or None"
        raise ConfigError(f"{config.environment} has no method reset", place=place, fix=fix)
    if steps:
        _refuse_ambiguous(instance, config.environment, place)
    tools = _tools_of(instance, steps)
    if not steps and not tools:
        fix = "add def step(self, completion), or public methods with docstrings, which the policy may call"
        raise ConfigError(f"{config.environment} has no method besides reset", place=place, fix=fix)
    own = _has_schemas(instance) if steps else False
    schemas = [] if not with_schemas else (list(instance.schemas) if own else tool_schemas(tools, place=place))
    rewards_at_end = callable(getattr(instance, "get_reward", None))
    _close(instance)
    return ImportedObjects(config, make=make, steps=steps, own_calls=own, rewards_at_end=rewards_at_end), schemas


def begin(loaded: ImportedObjects, row: dict[str, Any], seed: int) -> tuple[Played | None, dict[str, Any]]:
    """Start a conversation. Returns it, None after a fault, and the reply: {"messages", "state"} or {"error"}."""
    if loaded.make is None:
        return Played(loaded, tools=dict(loaded.tools)), {"messages": [], "state": {}}
    messages = [dict(one) for one in row.get("messages") or []]
    try:
        instance = loaded.make()
        result = _finished(_reset(instance, row, seed, loaded.steps))
        opening = read_opening(result, messages)
        tools = {tool.__name__: tool for tool in _tools_of(instance, loaded.steps)}
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return None, {"error": _blamed("reset", error)}
    played = Played(loaded, instance, tools)
    return played, {"messages": opening, "state": _state(played)}


def call(played: Played, name: str, arguments: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """Execute a call: {"text", "failed", "state"}."""
    tool = played.tools.get(name)
    try:
        if tool is None:
            raise LookupError(f"there is no tool {name}")
        return {"text": as_text(_finished(tool(**arguments)), limit), "failed": False, "state": _state(played)}
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        _print(error)
        return {"text": failure(error, limit), "failed": True, "state": _state(played)}


def step(played: Played, text: str, turn: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """The environment's step: {"messages", "done", "reward", "info"} or {"error"}."""
    try:
        return read_step(_finished(played.instance.step(turn if _has_schemas(played.instance) else text)), limit)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return {"error": _blamed("step", error)}


def final_reward(played: Played) -> dict[str, Any]:
    """What `get_reward` gives for the whole conversation: {"reward"} or {"error"}."""
    try:
        return {"reward": read_reward(_finished(played.instance.get_reward()))}
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return {"error": _blamed("get_reward", error)}


def end(played: Played) -> None:
    """The conversation is over."""
    _close(played.instance)


def perfect_turns(played: Played, row: dict[str, Any]) -> dict[str, Any]:
    """The turns of a perfect player, by the environment's method `perfect(row)`: {"turns"}, None without one, or {"error"}."""
    if not is_ours(played.instance, "perfect"):
        return {"turns": None}
    try:
        turns = _finished(played.instance.perfect(row))
        turns = [turns] if isinstance(turns, str) else list(turns)
        if not all(isinstance(turn, str) for turn in turns):
            raise ShapeError("returned something that is no text: return a list of turns")
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return {"error": _blamed("perfect", error)}
    return {"turns": turns}


def seed_generators(seed: int) -> None:
    """Seed the generators that a user's code may draw from without one of its own."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _probe(make: Callable[[], Any], maker: Callable[..., Any], config: InteractionConfig, place: str) -> Any:
    try:
        inspect.signature(maker).bind(**config.settings)
    except TypeError as error:
        fix = "correct interaction.settings"
        raise ConfigError(f"{config.environment} cannot be made: {error}", place=place, fix=fix) from error
    except ValueError:
        pass  # some callables of C code have no signature
    try:
        return make()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{config.environment} cannot be made: {describe(error)}"
        raise ConfigError(message, place=f"{place}; {last.filename}:{last.lineno}", fix="correct it, or its settings") from error


def _refuse_ambiguous(instance: Any, name: str, place: str) -> None:
    """Refuse a class whose `step` may be a tool as well: reset takes any column, as in TRL, and step is typed and described."""
    (parameter, *_) = inspect.signature(instance.step).parameters.values()
    open_reset = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(instance.reset).parameters.values())
    described = f"{parameter.name}:" in (inspect.getdoc(instance.step) or "")
    if not open_reset or not described or parameter.annotation is parameter.empty or parameter.name in ("completion", "turn"):
        return
    raise ConfigError(
        f"step of {name} may be a tool with the argument {parameter.name}, as in TRL, or what answers every turn",
        place=place,
        fix="rename the tool; or call the argument completion if step answers every turn",
    )


def _has_schemas(instance: Any) -> bool:
    return isinstance(getattr(instance, "schemas", None), list | tuple)


def _tools_of(instance: Any, steps: bool) -> list[Callable[..., Any]]:
    return list(getattr(instance, "tools", None) or []) if steps else public_methods(instance)


def _reset(instance: Any, row: dict[str, Any], seed: int, steps: bool) -> Any:
    parameters = list(inspect.signature(instance.reset).parameters.values())
    columns = {**row, "prompt": row.get("messages")}
    known = {"seed": seed, "row": row} | columns
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if steps and positional and positional[0].name not in columns.keys() | {"seed"}:
        takes_seed = len(positional) > 1 and (positional[1].name == "seed" or positional[1].default is positional[1].empty)
        only_named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name in known]
        return instance.reset(row, *([seed] if takes_seed else []), **{name: known[name] for name in only_named})
    # As in TRL: the columns by name. A method without **kwargs receives only what it names.
    given = columns if any(one.kind is one.VAR_KEYWORD for one in parameters) else {}
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return instance.reset(**(given | {name: known[name] for name in named if name in known}))


def _finished(result: Any) -> Any:
    return _LOOP.run(_await(result)) if inspect.isawaitable(result) else result


async def _await(result: Any) -> Any:
    return await result


def _state(played: Played) -> dict[str, Any]:
    """Public attributes of an environment that are JSON values. Rewards written for TRL read them after the conversation."""
    if played.loaded.make is None or played.loaded.steps:
        return {}
    kept: dict[str, Any] = {}
    room = MAX_INFO_CHARS
    for name, value in sorted(getattr(played.instance, "__dict__", {}).items()):
        with suppress(TypeError, ValueError, RecursionError):
            if not name.startswith("_"):
                text = json.dumps(value, allow_nan=False)
                if len(text) <= room:
                    kept[name] = json.loads(text)
                    room -= len(text)
    return kept


def _blamed(method: str, error: BaseException) -> str:
    _print(error)
    return f"{method} {error}" if isinstance(error, ShapeError) else f"{method} raised {describe(error)[:500]}"


def _print(error: BaseException) -> None:
    """The traceback goes to the log."""
    with suppress(Exception):
        traceback.print_exception(error, file=sys.stderr)


def _close(instance: Any) -> None:
    with suppress(Exception):
        if is_ours(instance, "close"):
            _finished(instance.close())

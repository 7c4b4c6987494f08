"""The forms in which a user writes tools and environments, and what they may return. Runs in the worker process.

    tools    functions; nothing is kept between two calls
    methods  a class with reset(**columns) and public methods, which are its tools (TRL's `environment_factory`)
    steps    a class with reset(row, seed) and step(completion), which takes one argument; further tools may stand in its
             attribute `tools`. One that has an attribute `schemas` executes its calls itself: its step receives the turn as a
             message, with tool_calls

Functions and methods may be async. What they return becomes text and messages: text verbatim, anything else as JSON, and never
longer than the limit. It may hold markers of the chat or of calls: where text becomes tokens, such markers are escaped.
"""

import dataclasses
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

from grpo_tasks.content.modules import cause_of, import_object, users_line
from grpo_tasks.processes.worker_main import awaited
from schemas.config.rollout import InteractionConfig
from schemas.errors import ConfigError, UserError

Schema = dict[str, Any]
Form = Literal["tools", "methods", "steps"]

_OF_A_ROLLOUT = {"prompts", "prompt", "completions", "completion", "messages", "trainer", "client", "model", "tokenizer"}
_A_CLASS = """class Answering:
    def reset(self, row, seed):
        self.row = row  # its columns; return messages to begin otherwise than the row

    def step(self, completion):
        right = str(self.row["answer"]) in completion
        return {"messages": [], "done": True, "reward": float(right)}"""
_EXAMPLE = 'a description, then "Args:" with a line "    NAME: what it is" for each argument'


def tool_schemas(tools: Iterable[Callable[..., Any]], *, place: str) -> list[Schema]:
    """The schemas of these tools, in their order; raises ConfigError as `tool_schema`, and for two tools of one name."""
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

    transformers reads the types and the docstring (its page "Tool use"). Here only the messages of ConfigError are ours.
    """
    # Imported here: only a worker that is asked for schemas needs it.
    from transformers.utils import chat_template_utils as library

    code = getattr(inspect.unwrap(tool), "__code__", None)
    line = f"{code.co_filename}:{code.co_firstlineno}" if code else getattr(tool, "__qualname__", type(tool).__name__)
    place = f"{place}; {line}"
    name = getattr(tool, "__name__", "")
    if not name.isidentifier():
        fix = "write def NAME(...) with types and a docstring"
        raise ConfigError(f"{type(tool).__name__} has no name, so the policy cannot call it", place=place, fix=fix)
    if not (inspect.getdoc(tool) or "").strip():
        raise ConfigError(f"the tool {name} has no docstring", place=place, fix=f"add one: {_EXAMPLE}")
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            fix = "give every argument a name of its own"
            raise ConfigError(f"{name} takes {parameter}, and a call names its arguments", place=place, fix=fix)
        if parameter.annotation is parameter.empty:
            fix = f"annotate it: {parameter.name}: str, int, float, bool, list or dict"
            raise ConfigError(f"the argument {parameter.name} of {name} has no type", place=place, fix=fix)
    try:
        # Without these, a question about images and tensors would import torch: seconds, and hundreds of megabytes.
        with patch.object(library, "is_torch_available", bool), patch.object(library, "is_vision_available", bool):
            schema: Schema = library.get_json_schema(tool)
    except library.DocstringParsingException as error:
        raise ConfigError(f"the docstring of {name} does not describe every argument", place=place, fix=_EXAMPLE) from error
    except library.TypeHintParsingException as error:
        message = f"{name}: {' '.join(map(str, error.args))}"
        fix = "use str, int, float, bool, list, dict, Literal or unions of these"
        raise ConfigError(message, place=place, fix=fix) from error
    except (NameError, AttributeError, TypeError, ValueError, RecursionError) as error:
        message = f"the types of {name} cannot be read: {type(error).__name__}: {error}"
        raise ConfigError(message, place=place, fix="correct its annotations, or the choices in its docstring") from error
    if not schema["function"].get("description"):
        raise ConfigError(f"the docstring of {name} does not say what it does", place=place, fix=f"add it: {_EXAMPLE}")
    return schema


def public_methods(instance: object) -> list[Callable[..., Any]]:
    """The methods that the policy may call, as in TRL: all but reset, get_reward, those with _, and what we call (`is_ours`)."""
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


@dataclass(frozen=True, slots=True)
class ImportedObjects:
    """What the configuration names."""

    form: Form
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Tools that belong to no environment."""
    make: Callable[[], Any] | None = None
    own_calls: bool = False
    """Whether it executes the calls of a turn itself."""
    rewards_at_end: bool = False


def import_all(config: InteractionConfig, *, with_schemas: bool) -> tuple[ImportedObjects, list[Schema]]:
    """Import what the configuration names, and make the schemas of its tools if they are wanted; raises ConfigError."""
    folders = config.module_dirs()
    if config.environment is None:
        found = [import_object(path, folders, place=f"interaction.tools.{index}") for index, path in enumerate(config.tools)]
        schemas = tool_schemas(found, place="interaction.tools") if with_schemas else []
        return ImportedObjects("tools", {tool.__name__: tool for tool in found}), schemas
    place = "interaction.environment"
    maker = import_object(config.environment, folders, place=place)

    def make() -> Any:
        return maker(**config.settings)

    instance = _probe(make, maker, config, place)
    form: Form = "steps" if is_ours(instance, "step") else "methods"
    if not callable(getattr(instance, "reset", None)):
        fix = "add def reset(self, row, seed), which returns messages, text or None"
        raise ConfigError(f"{config.environment} has no method reset", place=place, fix=fix)
    if form == "steps":
        _refuse_ambiguous(instance, config.environment, place)
    tools = public_tools(instance, form)
    if form == "methods" and not tools:
        fix = "add def step(self, completion), or public methods with docstrings, which the policy may call"
        raise ConfigError(f"{config.environment} has no method besides reset", place=place, fix=fix)
    own = form == "steps" and takes_calls(instance)
    schemas = [] if not with_schemas else (list(instance.schemas) if own else tool_schemas(tools, place=place))
    rewards_at_end = callable(getattr(instance, "get_reward", None))
    close(instance)
    return ImportedObjects(form, make=make, own_calls=own, rewards_at_end=rewards_at_end), schemas


def _probe(make: Callable[[], Any], maker: Callable[..., Any], config: InteractionConfig, place: str) -> Any:
    path = config.environment or ""
    asked = (
        inspect.signature(maker).parameters.keys() & _OF_A_ROLLOUT - config.settings.keys() if inspect.isfunction(maker) else ()
    )
    if asked:
        raise ConfigError(
            f"{path} is a function that samples by itself (its parameter {min(asked)}), like TRL's rollout_func; here the run "
            "samples, and an environment is a class with reset and step, which answers each turn",
            place=place,
            fix=f"write a class, and name it: environment: '{path.partition(':')[0]}:Answering'\n\n{_A_CLASS}",
        )
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
        message = f"{config.environment} cannot be made: {describe(error)}"
        fix = cause_of(error) or "correct it, or its settings"
        raise ConfigError(message, place=f"{place}; {users_line(error, maker.__module__)}", fix=fix) from error


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


def takes_calls(instance: Any) -> bool:
    """Whether the step of an environment receives the turn as a message, and executes its calls itself."""
    return isinstance(getattr(instance, "schemas", None), list | tuple)


def public_tools(instance: Any, form: Form) -> list[Callable[..., Any]]:
    """The tools of an environment."""
    return list(getattr(instance, "tools", None) or []) if form == "steps" else public_methods(instance)


def call_reset(instance: Any, row: dict[str, Any], seed: int, form: Form) -> Any:
    """What the `reset` of an environment returns for a row."""
    parameters = list(inspect.signature(instance.reset).parameters.values())
    columns = {**row, "prompt": row.get("messages")}
    known = {"seed": seed, "row": row} | columns
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if form == "steps" and positional and positional[0].name not in columns.keys() | {"seed"}:
        takes_seed = len(positional) > 1 and (positional[1].name == "seed" or positional[1].default is positional[1].empty)
        only_named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name in known]
        return awaited(instance.reset(row, *([seed] if takes_seed else []), **{name: known[name] for name in only_named}))
    # As in TRL: the columns by name. A method without **kwargs receives only what it names.
    given = columns if any(one.kind is one.VAR_KEYWORD for one in parameters) else {}
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return awaited(instance.reset(**(given | {name: known[name] for name in named if name in known})))


def close(instance: Any) -> None:
    """Tell an environment that it is not needed any more, by its method `close()`."""
    with suppress(Exception):
        if is_ours(instance, "close"):
            awaited(instance.close())


MAX_MESSAGES = 64
MAX_PROMPT_CHARS = 1_000_000
MAX_INFO_CHARS = 16_384
"""Characters of `info`, and of the attributes of an environment, as JSON."""
ROLES = frozenset({"user", "tool"})
OPENING_ROLES = frozenset({"system", "user", "assistant", "tool"})

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{1,16}")
"""The address of an object, which differs from process to process."""


class ShapeError(ValueError):
    """A returned value that breaks the contract. Its text completes a sentence that begins with the name of the method."""


def as_text(result: Any, limit: int) -> str:
    """A result as text of at most `limit` characters, and a mark where it was cut."""
    if isinstance(result, str):
        return cut(result, limit)
    if isinstance(result, bytes):
        return cut(result.decode(errors="replace"), limit)
    try:
        text = json.dumps(result, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        text = str(result)
    return cut(_ADDRESS.sub("", text), limit)


def describe(error: BaseException) -> str:
    """Type and text of an exception."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return _ADDRESS.sub("", f"{type(error).__name__}: {text}" if text else type(error).__name__)


def cut(text: str, limit: int) -> str:
    """The first `limit` characters, and a mark if there were more. Lone surrogates, which UTF-8 does not have, become escapes."""
    kept = text[:limit].encode(errors="backslashreplace").decode()
    return kept if len(text) <= limit else f"{kept}\n[... cut: {len(text):,} characters, the first {limit:,} are shown]"


def read_opening(result: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages that a conversation begins with; empty for those of the row, which are `messages`.

    A reset returns messages, text that is appended to the last user message (as in TRL), or None; otherwise ShapeError.
    """
    if result is None:
        return []
    if isinstance(result, list) and result and all(isinstance(one, Mapping) and "role" not in one for one in result):
        result = "".join(_block(one) for one in result)
    if isinstance(result, str):
        text = cut(result, MAX_PROMPT_CHARS)
        if not messages or messages[-1].get("role") != "user":
            return [*messages, {"role": "user", "content": text}]
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1].get('content') or ''}{text}"}]
    if not result and isinstance(result, list | tuple):
        raise ShapeError("returned no messages: return None to keep those of the row")
    return _messages(result, OPENING_ROLES, MAX_PROMPT_CHARS)


def read_step(result: Any, limit: int) -> dict[str, Any]:
    """What a step returned, as {"messages", "done", "reward", "info"}, with at most `limit` characters in each message.

    A step may return an object or a mapping with these names, a tuple of two to four of them, or text; otherwise ShapeError.
    """
    keys = ("messages", "done", "reward", "info")
    if isinstance(result, str):
        result = {"messages": result}
    elif isinstance(result, tuple):
        if not 2 <= len(result) <= 4:
            raise ShapeError(f"returned a tuple of {len(result)}: return (messages, done, reward, info)")
        result = dict(zip(keys, result, strict=False))
    elif dataclasses.is_dataclass(result) or not isinstance(result, Mapping):
        found = {name: getattr(result, name) for name in keys if hasattr(result, name)}
        if found.keys().isdisjoint({"messages", "done"}):
            raise ShapeError(f"returned {type(result).__name__}: return a dict with messages, done, reward and info")
        result = found
    unknown = sorted(map(str, result.keys() - set(keys)))
    if unknown:
        raise ShapeError(f"returned the key {unknown[0][:80]}: the keys are messages, done, reward and info")
    said = result.get("messages")
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    done = result.get("done", False)
    if not isinstance(done, bool | int) and type(done).__name__ not in ("bool_", "bool"):
        raise ShapeError(f"returned done as {type(done).__name__}: return True or False")
    messages = _messages(said or [], ROLES, limit)
    if not messages and not done:
        raise ShapeError("returned no messages, and the conversation is not over: return done=True, or say something")
    reward, info = read_reward(result.get("reward")), as_info(result.get("info"))
    return {"messages": messages, "done": bool(done), "reward": reward, "info": info}


def read_reward(value: Any) -> float | None:
    """A reward as a finite number, or None; raises `ShapeError` for anything else."""
    value = value.item() if callable(getattr(value, "item", None)) else value
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        shown = value if isinstance(value, float) else type(value).__name__
        raise ShapeError(f"returned the reward {shown}: return a finite number, or None")
    return float(value)


def as_info(value: Any) -> dict[str, Any]:
    """A mapping as JSON values; empty with a note when it is too long or no mapping."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        value = {"info": value}
    try:
        text = _ADDRESS.sub("", json.dumps({str(key): one for key, one in value.items()}, default=_plain))
    except (TypeError, ValueError, RecursionError):
        return {"cut": "info is no JSON"}
    if len(text) > MAX_INFO_CHARS:
        return {"cut": f"info has {len(text):,} characters as JSON, and {MAX_INFO_CHARS:,} are the limit"}
    read: dict[str, Any] = json.loads(text, parse_constant=str)
    return read


def _messages(found: Any, roles: frozenset[str], limit: int) -> list[dict[str, Any]]:
    if not isinstance(found, list | tuple):
        raise ShapeError(f"returned {type(found).__name__} instead of messages: return a list of {{role, content}}")
    if len(found) > MAX_MESSAGES:
        raise ShapeError(f"returned {len(found)} messages, and {MAX_MESSAGES} are the limit")
    messages = []
    for one in found:
        if not isinstance(one, Mapping):
            raise ShapeError(f"returned a message of type {type(one).__name__}: a message is {{role, content}}")
        role, content, name = one.get("role"), one.get("content"), one.get("name")
        if role not in roles:
            raise ShapeError(f"returned a message of the role {str(role)[:40]}: the roles are {', '.join(sorted(roles))}")
        if isinstance(content, list) and content and all(isinstance(part, Mapping) and "type" in part for part in content):
            content = "".join(_block(part) for part in content)
        text = "" if content is None else as_text(content, limit)
        messages.append({"role": role, "content": text} | ({"name": cut(name, 200)} if isinstance(name, str) else {}))
    return messages


def _block(one: Mapping[str, Any]) -> str:
    if one.get("type") != "text" or not isinstance(one.get("text"), str):
        raise ShapeError(f"returned content of the type {str(one.get('type'))[:40]}: only text can be shown to the policy")
    return str(one["text"])


def _plain(value: Any) -> Any:
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if callable(getattr(value, "model_dump", None)):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return list(value) if isinstance(value, tuple) else str(value)

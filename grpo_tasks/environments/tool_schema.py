"""From typed Python functions with docstrings to the JSON schemas that `apply_chat_template(tools=...)` takes.

transformers reads the types and the docstring (its page "Tool use"): plain functions, methods, sync or async, as TRL takes them.
Here only the messages are ours. This module runs in worker processes: the functions belong to the user.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

from schemas.errors import ConfigError

Schema = dict[str, Any]

_EXAMPLE = 'a description, then "Args:" with a line "    NAME: what it is" for each argument'


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

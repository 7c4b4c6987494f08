"""An exception of a reward function as a fault that a person can act on.

    exception -> the innermost line of the user's own code, the types and sizes of the arguments, and what to change

Runs in the worker process. The advice covers the usual causes; for any other exception it stays empty.
"""

import re
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_tasks.rewards.contract import RewardFault, shorten
from schemas.secret import hide

MAX_SHOWN = 10
"""Arguments that are described."""
MAX_CHARS = 700
"""Characters of the description."""

_IN_STRING = re.compile(r"'(?:list|dict)' object has no attribute '(\w+)'")
_IN_NONE = re.compile(r"'NoneType' object has no attribute '(\w+)'")
_NOT_STRINGS = ("expected string or bytes-like object", "expected str instance", "must be str, not", "can only concatenate str")
_OF_MATCH = {"group", "groups", "groupdict", "start", "end", "span"}


def raised(error: BaseException, arguments: Mapping[str, Any], columns: Sequence[str], module: str) -> RewardFault:
    """The fault of a call that raised.

    Args:
        error: what was raised.
        arguments: the arguments of the call.
        columns: names of the data's columns.
        module: dotted name of the user's module.
    """
    message = _message_of(error)
    return RewardFault(
        "raised",
        f"raised {type(error).__name__}: {shorten(hide(message))}",
        source=_source(error, module),
        fix=_advice(error, message, arguments, columns),
        arguments=_described(arguments),
    )


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"(its message cannot be read: {type(second).__name__})"


def _source(error: BaseException, module: str) -> str:
    """File, line and function: the innermost frame in the folder of the user's module, or else outside of libraries."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "grpo_tasks/rewards/" not in frame.filename]
    file = getattr(sys.modules.get(module), "__file__", None)
    home = str(Path(file).parent) if file else ""
    inside = [frame for frame in frames if home and frame.filename.startswith(home) and not _is_library(frame.filename, home)]
    chosen = inside or [frame for frame in frames if not _is_library(frame.filename, "")] or frames
    return f"{chosen[-1].filename}:{chosen[-1].lineno} in {chosen[-1].name}" if chosen else ""


def _is_library(file: str, home: str) -> bool:
    """Whether a file is installed. What lies below `home` is not, unless an environment lies there."""
    below = file[len(home) :]
    return "site-packages" in below or "dist-packages" in below or file.startswith((sysconfig.get_path("stdlib"), "<frozen"))


def _advice(error: BaseException, message: str, arguments: Mapping[str, Any], columns: Sequence[str]) -> str:
    """What to change, where the exception has a usual cause."""
    known = f"the data have the columns {', '.join(columns)}"
    if isinstance(error, TypeError) and "unexpected keyword argument" in message:
        return "add **kwargs to the function: as in TRL, it receives every column of the data"
    if isinstance(error, TypeError) and "required" in message and "argument" in message:
        there = "the one named by data.answer_column arrives as answer"
        return f"add a column of that name to the data ({there}), or set it in params; {known}"
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) and error.args[0] not in arguments:
        key = error.args[0]
        return f"if {key} is meant to be a column: {known}; rename one, add it, or set {key} in params"
    if isinstance(error, NameError):
        return "define or import that name in the module: the worker process knows nothing of a notebook or a script"
    if isinstance(error, ValueError) and "could not convert string to float" in message:
        return "a model can write anything: catch the ValueError, and return 0 for text that is no number"
    return _advice_on_none(message, arguments) or _advice_on_form(error, message, arguments)


def _advice_on_none(message: str, arguments: Mapping[str, Any]) -> str:
    if "NoneType" not in message:
        return ""
    found = _IN_NONE.search(message)
    if found and found[1] in _OF_MATCH:
        return f"a regular expression that finds nothing gives None: test the match before .{found[1]}()"
    lacking = [name for name, values in arguments.items() if isinstance(values, list) and any(value is None for value in values)]
    if lacking:
        return f"some rows have no {' and no '.join(lacking)}: return None for a completion whose value is None"
    return "a value is None: test it before it is used"


def _advice_on_form(error: BaseException, message: str, arguments: Mapping[str, Any]) -> str:
    completions = arguments.get("completions") or [""]
    if isinstance(completions[0], str):
        if isinstance(error, TypeError | IndexError) and message.startswith("string ind"):
            return (
                "completions arrive as strings here (TRL's standard format): use completion instead of completion[0]['content'], "
                "or set data.format: conversational"
            )
        return ""
    method = _IN_STRING.search(message)
    if (method and hasattr(str, method[1])) or any(words in message for words in _NOT_STRINGS):
        return (
            "completions arrive as lists of messages here (TRL's conversational format): a function for strings needs "
            "as_text: true in its entry, or completion[0]['content'] in its code"
        )
    return ""


def _described(arguments: Mapping[str, Any]) -> str:
    """The arguments that are lists, with their types and sizes."""
    lists = {name: value for name, value in arguments.items() if isinstance(value, list)}
    # What a function is about comes first, and columns after it.
    first = ["completions", "prompts", "completion_ids", "answer"]
    names = [name for name in first if name in lists] + [name for name in lists if name not in first]
    shown = [f"{name}: {_list_of(lists[name])}" for name in names[:MAX_SHOWN]]
    more = [f"{len(names) - MAX_SHOWN} more"] if len(names) > MAX_SHOWN else []
    return shorten("; ".join(shown + more), MAX_CHARS)


def _list_of(values: list[Any]) -> str:
    kinds = sorted({_kind(value) for value in values})
    return f"list of {len(values)}" + (f", each {' or '.join(kinds[:3])}" if kinds else "")


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return f"[{{{', '.join(map(repr, value[0]))}}}{', ...' if len(value) > 1 else ''}]"
    if isinstance(value, list | tuple):
        return f"a list of {type(value[0]).__name__}" if value else "an empty list"
    return "None" if value is None else type(value).__name__

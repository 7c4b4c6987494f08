"""From the entry of a reward in the configuration to a callable. Runs in the worker process only: a user's code never enters the
trainer.

A built-in function is found by its name, a user's function by `package.module:function`. The working directory and the folder of
the config file are searched after the installed packages. Parameters of the configuration override columns of the same name.
"""

import asyncio
import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from grpo_tasks.rewards.builtin import BUILTIN
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import RewardConfig, RewardsConfig
from schemas.errors import ConfigError

RewardFunction = Callable[..., Any]

_GIVEN = {"prompts", "completions", "completion_ids", "answer", "answers", "completion", "columns"}


def load_function(name: str, reward: RewardConfig, rewards: RewardsConfig, completion: CompletionConfig) -> RewardFunction:
    """The callable of one entry, with its parameters bound.

    Args:
        name: name of the entry, for error messages.
        reward: its resolved settings (`function` is set).
        rewards: where modules of own functions lie.
        completion: what an answer is, which built-in functions receive as keyword argument.

    Raises:
        ConfigError: the function cannot be imported, is not callable, or has no such parameter.
    """
    place = f"rewards.functions.{name}"
    if reward.function in BUILTIN:
        function = BUILTIN[reward.function]
        known = inspect.signature(function).parameters.keys()
        _refuse_unknown(reward.params, sorted(known - _GIVEN), place=place)
        bound = ({"completion": completion} if "completion" in known else {}) | reward.params
        # A data column that happens to be named max_length must not set the parameter of that name.
        return _bind(function, bound, known - _GIVEN)
    return _bind(_import(reward.function or name, rewards.module_dirs(), place=place), dict(reward.params), frozenset())


def _bind(function: RewardFunction, bound: Mapping[str, Any], own: Set[str]) -> RewardFunction:
    """The function with its parameters bound. It receives the arguments of a call except those named in `own`.

    An awaitable result is awaited, so `async def` functions work too.
    """

    def call(**arguments: Any) -> Any:
        result = function(**({key: value for key, value in arguments.items() if key not in own} | dict(bound)))
        return asyncio.run(_finish(result)) if inspect.isawaitable(result) else result

    return call


async def _finish(result: Any) -> Any:
    return await result


def _refuse_unknown(params: Mapping[str, Any], known: list[str], *, place: str) -> None:
    for param in params:
        if param not in known:
            near = difflib.get_close_matches(param, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"parameters: {', '.join(known) or 'none'}"
            raise ConfigError(f"{param} is not a parameter of this reward", place=f"{place}.params", fix=hint)


def _import(path: str, folders: Sequence[Path], *, place: str) -> RewardFunction:
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{path} does not name a function", place=place, fix="write package.module:function")
    found: Any = _module(module_name, folders, place=place)
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"did you mean {near[0]}?" if near else f"define it there, or use another: {_functions_of(found)}"
            raise ConfigError(f"{module_name} has no {part}", place=place, fix=hint)
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{path} is {type(found).__name__}, which cannot be called", place=place, fix="name a function")
    function: RewardFunction = found
    return function


def _module(name: str, folders: Sequence[Path], *, place: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{name} imports {error.name}, which is not installed", place=place, fix=f"install {error.name}"
            ) from error
        files = [path.stem for folder in folders for path in folder.glob("*.py")]
        files += [path.parent.name for folder in folders for path in folder.glob("*/__init__.py")]
        near = difflib.get_close_matches(name.partition(".")[0], files, n=1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"put it next to the config file or into the working directory ({Path.cwd()}), or install it"
        )
        raise ConfigError(f"there is no module {error.name}", place=place, fix=hint) from error
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{name} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(message, place=f"{place}; {last.filename}:{last.lineno}", fix="fix that line") from error


def _functions_of(module: Any) -> str:
    names = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    return ", ".join(names) or "the module defines none"

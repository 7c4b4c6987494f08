"""Reward functions that a notebook or script passes as Python objects.

Rewards run in a worker process, which imports them by name. A function of a module is imported from there. A function of a
notebook (or of the script that was started) has no module to import, so its source is written to one in the stage directory.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from grpo_tasks.content.modules import modules_sha256
from schemas.config.rewards import RewardConfig, RewardsConfig
from schemas.errors import ConfigError

Reward = Callable[..., Any] | str
"""A function with TRL's signature, or "package.module:function"."""
MODULE = "notebook_rewards"
"""Name of the module that holds the source of functions from a notebook."""
_OWN_MODULE = "put the function into a module file and import it from there"


def add_rewards(section: RewardsConfig, rewards: Mapping[str, Reward], directory: Path) -> RewardsConfig:
    """The rewards section of a config with further functions.

    Args:
        section: the section to start from.
        rewards: functions by the name that they get.
        directory: where the source of functions without a module is written.

    Raises:
        ConfigError: a function uses something that only exists in this process.
    """
    sources: dict[str, str] = {}
    entries, folders = {}, set()
    for name, reward in rewards.items():
        if isinstance(reward, str):
            entries[name] = RewardConfig(function=reward)
            continue
        function = _plain_function(name, reward)
        folder = _module_folder(function)
        if folder is None:
            sources[name] = _source_of(name, function)
            folder = directory
        folders.add(folder)
        module = function.__module__ if folder != directory else MODULE
        entries[name] = RewardConfig(function=f"{module}:{function.__qualname__}")
    if sources:
        (directory / f"{MODULE}.py").write_text("from __future__ import annotations\n\n" + "\n\n".join(sources.values()), "utf-8")
    folders |= {section.module_dir.resolve()} if section.module_dir else set()
    if len(folders) > 1:
        names = ", ".join(str(folder) for folder in sorted(folders))
        raise ConfigError(f"the reward functions come from several folders: {names}", place="rewards", fix="use one module file")
    return section.model_copy(update={"functions": section.functions | entries, "module_dir": next(iter(folders), None)})


def rewards_sha256(section: RewardsConfig) -> str:
    """Hash of the code of all reward functions that are not built in."""
    modules = sorted({(reward.function or "").partition(":")[0] for reward in section.functions.values()})
    return " ".join(modules_sha256(module, section.module_dirs()) for module in modules)


def _plain_function(name: str, reward: Callable[..., Any]) -> FunctionType:
    if not isinstance(reward, FunctionType) or reward.__name__ == "<lambda>" or reward.__code__.co_freevars:
        raise ConfigError(
            f"the worker process cannot import {reward!r}: it is not a plain function", place=f"rewards.{name}", fix=_OWN_MODULE
        )
    return reward


def _module_folder(function: FunctionType) -> Path | None:
    """The folder from which the function's module is imported; None if it has no module, or is not on its top level."""
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if function.__module__ == "__main__" or file is None or getattr(module, function.__qualname__, None) is not function:
        return None
    path = Path(file).resolve()
    above = function.__module__.count(".") + (path.name == "__init__.py")
    return path.parents[above]


def _source_of(name: str, function: FunctionType) -> str:
    """Source of a module with this function: what it uses from outside, imported or written down, and the function itself."""
    place = f"rewards.{name}"
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise ConfigError(f"the source of {function.__name__} is not known: {error}", place=place, fix=_OWN_MODULE) from error
    used = sorted(_names_in(function.__code__) & function.__globals__.keys())
    return "\n".join([*(_definition(each, function.__globals__[each], place) for each in used), "", source])


def _names_in(code: CodeType) -> set[str]:
    """Every global name that the code may read, also inside comprehensions and inner functions."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _definition(name: str, value: object, place: str) -> str:
    if inspect.ismodule(value):
        return f"import {value.__name__} as {name}"
    if value is None or isinstance(value, str | int | float | bool):
        return f"{name} = {value!r}"
    module = getattr(value, "__module__", None)
    if (inspect.isroutine(value) or inspect.isclass(value)) and module not in (None, "__main__", "builtins"):
        return f"from {module} import {value.__name__} as {name}"
    raise ConfigError(
        f"the function uses {name}, which is defined outside of it", place=place, fix=f"define it inside, or {_OWN_MODULE}"
    )

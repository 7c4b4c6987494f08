"""Reward functions that a notebook or script passes as Python objects.

    a function, class, instance or partial of a module     imported from there by the worker process
    one of a notebook, or of the script that was started   has no module to import: its source is written to one

Rewards run in a worker process, which imports them by name. What a reward of a notebook uses is imported or written down with it;
an instance is written as its class and its attributes, which must be plain values.
"""

import ast
import functools
import inspect
import linecache
import math
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from schemas.config.rewards import RewardConfig, RewardsConfig
from schemas.errors import ConfigError

Reward = Callable[..., Any] | str
"""A callable with TRL's signature, a class of such callables, or "package.module:name"."""
MODULE = "notebook_rewards"
"""Name of the module that holds the source of rewards from a notebook."""
_OWN_MODULE = "put it into a module file and import it from there"
_INSTALLED = ("site-packages", "dist-packages")


def add_rewards(section: RewardsConfig, rewards: Mapping[str, Reward], directory: Path) -> RewardsConfig:
    """The rewards section of a config with further functions.

    Args:
        section: the section to start from.
        rewards: functions, classes, instances or partials by the name that they get.
        directory: where the source of rewards without a module is written.

    Raises:
        ConfigError: a reward uses something that only exists in this process.
    """
    notebook = _Notebook()
    paths: dict[str, str] = {}
    folders = {section.module_dir.resolve()} if section.module_dir else set()
    for name, reward in rewards.items():
        if isinstance(reward, str):
            paths[name] = reward
            continue
        found = _importable(reward)
        if found is None:
            paths[name] = f"{MODULE}:{notebook.add_reward(name, reward)}"
            folders.add(directory)
            continue
        module, attribute = found
        paths[name] = f"{module.__name__}:{attribute}"
        folder = _folder_of(module)
        # What is installed needs no folder to be found.
        if not set(_INSTALLED) & set(folder.parts):
            folders.add(folder)
    if len(folders) > 1:
        names = ", ".join(str(folder) for folder in sorted(folders))
        raise ConfigError(f"the reward functions come from several folders: {names}", place="rewards", fix="use one module file")
    if notebook.definitions:
        (directory / f"{MODULE}.py").write_text(notebook.text(), "utf-8")
    entries = {name: RewardConfig(function=path) for name, path in paths.items()}
    return section.model_copy(update={"functions": section.functions | entries, "module_dir": next(iter(folders), None)})


def _importable(value: Any) -> tuple[ModuleType, str] | None:
    """The module and the dotted name by which another process can import a value; None when there are none."""
    if isinstance(value, MethodType):
        owner = _importable(value.__self__)
        return owner and (owner[0], f"{owner[1]}.{value.__name__}")
    for module in _modules_that_may_hold(value):
        qualified = getattr(value, "__qualname__", "")
        if qualified and _attribute(module, qualified) is value:
            return module, qualified
        for name, held in list(vars(module).items()):
            if held is value:
                return module, name
    return None


def _attribute(module: ModuleType, dotted: str) -> Any:
    found: Any = module
    for part in dotted.split("."):
        found = getattr(found, part, None)
    return found


def _modules_that_may_hold(value: Any) -> Iterator[ModuleType]:
    """Modules with a file, the one where the value or its class is defined first; never the script that was started."""
    home = getattr(value, "__module__", None)
    # An instance may stand in another module than its class; a function elsewhere would be an import of it.
    others = [] if inspect.isroutine(value) or inspect.isclass(value) else sorted(sys.modules)
    for name in dict.fromkeys([home, *others]):
        module = sys.modules.get(name or "")
        if name != "__main__" and isinstance(module, ModuleType) and isinstance(vars(module).get("__file__"), str):
            yield module


def _folder_of(module: ModuleType) -> Path:
    """The folder from which a module is imported."""
    path = Path(str(module.__file__)).resolve()
    return path.parents[module.__name__.count(".") + (path.name == "__init__.py")]


@dataclass(slots=True)
class _Notebook:
    """The module that is written for the rewards of a notebook."""

    definitions: dict[str, str] = field(default_factory=dict)
    """Source by name, each after those that it uses."""

    def text(self) -> str:
        """The source of the module."""
        return "\n\n".join(["from __future__ import annotations", *self.definitions.values()]) + "\n"

    def add_reward(self, name: str, reward: Any) -> str:
        """Write a reward down; the name that it has in the module."""
        place = f"rewards.{name}"
        if isinstance(reward, FunctionType) or inspect.isclass(reward):
            return self._add_source(reward, place)
        variable = f"reward_{''.join(letter if letter.isalnum() else '_' for letter in name)}"
        self.definitions[variable] = f"{variable} = {self._expression(reward, place)}"
        return variable

    def _expression(self, value: Any, place: str) -> str:
        """Code that makes a value. Raises `ConfigError` when there is none."""
        if _is_plain(value):
            return repr(value)
        found = _importable(value)
        if found is not None:
            module, attribute = found
            self.definitions[f"import {module.__name__}"] = f"import {module.__name__}"
            return f"{module.__name__}.{attribute}"
        if isinstance(value, FunctionType) or inspect.isclass(value):
            return self._add_source(value, place)
        if isinstance(value, functools.partial):
            named = [f"{key}={self._expression(one, place)}" for key, one in value.keywords.items()]
            given = [self._expression(one, place) for one in (value.func, *value.args)]
            self.definitions["import functools"] = "import functools"
            return f"functools.partial({', '.join([*given, *named])})"
        if isinstance(value, MethodType):
            return f"{self._expression(value.__self__, place)}.{value.__name__}"
        if isinstance(value, BuiltinFunctionType) or not callable(value):
            raise ConfigError(
                f"the worker process cannot import {value!r}: it is not a plain function", place=place, fix=_OWN_MODULE
            )
        return self._instance(value, place)

    def _instance(self, value: Any, place: str) -> str:
        """Code that makes an instance with the same attributes, without calling its constructor."""
        kind = type(value)
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        state = {name: getattr(value, name) for name in slots if hasattr(value, name)} | dict(getattr(value, "__dict__", {}))
        for name, held in state.items():
            if not _is_plain(held):
                raise ConfigError(
                    f"the worker process cannot import this {kind.__name__}: its attribute {name} is no plain value",
                    place=place,
                    fix=_OWN_MODULE,
                )
        made = self._expression(kind, place)
        self.definitions["_with_attributes"] = _WITH_ATTRIBUTES
        return f"_with_attributes({made}, {state!r})"

    def _add_source(self, value: Any, place: str) -> str:
        """Write a function or a class down, after what it uses; its name."""
        name: str = value.__name__
        if name == "<lambda>" or (isinstance(value, FunctionType) and value.__code__.co_freevars):
            raise ConfigError(
                f"the worker process cannot import {value!r}: it is not a plain function", place=place, fix=_OWN_MODULE
            )
        try:
            source = textwrap.dedent(_class_source(value) if inspect.isclass(value) else inspect.getsource(value))
        except (OSError, TypeError, SyntaxError) as error:
            raise ConfigError(f"the source of {name} is not known: {error}", place=place, fix=_OWN_MODULE) from error
        known = self.definitions.get(name)
        if known is not None:
            if not known.endswith(source):
                raise ConfigError(f"two different rewards are called {name}", place=place, fix="rename one of them")
            return name
        # First, so that a function which calls itself ends here; the final text replaces it below, after what it uses.
        self.definitions[name] = source
        uses = value.__globals__ if isinstance(value, FunctionType) else vars(sys.modules[value.__module__])
        lines = [
            self._definition(each, uses[each], place)
            for each in sorted(_names_in(compile(source, name, "exec")) & uses.keys() - {name})
        ]
        del self.definitions[name]
        self.definitions[name] = "\n".join([*filter(None, lines), "", source])
        return name

    def _definition(self, name: str, value: Any, place: str) -> str:
        """The line that makes a name known which a reward uses; empty when it is written down elsewhere in the module."""
        if inspect.ismodule(value):
            return f"import {value.__name__} as {name}"
        if value is None or isinstance(value, str | int | float | bool):
            return f"{name} = {value!r}"
        if inspect.isroutine(value) or inspect.isclass(value):
            module = getattr(value, "__module__", None)
            if module not in (None, "__main__", "builtins"):
                return f"from {module} import {value.__name__} as {name}"
            if module == "__main__" and not isinstance(value, BuiltinFunctionType):
                written = self._add_source(value, place)
                return "" if written == name else f"{name} = {written}"
        raise ConfigError(
            f"the function uses {name}, which is defined outside of it", place=place, fix=f"define it inside, or {_OWN_MODULE}"
        )


def _class_source(kind: type) -> str:
    """The source of a class, found by its methods: inspect does not know the file of a class of a notebook."""
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            lines = linecache.getlines(method.__code__.co_filename)
            for node in ast.walk(ast.parse("".join(lines))):
                if isinstance(node, ast.ClassDef) and node.name == kind.__name__ and _within(node, method):
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    return "".join(lines[first - 1 : node.end_lineno])
    raise OSError("it has no method that was written in Python")


def _within(node: ast.ClassDef, method: FunctionType) -> bool:
    return node.lineno <= method.__code__.co_firstlineno <= (node.end_lineno or 0)


_WITH_ATTRIBUTES = """\
def _with_attributes(kind, attributes):
    made = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made
"""


def _is_plain(value: object) -> bool:
    """Whether the repr of a value makes it again."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))  # type: ignore[call-overload]  # one of the four
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(held) for key, held in value.items())
    return value is None or type(value) in (str, bytes, int, bool) or (type(value) is float and math.isfinite(value))


def _names_in(code: CodeType) -> set[str]:
    """Every global name that the code may read, also inside comprehensions and inner functions."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    # Every module has __name__ and the like of its own.
    own = {name for name in code.co_names if not name.startswith("__")}
    return own.union(*map(_names_in, inner))

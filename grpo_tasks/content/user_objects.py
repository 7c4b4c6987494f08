"""Objects of a user's own modules, by name. A user's code never enters the trainer: call this in worker processes only."""

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_tasks.content.copies import import_from
from schemas.errors import ConfigError


def import_object(path: str, folders: Sequence[Path], *, place: str) -> Callable[..., Any]:
    """What `package.module:name` names: a function, a class or another object that can be called.

    Raises:
        ConfigError: the module cannot be imported, has no such name, or its value cannot be called.
    """
    if "(" in path:
        fix = f"write {path.partition('(')[0]}, and the arguments as params: {{NAME: VALUE}}"
        raise ConfigError(f"{path} is a call, and only a name can stand here", place=place, fix=fix)
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
    function: Callable[..., Any] = found
    return function


def _module(name: str, folders: Sequence[Path], *, place: str) -> Any:
    import_from(folders)
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

"""One hash over a user's own module and every module of the user's that it imports.

    my_rewards.py --import helper--> helper.py --from . import tables--> ...      (installed packages are not read)

Imports are read from the source; nothing is executed. Imports by a computed name are not found. Installed packages are left out:
every run records their versions.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import site
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from grpo_tasks.content.copies import copies_in, import_from
from grpo_tasks.content.hashes import digest_of, file_sha256
from schemas.errors import ConfigError

_OURS = Path(__file__).resolve().parents[2]
_OUR_PACKAGES = {"flows", "grpo_tasks", "schemas"}


def modules_sha256(module: str, search: Sequence[Path] | None = None) -> str:
    """SHA-256 (hex) over the files of a module and of every module that it reaches, except installed ones.

    Args:
        module: dotted name.
        search: folders that are searched for modules after the installed ones; default: the working directory.

    Returns:
        Empty when there is no such module. Importing it raises the error.
    """
    files = own_modules(module, [Path.cwd()] if search is None else search)
    return digest_of((name, file_sha256(path)) for name, path in files.items()) if files else ""


def own_modules(module: str, search: Sequence[Path]) -> dict[str, Path]:
    """Dotted name and file of a module and of the user's own modules that it imports, directly or not.

    Where one of the folders holds copies (copies.py), these are the user's own modules, and there are no others.
    """
    copies = copies_in(search)
    found: dict[str, Path] = {}
    waiting = [module]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        parent = name.rpartition(".")[0]
        # Importing a.b.c runs a and a.b as well.
        waiting += [parent] if parent else []
        path = _file_of(name, search) if copies is None else copies.files.get(name)
        if path is None:
            continue
        found[name] = path
        if path.suffix == ".py":
            waiting += _imports(name, path)
    return found


def own_sources(references: Iterable[str], search: Sequence[Path]) -> dict[str, Path]:
    """`own_modules` of the modules of `module:name` references; a name without a colon is built in."""
    found: dict[str, Path] = {}
    for reference in references:
        module, colon, _ = reference.partition(":")
        if colon:
            found |= own_modules(module, search)
    return found


def _file_of(name: str, search: Sequence[Path]) -> Path | None:
    """The file of a module; None if it is installed, part of this project, or does not exist."""
    top, *rest = name.split(".")
    if top in _OUR_PACKAGES:
        return None
    spec = None
    with suppress(ImportError, ValueError, AttributeError):
        # The user's folders come last on the import path.
        spec = importlib.util.find_spec(top)
    spec = spec or PathFinder.find_spec(top, [str(folder) for folder in search])
    for index, _ in enumerate(rest):
        if spec is None or spec.submodule_search_locations is None:
            return None
        full = ".".join([top, *rest[: index + 1]])
        try:
            spec = PathFinder.find_spec(full, list(spec.submodule_search_locations))
        except KeyError:
            # A namespace package inside a package that nobody has imported in this process: only installed ones do that.
            return None
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    path = Path(spec.origin).resolve()
    return None if _is_installed(path) else path


def _is_installed(path: Path) -> bool:
    if {"site-packages", "dist-packages"} & {*path.parts}:
        # Also that of another environment, which a .pth file adds.
        return True
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(name) for name in names] + site.getsitepackages() + [site.getusersitepackages()]
    return any(path.is_relative_to(Path(folder).resolve()) for folder in folders)


def _imports(name: str, path: Path) -> Iterator[str]:
    """Absolute names that a module's source imports; `from a import b` gives both a and a.b, because b may be a module."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        # Importing it raises the error.
        return
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Importing what has no name, because it lies above the top package, raises the error.
            with suppress(ImportError):
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


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
            names = [name for name, value in vars(found).items() if inspect.isfunction(value) and not name.startswith("_")]
            others = ", ".join(names) or "the module defines none"
            hint = f"did you mean {near[0]}?" if near else f"define it there, or use another: {others}"
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

"""A user's own modules: one hash over a module and all that it imports, an object by its name, and copies to import from.

Imports are read from the source; nothing is executed, and imports by a computed name are not found. The processes of a run import
from copies, whatever becomes of the files meanwhile. A copy is executed under the name of the file that it was made of: a
traceback names the user's line, and `__file__` leads to the files next to it. A module without a copy is searched as before.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import json
import shutil
import site
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_tasks.content.hashes import digest_of, file_sha256
from schemas.errors import ConfigError

_OUR_PACKAGES = {"flows", "grpo_tasks", "schemas"}
INDEX = ".copies.json"


def modules_sha256(module: str, search: Sequence[Path] | None = None) -> str:
    """SHA-256 (hex) over the files of a module and of every module that it reaches, except installed ones.

    `search` holds the folders that are searched for modules after the installed ones; default: the working directory. The result
    is empty when there is no such module: importing it raises the error.
    """
    files = own_modules(module, [Path.cwd()] if search is None else search)
    return digest_of((name, file_sha256(path)) for name, path in files.items()) if files else ""


def own_modules(module: str, search: Sequence[Path]) -> dict[str, Path]:
    """Dotted name and file of a module and of the user's own modules that it imports, directly or not.

    Where one of the folders holds copies (`keep_modules`), these are the user's own modules, and there are no others.
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
    """None if the module is installed, part of this project, or does not exist."""
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
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(name) for name in names] + site.getsitepackages() + [site.getusersitepackages()]
    # Installed is also what another environment has, which a .pth file adds.
    installed = {"site-packages", "dist-packages"} & {*path.parts}
    return None if installed or any(path.is_relative_to(Path(folder).resolve()) for folder in folders) else path


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
    """What `package.module:name` names. Raises ConfigError if it cannot be imported, or cannot be called."""
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
            message = f"{name} imports {error.name}, which is not installed"
            raise ConfigError(message, place=f"{place}; {users_line(error)}", fix=f"install {error.name}") from error
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
        message = f"{name} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(message, place=f"{place}; {users_line(error)}", fix=cause_of(error) or "fix that line") from error


OURS = str(Path(__file__).parents[1])
_NO_GPU = ("not compiled with CUDA", "No CUDA GPUs", "no NVIDIA driver", "No HIP GPUs")


def users_line(error: BaseException, module: str = "") -> str:
    """File, line and function of the user's code that an error came from: the innermost in the folder of the user's `module`, or
    else outside of libraries and of this package. The error may have arisen in a library that this line calls."""

    def is_library(file: str, home: str) -> bool:
        # What lies below `home` is not installed, unless an environment lies there.
        below = file[len(home) :]
        return "site-packages" in below or "dist-packages" in below or file.startswith((sysconfig.get_path("stdlib"), "<frozen"))

    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith(OURS)] or frames
    file = getattr(sys.modules.get(module), "__file__", None)
    home = str(Path(file).parent) if file else ""
    inside = [frame for frame in foreign if home and frame.filename.startswith(home) and not is_library(frame.filename, home)]
    chosen = inside or [frame for frame in foreign if not is_library(frame.filename, "")]
    if not chosen and isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    last = (chosen or foreign)[-1:]
    return "".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in last)


def added_code(module: str, name: str, made: str, code: Sequence[str], folders: Sequence[Path]) -> str:
    """A fix that adds `made`, which calls `name` of a module: to it, or to one of the user's own where it is installed."""
    if module in own_modules(module, folders):
        return "\n".join([f"add this to its module, and name it: function: '{module}:{made}'", "", *code])
    imports = f"from {module} import {name.partition('.')[0]}"
    where = f"write my_rewards.py next to the config, and name it: function: 'my_rewards:{made}'"
    return "\n".join([where, "", imports, "", "", *code])


def cause_of(error: BaseException) -> str:
    """What to change in a user's code, for errors whose text does not say it; empty for others."""
    name = error.filename if isinstance(error, FileNotFoundError) else None
    if isinstance(name, str) and not Path(name).is_absolute():
        module = f"Path(__file__).parent / {name!r} starts at the module"
        return f"a relative path starts where grpo was called, here at {Path.cwd()}: {module}"
    if any(words in str(error) for words in _NO_GPU):
        device = '"cuda" if torch.cuda.is_available() else "cpu"'
        return f"there is no GPU for this process: write .to({device}) instead of .cuda()"
    return ""


@dataclass(frozen=True, slots=True)
class Copies:
    """A folder that `keep_modules` made: the copy of each module and the file that it was made of, by dotted name."""

    folder: Path
    files: Mapping[str, Path]
    origins: Mapping[str, Path]
    searched: tuple[Path, ...]
    """Folders that are searched for other modules, after the installed ones."""

    def changed(self) -> list[Path]:
        """The files that are no longer as they were copied."""
        found = []
        for name, origin in self.origins.items():
            try:
                same = origin.read_bytes() == self.files[name].read_bytes()
            except OSError:
                same = False
            found += [] if same else [origin]
        return found


def keep_modules(modules: Mapping[str, Path], parent: Path, *, searched: Iterable[Path]) -> Path:
    """Copy modules (from `own_modules`) into a folder in `parent` named by their contents; one that is there is left as it is."""
    parent = parent.resolve()
    parent.mkdir(parents=True, exist_ok=True)
    folders = [str(folder.resolve()) for folder in searched]
    with tempfile.TemporaryDirectory(dir=parent, prefix=".part-") as unfinished:
        whole = Path(unfinished) / "copies"
        whole.mkdir()
        files = {name: place_of(name, path) for name, path in modules.items()}
        for name, path in modules.items():
            (whole / files[name]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, whole / files[name])
        origins = {name: str(path.resolve()) for name, path in modules.items()}
        index = json.dumps({"files": files, "origins": origins, "searched": folders}, indent=2)
        (whole / INDEX).write_text(index, encoding="utf-8")
        # The hash is that of the copies: a file may change while it is copied, and then the copy is what counts.
        named = [(name, file_sha256(whole / file)) for name, file in {**files, INDEX: INDEX}.items()]
        kept = parent / digest_of(named)[:16]
        if not (kept / INDEX).exists():
            # Of two runs that begin together, the second finds the folder of the first.
            try:
                whole.rename(kept)
            except OSError:
                if not (kept / INDEX).exists():
                    raise
    return kept


def place_of(name: str, path: Path) -> str:
    """Where the copy of a module lies in its folder: a/b.py or a/b/__init__.py."""
    parts = name.replace(".", "/")
    return f"{parts}/{path.name}" if path.stem == "__init__" else f"{parts}{''.join(path.suffixes)}"


def copies_in(folders: Sequence[Path]) -> Copies | None:
    """Those of the first of these folders that holds any."""
    return next((_read(folder.resolve()) for folder in folders if (folder / INDEX).is_file()), None)


@lru_cache(maxsize=64)
def _read(folder: Path) -> Copies:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    files = {name: folder / file for name, file in index["files"].items()}
    origins = {name: Path(origin) for name, origin in index["origins"].items()}
    return Copies(folder, files, origins, tuple(map(Path, index["searched"])))


def import_from(folders: Sequence[Path]) -> None:
    """Let imports of this process take the copies in one of these folders; nothing changes where none holds any."""
    copies = copies_in(folders)
    if copies is not None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        # Before all others: a project that is installed for editing is on the path, and it may change as any other file.
        sys.meta_path.insert(0, _Finder(copies))
        sys.path.extend(str(folder) for folder in copies.searched if str(folder) not in sys.path)


class _Finder(MetaPathFinder):
    def __init__(self, copies: Copies) -> None:
        self.copies = copies

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the signature of importlib
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        copy, origin = self.copies.files.get(fullname), self.copies.origins.get(fullname)
        if copy is None or origin is None:
            return self._namespace(fullname)
        within = [str(origin.parent)] if origin.stem == "__init__" else None
        if copy.suffix != ".py":
            return spec_from_file_location(fullname, copy, submodule_search_locations=within)
        loader = _Loader(origin, copy)
        return spec_from_file_location(fullname, origin, loader=loader, submodule_search_locations=within)

    def _namespace(self, fullname: str) -> ModuleSpec | None:
        """A package without a file of its own, which holds a copied module."""
        inside = next((name for name in self.copies.files if name.startswith(f"{fullname}.")), None)
        if inside is None:
            return None
        origin = self.copies.origins[inside]
        depth = inside.count(".") - fullname.count(".") - (0 if origin.stem == "__init__" else 1)
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(origin.parents[depth])]
        return spec


class _Loader(SourceLoader):
    """The source of a copy under the name of the file that it was made of. It writes no bytecode: the name stands for both."""

    def __init__(self, origin: Path, copy: Path) -> None:
        self.origin, self.copy = str(origin), copy

    def get_filename(self, fullname: str) -> str:  # noqa: ARG002 - the signature of importlib
        return self.origin

    def get_data(self, path: str | bytes) -> bytes:
        named = str(path)
        return self.copy.read_bytes() if named == self.origin else Path(named).read_bytes()

"""Copies of a user's own modules, from which every process of a run imports, whatever becomes of the files meanwhile.

    keep_modules(modules, parent, searched=...)  ->  parent/DIGEST/  copies, and .copies.json
    import_from(folders)                             imports of this process take the copies in one of these folders

A copy is executed under the name of the file that it was made of: a traceback names the user's line, and `__file__` leads to the
files beside it. A module that is not among the copies is searched where it was before.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from grpo_tasks.content.hashes import digest_of, file_sha256

INDEX = ".copies.json"


@dataclass(frozen=True, slots=True)
class Copies:
    """A folder with copies."""

    folder: Path
    files: Mapping[str, Path]
    """The copy of each module, by its dotted name."""
    origins: Mapping[str, Path]
    """The file that each was made of."""
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
    """Copy modules into a folder named by their contents. A folder that is there already is left as it is.

    Args:
        modules: the file of each module by its dotted name, from `own_modules`.
        parent: folder that gets the folder.
        searched: where other modules are searched, after the installed ones.
    """
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
    """The first of these folders that `keep_modules` made."""
    return next((_read(folder.resolve()) for folder in folders if (folder / INDEX).is_file()), None)


@lru_cache(maxsize=64)
def _read(folder: Path) -> Copies:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    files = {name: folder / file for name, file in index["files"].items()}
    origins = {name: Path(origin) for name, origin in index["origins"].items()}
    return Copies(folder, files, origins, tuple(map(Path, index["searched"])))


def import_from(folders: Sequence[Path]) -> None:
    """Let imports of this process take the copies in one of these folders, from now on; nothing changes where none holds any."""
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

"""Files that travel to a node, by content: a file is sent only to a node that lacks it.

Inputs (data, base model, start adapter, the user's modules) stay in the cache of the node, under their hash. A base model is also
found where it is on the driver, if the content is equal. What a stage has made so far (journal, events, checkpoints, best
weights) goes into the private folder only. A hub model and an embedded one are named, not sent.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_tasks.content.hashes import file_sha256, files_below
from grpo_tasks.content.modules import place_of
from grpo_tasks.kit.files import is_unfinished
from schemas.config.model import ModelConfig
from schemas.config.rollout import InteractionConfig
from schemas.errors import ClusterError
from schemas.paths import EMBEDDED, is_local
from schemas.results.model import ModelRef

INPUTS = "inputs"
BASE, ADAPTER, MODULES = (f"{INPUTS}/{name}" for name in ("base", "adapter", "modules"))


@dataclass(frozen=True, slots=True)
class ParcelFile:
    """One file that a node needs."""

    target: str
    """Path relative to the private folder of the node."""
    source: Path
    sha256: str
    size: int

    @classmethod
    def of(cls, target: str, source: Path) -> "ParcelFile":
        """A file of the driver, and its place on a node."""
        sha256 = file_sha256(source, remembered=target.startswith(f"{BASE}/"))
        return cls(target, source.resolve(), sha256, source.stat().st_size)

    @property
    def is_input(self) -> bool:
        """Whether it never changes, unlike what a stage makes."""
        return self.target.startswith(f"{INPUTS}/")

    @property
    def key(self) -> str:
        """Of files with the same key a node gets one."""
        return self.sha256 if self.is_input else self.target


def folder_files(target: str, source: Path) -> list[ParcelFile]:
    """All files of a folder but those that are not complete."""
    inside = [(path, path.relative_to(source)) for path in files_below(source)]
    return [ParcelFile.of(f"{target}/{name.as_posix()}", path) for path, name in inside if not is_unfinished(name.parts[0])]


def model_files(model: ModelRef) -> list[ParcelFile]:
    """The base if it is a folder, and the adapter."""
    files: list[ParcelFile] = []
    if is_local(model.path) and not model.path.startswith(EMBEDDED):
        files += folder_files(BASE, Path(model.path))
    if model.adapter is not None:
        files += folder_files(ADAPTER, model.adapter)
    return files


def module_files(modules: Mapping[str, Path]) -> list[ParcelFile]:
    """Modules by their dotted name, below the folder from which a node imports them."""
    return [ParcelFile.of(f"{MODULES}/{place_of(name, path)}", path) for name, path in modules.items()]


def model_at(root: Path, config: ModelConfig, ref: ModelRef, files: Sequence[ParcelFile]) -> tuple[ModelConfig, ModelRef]:
    """A model with the paths of a node where `files` are laid out below `root`."""
    there = ref
    if any(file.target.startswith(f"{BASE}/") for file in files):
        there = there.model_copy(update={"path": str(root / BASE)})
    if ref.adapter is not None:
        there = there.model_copy(update={"adapter": root / ADAPTER})
    # Added tokens belong to the base of the config, which is known by its path.
    return config.model_copy(update={"path": there.path}) if config.path == ref.path else config, there


def interaction_at(root: Path, interaction: InteractionConfig) -> InteractionConfig:
    """Tools and environments with the modules of a node."""
    return interaction.model_copy(update={"module_dir": root / MODULES})


class NodeFiles:
    """The files of one node, whose private folder is `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._cache = cache / "grpo-pipeline" / "content"

    def missing(self, files: Sequence[ParcelFile]) -> set[str]:
        """Keys of the files that have to be sent."""
        return {file.key for file in files if self._found(file) is None}

    def receive(self, file: ParcelFile, offset: int, data: bytes) -> None:
        """Write the bytes of a file from `offset` on; the last ones give it its name, or raise ClusterError for another hash."""
        target = self._path(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Two stages on one node may receive the same file at once.
        part = target.with_name(f".part-{os.getpid()}-{target.name}")
        with part.open("wb" if offset == 0 else "r+b") as stream:
            stream.seek(offset)
            stream.write(data)
        if offset + len(data) < file.size:
            return
        if file_sha256(part) != file.sha256:
            part.unlink()
            raise ClusterError(
                f"{file.source.name} changed while it was sent", place=str(file.source), fix="start the same command again"
            )
        part.replace(target)

    def lay_out(self, files: Sequence[ParcelFile]) -> None:
        """Give files their places: inputs as links to the cache. What a stage made arrived at its place."""
        (self.root / MODULES).mkdir(parents=True, exist_ok=True)
        for file in files:
            found, target = self._found(file), self.root / file.target
            assert found is not None, f"{file.target} was not sent"
            if file.is_input:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(found)

    def _path(self, file: ParcelFile) -> Path:
        return self._cache / file.sha256 if file.is_input else self.root / file.target

    def _found(self, file: ParcelFile) -> Path | None:
        """Where its content is on this node; None if it has to be sent."""
        places = [file.source] if file.target.startswith(f"{BASE}/") else []
        for path in (*places, self._path(file)):
            with suppress(OSError):
                if path.stat().st_size == file.size and file_sha256(path, remembered=file.is_input) == file.sha256:
                    return path
        return None

"""What a node needs for a stage, by content: a file travels only to a node that lacks it.

    driver   pack(spec, directory) -> Parcel: the files with their hashes, and where each belongs on a node
    node     NodeFiles.missing(files) -> the hashes to send; NodeFiles.receive(chunk); unpack(parcel) -> a stage directory

Inputs (data, base model, start adapter, the user's modules) stay in the cache of the node, under their hash. A base model is also
found where it is on the driver, if the content is equal. What a stage has made so far (journal, events, checkpoints, best
weights) goes into the private stage directory only. A hub model and an embedded one are named, not sent.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_tasks.content.hashes import file_sha256, files_below
from grpo_tasks.content.modules import own_sources
from grpo_tasks.kit.files import is_unfinished
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.model import ModelConfig
from schemas.config.operations import ClusterConfig
from schemas.errors import ClusterError
from schemas.paths import EMBEDDED, is_local
from schemas.results.model import ModelRef

INPUTS = "inputs"
TRAIN, EVAL, BASE, ADAPTER, MODULES = (
    f"{INPUTS}/{name}" for name in ("train.parquet", "eval.parquet", "base", "adapter", "modules")
)


@dataclass(frozen=True, slots=True)
class ParcelFile:
    """One file that a node needs."""

    target: str
    """Path relative to the stage directory of the node."""
    source: Path
    """Path on the driver."""
    sha256: str
    size: int
    """Bytes."""

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the stage, which never changes, and not something the stage made."""
        return self.target.startswith(f"{INPUTS}/")


REPLACED_S = 1_800.0
"""Longest wait for a rollout server that replaces one: a node may have to be waited for, and vLLM takes a minute."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A rollout server on a node."""

    url: str
    weights_url: str
    """Where it receives the weights."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A stage, ready to be sent."""

    spec: StageSpec
    """As the driver has it."""
    files: tuple[ParcelFile, ...]

    @property
    def base(self) -> tuple[ParcelFile, ...]:
        """The files of the base model; none if it is an embedded one or one of the hub."""
        return tuple(file for file in self.files if file.target.startswith(f"{BASE}/"))

    def spec_at(self, root: Path, *, ranks: int, servers: Sequence[ServerAddress] = ()) -> StageSpec:
        """The specification with the paths of a node, for as many ranks and with these rollout servers."""
        start, rewards = model_at(self.spec.start, self.files, root), self.spec.rewards
        resources = self.spec.resources.model_copy(update={"num_processes": ranks, "cluster": ClusterConfig()})
        changes: dict[str, object] = {
            "train": root / TRAIN,
            "eval": None if self.spec.eval is None else root / EVAL,
            "model": config_at(self.spec.model, self.spec.start, start),
            "start": start,
            "rewards": rewards.model_copy(update={"module_dir": root / MODULES}),
            "resources": resources,
            "interaction": self.spec.interaction.model_copy(update={"module_dir": root / MODULES}),
        }
        demonstrations = self.spec.stage.demonstrations
        if demonstrations is not None:
            here = demonstrations.model_copy(update={"module_dir": root / MODULES})
            changes["stage"] = self.spec.stage.model_copy(update={"demonstrations": here})
        if servers:
            # The driver replaces a server that is lost, so the trainers wait for it.
            urls: dict[str, object] = {"patience_s": max(self.spec.rollout.vllm.patience_s, REPLACED_S)}
            urls |= {"base_urls": [each.url for each in servers], "weights_urls": [each.weights_url for each in servers]}
            vllm = self.spec.rollout.vllm.model_copy(update=urls)
            changes["rollout"] = self.spec.rollout.model_copy(update={"vllm": vllm})
        return self.spec.model_copy(update=changes)


def pack(spec: StageSpec, directory: StageDir) -> Parcel:
    """List the inputs of the stage and everything it has made so far, with hashes."""
    files = [file_at(TRAIN, spec.train)]
    if spec.eval is not None:
        files.append(file_at(EVAL, spec.eval))
    files += model_files(spec.start)
    files += _modules(spec)
    for path in (directory.journal, directory.events, directory.token_budget):
        if path.exists():
            files.append(file_at(path.name, path))
    for folder in (directory.checkpoints, directory.best):
        files += _folder(folder.name, folder)
    return Parcel(spec, tuple(files))


def model_files(model: ModelRef) -> list[ParcelFile]:
    """The files of a model: its base if it is a folder, and its adapter."""
    files: list[ParcelFile] = []
    if is_local(model.path) and not model.path.startswith(EMBEDDED):
        files += _folder(BASE, Path(model.path))
    if model.adapter is not None:
        files += _folder(ADAPTER, model.adapter)
    return files


def model_at(model: ModelRef, files: Sequence[ParcelFile], root: Path) -> ModelRef:
    """The model with the paths of a node where `files` were laid out below `root`."""
    if any(file.target.startswith(f"{BASE}/") for file in files):
        model = model.model_copy(update={"path": str(root / BASE)})
    return model if model.adapter is None else model.model_copy(update={"adapter": root / ADAPTER})


def config_at(config: ModelConfig, model: ModelRef, there: ModelRef) -> ModelConfig:
    """The config of a node. Added tokens belong to the base of the config, which is known by its path."""
    return config.model_copy(update={"path": there.path}) if config.path == model.path else config


class NodeFiles:
    """The files of one node.

    Args:
        root: private directory of the stage.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._cache = cache / "grpo-pipeline" / "content"

    def missing(self, files: tuple[ParcelFile, ...]) -> set[str]:
        """Hashes of the files that have to be sent."""
        return {file.sha256 for file in files if self._found(file) is None}

    def receive(self, file: ParcelFile, offset: int, data: bytes) -> None:
        """Write the bytes of a file from `offset` on; the last ones give it its name.

        Raises:
            ClusterError: the content has another hash.
        """
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

    def unpack(self, parcel: Parcel) -> None:
        """Lay out the stage directory."""
        self.lay_out(parcel.files)
        (self.root / MODULES).mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._incoming, ignore_errors=True)

    def lay_out(self, files: tuple[ParcelFile, ...]) -> None:
        """Give files their places: inputs as links to the cache, the state of the stage as files of its own."""
        for file in files:
            found, target = self._found(file), self.root / file.target
            assert found is not None, f"{file.target} was not sent"
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.is_input:
                target.symlink_to(found)
            else:
                shutil.copyfile(found, target)

    @property
    def _incoming(self) -> Path:
        return self.root / ".incoming"

    def _path(self, file: ParcelFile) -> Path:
        return (self._cache if file.is_input else self._incoming) / file.sha256

    def _found(self, file: ParcelFile) -> Path | None:
        places = [self._path(file)]
        if file.target.startswith(f"{BASE}/"):
            places.insert(0, file.source)
        return next((path for path in places if _has_content(path, file)), None)


def _has_content(path: Path, file: ParcelFile) -> bool:
    try:
        return path.stat().st_size == file.size and file_sha256(path, remembered=file.is_input) == file.sha256
    except OSError:
        return False


def file_at(target: str, source: Path) -> ParcelFile:
    """A file of the driver with its hash, and its place on a node."""
    return ParcelFile(
        target, source.resolve(), file_sha256(source, remembered=target.startswith(f"{BASE}/")), source.stat().st_size
    )


def _folder(target: str, source: Path) -> list[ParcelFile]:
    inside = [(path, path.relative_to(source)) for path in files_below(source)]
    return [file_at(f"{target}/{name.as_posix()}", path) for path, name in inside if not is_unfinished(name.parts[0])]


def _modules(spec: StageSpec) -> list[ParcelFile]:
    """The user's own modules: reward functions, demonstrations, tools and environments, and what they import."""
    rewards, demonstrations = spec.rewards, spec.stage.demonstrations
    found = own_sources(spec.interaction.own_code, spec.interaction.module_dirs())
    if demonstrations is not None and demonstrations.function:
        found |= own_sources([demonstrations.function], demonstrations.module_dirs())
    return module_files(found | own_sources(rewards.references, rewards.module_dirs()))


def module_files(modules: Mapping[str, Path]) -> list[ParcelFile]:
    """Modules by their dotted name, below the folder from which a node imports them."""
    files = []
    for module, path in modules.items():
        parts = module.replace(".", "/")
        files.append(
            file_at(f"{MODULES}/{parts}/{path.name}" if path.stem == "__init__" else f"{MODULES}/{parts}{path.suffix}", path)
        )
    return files

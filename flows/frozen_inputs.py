"""What a run is made of stays as it was when the run started, whatever becomes of the files.

    the user's own modules    copied by their contents to OUTPUT_DIR/NAME/.inputs/DIGEST; every process imports the copies
    gold pairs of a judge,
    adapter of start_from     copied to OUTPUT_DIR/NAME/.inputs/SHA256
    data files                read once, by the step prepare_data, which refuses other contents than those that were hashed
    base model                compared with its hash before every step and after it
    config, champion          read once; the champion is compared again before an alias moves

Keys, lineage and uploaded sources are those of the copies.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from grpo_tasks.content.hashes import digest_of, file_sha256
from grpo_tasks.content.modules import Copies, copies_in, keep_modules, own_sources
from grpo_tasks.content.shards import shards_of
from grpo_tasks.kit.files import replacing
from grpo_tasks.running.key import path_sha256
from schemas.config.data import DataSource
from schemas.config.rollout import references_in
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.paths import is_local, resolve

FOLDER = ".inputs"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a run."""

    given: RunConfig
    """The config as it was given. Its data and its base model are compared with what they were."""
    config: RunConfig
    """The same with the folder of the copies as that of every own module, for the steps."""
    copies: Copies
    hashed: dict[Path, str]
    """SHA-256 of each local data file and each file with gold pairs."""
    _said: set[Path] = field(default_factory=set)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the names and contents of the user's own modules."""
        return digest_of((name, file_sha256(path)) for name, path in self.copies.files.items())

    def newly_changed(self) -> list[str]:
        """What to say about the files that are no longer as they were; each is named once."""
        now = [*self.copies.changed(), *(path for path, sha256 in self.hashed.items() if _sha256_or_none(path) != sha256)]
        new = [path for path in dict.fromkeys(now) if path not in self._said]
        self._said.update(new)
        here = Path.cwd()
        shown = [path.relative_to(here) if path.is_relative_to(here) else path for path in new]
        return [f"{path} has changed since this run started: this run ignores the change" for path in shown]


def frozen_inputs(config: RunConfig, *, folder: Path | None = None) -> Inputs:
    """Copy and hash what a config names; `ConfigError` where that changes all the time. `folder` holds copies made before."""
    parent = config.resources.output_dir / config.name / FOLDER
    if folder is None or copies_in([folder]) is None:
        folder = _copied(config, parent)
    copies = copies_in([folder])
    assert copies is not None, "the copies were made above"
    sources = [*config.data.train, *config.data.eval, *(source for guard in config.promotion.guards for source in guard.data)]
    files = ((_file_of(shard), shard) for source in sources for shard in shards_of(source))
    hashed = {file: shard.sha256 or file_sha256(file) for file, shard in files if file is not None}
    given = _locked(config, hashed)
    kept = _with_start(_with_gold(given.with_module_dir(folder, replace=True), parent, hashed), parent, hashed)
    return Inputs(given, kept, copies, hashed)


def _copied(config: RunConfig, parent: Path) -> Path:
    """The folder with the copies of every module that a text of the config may name."""
    references = list(references_in(config.model_dump(mode="json")))
    sections = [config.rewards, config.interaction, *(stage.demonstrations for stage in config.stages)]
    search = list(dict.fromkeys(folder for section in sections if section is not None for folder in section.module_dirs()))
    for _ in range(_TRIES):
        found = own_sources(references, search)
        folder = keep_modules(found, parent, searched=search)
        # An edit between reading the imports of a module and copying it may have added one.
        if own_sources(references, [folder]).keys() == found.keys() and own_sources(references, search).keys() == found.keys():
            return folder
    raise ConfigError(
        "the modules change while they are copied", place=str(search[0]), fix="start the run when they are complete"
    )


def _with_gold(config: RunConfig, parent: Path, hashed: dict[Path, str]) -> RunConfig:
    """The config with copies of the files with gold pairs; their hashes are put in."""
    functions = dict(config.rewards.functions)
    for name, reward in functions.items():
        judge = reward.judge
        if judge is not None and judge.gold is not None and judge.gold.is_file():
            hashed[judge.gold] = file_sha256(judge.gold)
            kept = parent.resolve() / hashed[judge.gold][:16] / judge.gold.name
            if not kept.is_file():
                kept.parent.mkdir(parents=True, exist_ok=True)
                with replacing(kept) as unfinished:
                    shutil.copyfile(judge.gold, unfinished)
            if file_sha256(kept) != hashed[judge.gold]:
                kept.unlink()
                fix = "start the run again"
                raise ConfigError("the file has changed while the run started", place=str(judge.gold), fix=fix)
            functions[name] = reward.model_copy(update={"judge": judge.model_copy(update={"gold": kept})})
    return config.model_copy(update={"rewards": config.rewards.model_copy(update={"functions": functions})})


def _with_start(config: RunConfig, parent: Path, hashed: dict[Path, str]) -> RunConfig:
    """The config with a copy of the adapter that it starts from, without the other files of a checkpoint."""
    if config.start_from is None:
        return config
    files = {path: file_sha256(path) for name in ADAPTER_FILES if (path := config.start_from / name).is_file()}
    hashed |= files
    kept = parent.resolve() / digest_of((path.name, sha256) for path, sha256 in files.items())[:16]
    if not kept.is_dir():
        with replacing(kept) as unfinished:
            unfinished.mkdir()
            for path in files:
                shutil.copyfile(path, unfinished / path.name)
    if [file_sha256(kept / path.name) for path in files] != list(files.values()):
        shutil.rmtree(kept)
        fix = "start the run again"
        raise ConfigError("the adapter has changed while the run started", place=str(config.start_from), fix=fix)
    return config.model_copy(update={"start_from": kept})


def _file_of(source: DataSource) -> Path | None:
    path = Path(resolve(source.path))
    return path if source.format != "hub" and is_local(source.path) and path.is_file() else None


def _locked(config: RunConfig, hashed: dict[Path, str]) -> RunConfig:
    def lock(source: DataSource) -> DataSource:
        shards = shards_of(source)
        found = {shard.path: hashed.get(_file_of(shard) or Path(), "") for shard in shards}
        # What is no file is refused by the step that reads it; a data set of the hub has none.
        return source.locked(found) if any(found.values()) else source

    data = config.data.model_copy(update={name: list(map(lock, getattr(config.data, name))) for name in ("train", "eval")})
    guards = [guard.model_copy(update={"data": list(map(lock, guard.data))}) for guard in config.promotion.guards]
    promotion, base = config.promotion.model_copy(update={"guards": guards}), Path(resolve(config.model.path))
    # Hashed once for all steps, and once for all runs: the hash is remembered.
    known = config.model.sha256 or (path_sha256(base, remembered=True) if base.exists() else None)
    return config.model_copy(update={"data": data, "promotion": promotion, "model": config.model.locked(known)})


def _sha256_or_none(path: Path) -> str | None:
    try:
        return file_sha256(path, remembered=True)
    except OSError:
        return None

"""What a model is called, wherever a command, a flow or a config names one.

    a folder with config.json                    that model
    a folder with adapter_config.json            the adapter on the base model of the config
    embedded:base                                the model that ships with this project
    NAME@ALIAS, NAME/VERSION, models:/...        a registered version; it is downloaded once and verified
    NAME                                         the champion, if a model of that name is registered; otherwise a hub id
    OWNER/NAME                                   a hub id

A folder on this disk wins over a registered name.
"""

import os
import shutil
from contextlib import suppress
from datetime import date, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile

from flows.preflight import REGISTERED, check_model, check_working_directory
from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.content.limited_model import check_model_files
from grpo_tasks.content.model_files import BITS, asks_for_date, hub_snapshot, rounds
from grpo_tasks.kit.cards import fastest_dtype
from grpo_tasks.kit.files import replacing
from grpo_tasks.running.orchestrator import run_logger
from schemas.config.operations import TrackingConfig
from schemas.config.rollout import TEMPLATE_DATE
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ModelError
from schemas.paths import EMBEDDED, is_local, resolve
from schemas.results.model import ModelRef

DATE = "template_date"
"""File in the folder of a config's results: the day that the chat template writes in all its runs."""
DTYPE = "model_dtype"
"""File in the same folder: what model.dtype auto stands for in all its runs."""


def is_registered_name(name: str) -> bool:
    """Whether the form of a name says that it stands for a registered version. A bare NAME may, too: `could_be_registered`."""
    return not is_local(name) and not name.startswith(EMBEDDED) and REGISTERED.fullmatch(name) is not None


def could_be_registered(name: str) -> bool:
    """Whether a name may stand for a registered model: the registry must be asked."""
    return is_registered_name(name) or not (is_local(name) or name.startswith((EMBEDDED, ".")) or "/" in name)


def registered_model(name: str, tracking: TrackingConfig, folder: Path) -> ModelRef | None:
    """The registered model of this name, downloaded below `folder`; None when the name stands for something else.

    Raises `ModelError` when there is no such version, `TrackingError` when the registry cannot be reached; so do those below.
    """
    if not _is_registered(name, tracking):
        return None
    from grpo_tasks.tracking.models import download_model

    return download_model(name, tracking, folder.resolve())


def named_model(name: str, config: RunConfig) -> ModelRef:
    """The model that a name stands for. An adapter folder is combined with the base model of the config."""
    path = Path(name)
    if is_adapter(path):
        return ModelRef(path=config.model.path, revision=config.model.revision, adapter=path.resolve())
    found = registered_model(name, config.tracking, config.resources.output_dir / config.name / "downloads")
    if found is not None:
        return found
    check_model(name, "MODEL")
    check_model_files(name, None)
    own = is_local(name) and not name.startswith(EMBEDDED)
    return ModelRef(path=str(path.resolve()) if own else name)


def adapter_model(name: str, config: RunConfig) -> ModelRef:
    """The adapter of a folder, a registered version (the one that it was merged from) or a hub id, on the config's base model."""
    if is_local(name):
        folder = Path(name)
    elif _is_registered(name, config.tracking):
        from grpo_tasks.tracking.models import download_adapter

        folder = download_adapter(name, config.tracking, config.resources.output_dir.resolve() / config.name / "downloads")
    else:
        check_model(name, "ADAPTER")
        folder = hub_snapshot(name)
    if not is_adapter(folder):
        raise ModelError("no adapter there", place=name, fix="name a folder that contains adapter_config.json")
    return ModelRef(path=config.model.path, revision=config.model.revision, adapter=folder.resolve())


def fetch_model(name: str, into: Path, tracking: TrackingConfig) -> str:
    """Copy the model that a name stands for into the new folder `into`; a sentence about what is there now."""
    if _is_registered(name, tracking):
        from grpo_tasks.tracking.models import ORIGIN, fetch_version
        from grpo_tasks.tracking.registry import find_version, lineage_of

        version = find_version(name, tracking)
        folder = fetch_version(version, tracking, into)
        lineage_of(f"{version.name}/{version.version}", tracking).save(folder / ORIGIN)
        return f"{version.name} version {version.version}: {folder} (every file verified)"
    if not is_adapter(Path(name)):
        check_model(name, "MODEL")
    copy_model(Path(resolve(name)) if is_local(name) else hub_snapshot(name), into)
    return f"{name}: {into}"


def copy_model(source: Path, into: Path) -> None:
    """Copy a model to the new folder `into`, whole or not at all. An equal copy stays, so a killed command can be repeated."""
    if into.exists() and any(into.iterdir()):
        if folder_sha256(into) != folder_sha256(source):
            raise ModelError("the folder holds other files", place=str(into), fix="name a new folder, or empty this one")
        return
    # The hub's cache consists of links; a copy of their files outlives it.
    with replacing(into) as unfinished:
        shutil.copytree(source, unfinished)
        if into.exists():
            # Raises where files have come in the meantime: they are not ours to replace.
            into.rmdir()


def _is_registered(name: str, tracking: TrackingConfig) -> bool:
    """Whether a name stands for a registered version. A bare NAME does when it is registered, even if nothing is its champion."""
    if not could_be_registered(name) or is_registered_name(name):
        return is_registered_name(name)
    from grpo_tasks.tracking.registry import is_registered
    from grpo_tasks.tracking.store import open_store

    return is_registered(open_store(tracking), name)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return os.path.exists(folder / "adapter_config.json")  # noqa: PTH110 - unlike Path, accepts a name of any length


def with_local_model(config: RunConfig, *, computes: bool = True) -> RunConfig:
    """The config with the folder of the registered model that `model.path` names, if it names one, a named precision and a fixed
    date. A flow that `computes` nothing with the weights does not decide about the precision of others.

    `ConfigError` where the model was published in a precision that model.dtype would round.
    """
    # Here too, because a download is the first thing that a flow may write.
    check_working_directory()
    name = config.model.path
    found = registered_model(name, config.tracking, config.resources.output_dir / "models")
    folder = Path(found.path if found is not None else resolve(name))

    def published_in(dtype: str) -> str | None:
        # The precision of a published model that `dtype` would round.
        saved = rounds(dtype, folder)
        if saved is None:
            return None
        # Imported here: it takes seconds, and hardly any model is saved in a longer precision than it is used in.
        from grpo_tasks.tracking.models import ORIGIN

        # Of a model from elsewhere nobody knows whether the precision of its files matters; a downloaded one has this file.
        return saved if found is not None or (folder / ORIGIN).is_file() else None

    if config.model.dtype == "auto":
        fastest = fastest_dtype(config.resources.device)
        config = with_fixed_dtype(config, published_in(fastest) or fastest, leave=computes)
    if saved := published_in(config.model.dtype):
        raise ConfigError(
            f"{name} was published in {saved}, because a shorter precision would lose what it learned; with "
            f"model.dtype: {config.model.dtype} a run would start from another model",
            place="model.dtype",
            fix=f"model.dtype: {saved}",
        )
    if found is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": found.path, "revision": None})})
    return with_fixed_date(config)


def with_fixed_date(config: RunConfig) -> RunConfig:
    """The config with the day that the model's chat template writes, if it does: that of the first run in the same folder.

    Without it the prompts of a run that is resumed or repeated tomorrow would be other prompts.
    """
    given, model = config.rollout.chat_template_kwargs, config.model
    if TEMPLATE_DATE in given or not asks_for_date(resolve(model.path), model.revision):
        return config
    file = _of_first_run(config, DATE, datetime.now().astimezone().date().isoformat())
    day = file.read_text(encoding="utf-8").strip()
    try:
        date.fromisoformat(day)
    except ValueError as error:
        raise ConfigError(
            f"{day[:40]!r} is no date", place=str(file), fix="delete the file, or set rollout.chat_template_kwargs.strftime_now"
        ) from error
    rollout = config.rollout.model_copy(update={"chat_template_kwargs": {**given, TEMPLATE_DATE: day}})
    return config.model_copy(update={"rollout": rollout})


def with_fixed_dtype(config: RunConfig, dtype: str, *, leave: bool) -> RunConfig:
    """The config with what model.dtype auto stands for: that of the first run in the same folder of results, else `dtype`, which
    is left there for later ones if `leave`.

    A run that is resumed on another machine would otherwise be another run.
    """
    file = config.resources.output_dir / config.name / DTYPE
    if leave:
        _of_first_run(config, DTYPE, dtype)
    fixed = file.read_text(encoding="utf-8").strip() if file.is_file() else dtype
    if fixed not in BITS:
        raise ConfigError(f"{fixed[:40]!r} is no precision", place=str(file), fix="delete the file, or name one as model.dtype")
    if fixed != dtype:
        run_logger().warning(
            "model.dtype auto stays %s, as in the first run of %s; for %s, delete %s: all stages train again",
            *(fixed, config.name, dtype, file),
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": fixed})})


def _of_first_run(config: RunConfig, name: str, value: str) -> Path:
    """The file of this name in the folder of the config's results; it gets the value if no run has left one there."""
    file = config.resources.output_dir / config.name / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=file.parent, encoding="utf-8") as new:
        new.write(value)
        new.flush()
        # Whole or not at all; two runs that start at once both get the value of the first one.
        with suppress(FileExistsError):
            os.link(new.name, file)
    return file


def with_pinned_model(config: RunConfig) -> RunConfig:
    """The config with the version that `model.path` stands for now, if it names a registered model: an alias moves."""
    name = config.model.path
    if not _is_registered(name, config.tracking):
        return config
    from grpo_tasks.tracking.registry import PREFIX, find_version

    version = find_version(name, config.tracking)
    pinned = f"{PREFIX}{version.name}/{version.version}"
    return config.model_copy(update={"model": config.model.model_copy(update={"path": pinned})})

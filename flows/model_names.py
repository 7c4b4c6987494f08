"""What a model is called, wherever a command, a flow or a config names one.

    a folder with config.json                    that model
    a folder with adapter_config.json            the adapter on the base model of the config
    embedded:base                                the model that ships with this project
    NAME@ALIAS, NAME/VERSION, models:/...        a registered version; it is downloaded once and verified
    NAME                                         the champion of that name, if one is registered; otherwise a hub id
    OWNER/NAME                                   a hub id

A folder on this disk wins over a registered name.
"""

import os
from pathlib import Path

from flows.preflight import REGISTERED, check_model
from schemas.config.operations import TrackingConfig
from schemas.config.run import RunConfig
from schemas.errors import ModelError
from schemas.paths import EMBEDDED, is_local
from schemas.results.model import ModelRef


def is_registered_name(name: str) -> bool:
    """Whether the form of a name says that it stands for a registered version. A bare NAME may, too: `could_be_registered`."""
    return not is_local(name) and not name.startswith(EMBEDDED) and REGISTERED.fullmatch(name) is not None


def could_be_registered(name: str) -> bool:
    """Whether a name may stand for a registered model: the registry must be asked."""
    return is_registered_name(name) or not (is_local(name) or name.startswith((EMBEDDED, ".")) or "/" in name)


def registered_model(name: str, tracking: TrackingConfig, folder: Path) -> ModelRef | None:
    """The registered model of this name, downloaded below `folder`; None when the name stands for something else.

    Raises:
        ModelError: the name has the form of a registered version, and there is no such version.
        TrackingError: the registry cannot be reached.
    """
    if not could_be_registered(name):
        return None
    from grpo_tasks.tracking.models import download_model, find_champion

    if not is_registered_name(name) and find_champion(name, tracking) is None:
        return None
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
    return ModelRef(path=str(path.resolve()) if is_local(name) else name)


def adapter_model(folder: Path, config: RunConfig) -> ModelRef:
    """The adapter of a folder on the base model of the config; raises `ModelError` when the folder holds none."""
    if not is_adapter(folder):
        raise ModelError("no adapter there", place=str(folder), fix="name a folder that contains adapter_config.json")
    return named_model(str(folder), config)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return os.path.exists(folder / "adapter_config.json")  # noqa: PTH110 - unlike Path, accepts a name of any length


def with_local_model(config: RunConfig) -> RunConfig:
    """The config with `model.path` set to the downloaded folder of the registered model that it names, if it names one."""
    found = registered_model(config.model.path, config.tracking, config.resources.output_dir / "models")
    if found is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"path": found.path, "revision": None})})

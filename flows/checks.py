"""What a config names on this disk, looked at before anything heavy is loaded or hashed: data, base model, room to write."""

import os
from pathlib import Path

from schemas.config.data import DataSource
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.paths import EMBEDDED, is_local, resolve, why_not_a_file

_RELATIVE = "paths are relative to where grpo is called"


def check_inputs(config: RunConfig) -> None:
    """Refuse data files and a base model that are not there or are something else; opens nothing, so that nothing blocks.

    Raises:
        ConfigError: with the field.
    """
    for side in ("train", "eval"):
        for index, source in enumerate(getattr(config.data, side)):
            _check_source(source, f"data.{side}.{index}.path")
    check_model(config.model.path, "model.path")


def _check_source(source: DataSource, place: str) -> None:
    path = Path(resolve(source.path))
    if source.format == "hub" and (path.is_dir() or not is_local(source.path)):
        return
    looks_like_a_file = source.format in ("jsonl", "csv", "parquet") or path.suffix or source.path.startswith(EMBEDDED)
    reason = why_not_a_file(path)
    if reason and (looks_like_a_file or reason != "no such file"):
        raise ConfigError(f"{reason}: {path}", place=place, fix=_RELATIVE)


def check_model(name: str, place: str) -> None:
    """Refuse a model that is no folder of a model, as far as the disk tells; another name is taken for a hub id."""
    path = Path(resolve(name))
    if os.path.lexists(path):
        reason = why_not_a_file(path / "config.json") if path.is_dir() else "it is not a folder"
        if reason:
            raise ConfigError(f"no model there ({reason}): {path}", place=place, fix="name a folder with config.json and weights")
    elif path.is_absolute() or name.startswith((".", EMBEDDED)) or name.count("/") > 1 or "\0" in name:
        raise ConfigError(f"no such folder: {path}", place=place, fix=f"{_RELATIVE}; a hub id is OWNER/NAME")


def check_output(config: RunConfig) -> None:
    """Refuse a folder that cannot be written to, before the first step rather than after the last one.

    Raises:
        ConfigError: with the reason of the system.
    """
    folder = config.resources.output_dir / config.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the run cannot write to {folder}: {error.strerror}",
            place="resources.output_dir",
            fix="remove what stands in its place, or name another folder",
        ) from error

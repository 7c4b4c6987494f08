"""Paths of a run. Nothing here reads or writes files.

OUTPUT_DIR/NAME/                     the folder of one config
  prepare_data/KEY/                  one folder per step and content key: same inputs, same folder
  train_stage/format-KEY/            a stage directory (see grpo_tasks/stage)
"""

import os
import stat
from pathlib import Path

from schemas.errors import ConfigError

EMBEDDED = "embedded:"
_DEMO = Path(__file__).resolve().parent.parent / "grpo_tasks" / "demo"
_IN_WHEEL = Path(__file__).resolve().parent / "deploy"
_IN_CHECKOUT = Path(__file__).resolve().parent.parent / "deploy"
DEPLOY = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CHECKOUT
"""Folder with presets/, prefect.yaml and work_pools/. The build copies them from deploy/ into the wheel (pyproject.toml)."""


def resolve(path: str) -> str:
    """The path or hub id itself; `embedded:NAME` becomes the path of the file or folder that ships with this project.

    `ConfigError` for `embedded:` with a path that leads elsewhere.
    """
    if not path.startswith(EMBEDDED):
        return path
    if not is_embedded(path):
        raise ConfigError("this file or folder does not ship with the project", place=path, fix=f"a path without {EMBEDDED}")
    return str(_DEMO / path.removeprefix(EMBEDDED))


def is_embedded(path: str) -> bool:
    """Whether `embedded:NAME` stays inside the folder of the demo, whether it exists or not."""
    name = Path(path.removeprefix(EMBEDDED))
    return bool(name.parts) and not name.is_absolute() and ".." not in name.parts and "\0" not in path


def module_file(module: str, folder: Path) -> Path | None:
    """The file of the module `a.b` in a folder: a/b.py or a/b/__init__.py. None if there is none."""
    path = folder.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_name(f"{path.name}.py")) if file.is_file()), None)


def is_local(path: str) -> bool:
    """Whether the path exists on this disk. Otherwise it is a hub id."""
    # Unlike Path.exists, this returns False for a name that is too long or not readable.
    return os.path.exists(resolve(path))  # noqa: PTH110


def why_not_a_file(path: Path) -> str:
    """Why a path is not a regular, readable file; empty if it is. Opens nothing, because opening a FIFO would block."""
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        return "a link to a file that does not exist" if path.is_symlink() else "no such file"
    except (OSError, ValueError) as error:  # a loop of links, too long a name, a folder without permission, a NUL
        return f"the path cannot be followed: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISREG(kind):
        return "" if os.access(path, os.R_OK) else "no permission to read the file"
    names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe (FIFO)", stat.S_IFSOCK: "a socket"}
    return f"it is {names.get(stat.S_IFMT(kind), 'a device')}, not a file"

"""Replace a file or a folder as a whole: a reader, and a process that is killed at any moment, finds the old one or the new one.

with replacing(folder / "table.parquet") as unfinished:
    table.write_parquet(unfinished)                    .table.parquet.part -> table.parquet
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A free path next to `path`. What the block writes there takes the place of `path`; after an exception it is removed."""
    unfinished = unfinished_path(path)
    # Left by a process that was killed in the block.
    remove(unfinished)
    try:
        yield unfinished
        # A folder cannot take the name of one that holds files. A kill in between leaves none; whoever needs it makes it again.
        if path.is_dir():
            shutil.rmtree(path)
        unfinished.replace(path)
    except BaseException:
        # On a full disk it would take the space that others need.
        remove(unfinished)
        raise


def unfinished_path(path: Path) -> Path:
    """Where `path` is written until it is whole. Neither `step-*` nor `*.parquet` finds it."""
    return path.with_name(f".{path.name}.part")


def is_unfinished(name: str) -> bool:
    """Whether a file or folder of this name is not whole yet."""
    return name.startswith(".") and name.endswith(".part")


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

"""A folder on a node, mirrored on the driver while processes write in it: the Outbox there, the Inbox here.

Lines are appended as they come; a file or folder gets its name when it is complete. The trainer deletes old checkpoints, so what
is new is held by hard links until the driver has fetched it.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_tasks.content.hashes import files_below
from grpo_tasks.kit.files import remove, replacing, unfinished_path
from grpo_tasks.processes.child import LOG

MOST_BYTES = 1 << 22
"""Most bytes of one file of lines in one delta."""
CHUNK_BYTES = 1 << 25


@dataclass(frozen=True, slots=True)
class Mirrored:
    """What of a folder is mirrored, in addition to its log."""

    lines: tuple[str, ...] = ()
    complete: tuple[str, ...] = ()
    """Patterns of files and folders that are complete when they have their names. What counts on others stands behind them: it
    arrives after them."""
    tidied: str = ""
    """A folder among them whose entries are deleted on the driver when they are deleted on the node."""


@dataclass(frozen=True, slots=True)
class Held:
    """A file or folder, held for the driver until it is released."""

    name: str
    """Path relative to the mirrored folder, with slashes."""
    files: dict[str, int]
    """Size in bytes of each file by its path relative to `name`; one entry with an empty path for a single file."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new on a node since the last one."""

    lines: dict[str, bytes]
    """New bytes by file name. All but those of the log end with a newline."""
    held: tuple[Held, ...]
    present: frozenset[str]
    """Names of all entries of the tidied folder, those being written included."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is new."""
        return not self.lines and not self.held


class Outbox:
    """The side of the node. What is in the folder at the beginning is not new: the driver sent it."""

    def __init__(self, root: Path, mirrored: Mirrored) -> None:
        self.root, self._mirrored = root, mirrored
        lines = [LOG, *mirrored.lines]
        self._offsets = {name: (root / name).stat().st_size if (root / name).exists() else 0 for name in lines}
        self._stamps = {path.relative_to(self.root).as_posix(): _stamp(path) for path in self._complete()}

    def collect(self) -> Delta:
        """Everything that is new since the last call."""
        # First of all: a checkpoint that is replaced at this moment counts as present.
        found = (self.root / self._mirrored.tidied).glob("*") if self._mirrored.tidied else ()
        present = frozenset(path.name.removeprefix(".").removesuffix(".part") for path in found)
        # What counts on others is found and held before them, and lines are read last: all that it counts on is there by then.
        held = [each for path in self._complete() if (each := self._hold(path)) is not None]
        lines = {name: new for name in self._offsets if (new := self._new_bytes(name))}
        return Delta(lines, tuple(reversed(held)), present)

    def read(self, name: str, file: str, offset: int, size: int) -> bytes:
        """Bytes of a file that is held."""
        with (self._shelf(name) / file if file else self._shelf(name)).open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)

    def release(self, name: str) -> None:
        """The driver has it."""
        remove(self._shelf(name))

    def _complete(self) -> Iterator[Path]:
        """Whatever has its final name, the last pattern first; every one was renamed to it when it was complete."""
        for pattern in reversed(self._mirrored.complete):
            yield from sorted(self.root.glob(pattern), reverse=True)

    def _shelf(self, name: str) -> Path:
        return self.root / ".outbox" / name.replace("/", "-")

    def _hold(self, path: Path) -> Held | None:
        """Hold a path if it is new; None too when the trainer replaces it at this moment, and the next call sees the new one."""
        name = path.relative_to(self.root).as_posix()
        shelf = self._shelf(name)
        try:
            stamp = _stamp(path)
            if self._stamps.get(name) == stamp:
                return None
            self.release(name)
            shelf.parent.mkdir(exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, shelf, copy_function=os.link)
                files = {each.relative_to(shelf).as_posix(): each.stat().st_size for each in files_below(shelf)}
                # The trainer deletes an old checkpoint file by file, and the folder last.
                if not files:
                    return None
            else:
                os.link(path, shelf)
                files = {"": shelf.stat().st_size}
            if _stamp(path) != stamp:
                return None
        except (OSError, shutil.Error):
            return None
        self._stamps[name] = stamp
        return Held(name, files)

    def _new_bytes(self, name: str) -> bytes:
        try:
            with (self.root / name).open("rb") as stream:
                stream.seek(self._offsets[name])
                new = stream.read(MOST_BYTES)
        except FileNotFoundError:
            return b""
        if name != LOG:
            new = new[: new.rfind(b"\n") + 1]
        self._offsets[name] += len(new)
        return new


def _stamp(path: Path) -> tuple[int, int]:
    """Changes when the path is replaced: a renamed folder has another inode."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


class Refused(Exception):  # noqa: N818 - it names what happened
    """What has arrived is not to be stored."""


class Inbox:
    """The side of the driver, whose folder is the truth; what a killed driver has received in part is removed from it.

    `accept` gets the name and the path of what has arrived, before it replaces anything. It may change it, or raise `Refused`.
    """

    def __init__(self, root: Path, mirrored: Mirrored, accept: Callable[[str, Path], None] = lambda _name, _path: None) -> None:
        self.root, self._tidied, self._accept = root, mirrored.tidied, accept
        for pattern in mirrored.complete:
            for path in root.glob(str(unfinished_path(Path(pattern)))):
                remove(path)

    def apply(self, delta: Delta, read: Callable[[str, str, int, int], bytes], release: Callable[[str], None]) -> None:
        """Store what is new, in an order that lets a driver that is killed here resume; `read` and `release` are the outbox's."""
        for name, new in delta.lines.items():
            with (self.root / name).open("ab") as stream:
                stream.write(new)
        for held in delta.held:
            with suppress(Refused), replacing(self.root / held.name) as part:
                for file, size in held.files.items():
                    path = part / file if file else part
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as stream:
                        for offset in range(0, size, CHUNK_BYTES):
                            stream.write(read(held.name, file, offset, CHUNK_BYTES))
                self._accept(held.name, part)
            release(held.name)
        here = {path.name: path for path in (self.root / self._tidied).glob("*")} if self._tidied else {}
        # Never the last one: where the folder on the node was removed, the stage resumes from what is here.
        if delta.present & here.keys():
            for name in here.keys() - delta.present:
                remove(here[name])

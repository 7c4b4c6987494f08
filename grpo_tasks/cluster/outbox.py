"""What a node sends back while it trains: new lines, and folders that are complete.

    Outbox.collect() -> Delta: new bytes of journal, events and log; the checkpoints and files that are new
    Outbox.read(...) -> bytes of one of them, in chunks;  Outbox.release(name) when the driver has it

The trainer deletes old checkpoints, so a new one is held by hard links until the driver has fetched it. Folders are listed before
lines are read: a driver that has a checkpoint has every line up to it.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from grpo_tasks.content.hashes import files_below
from grpo_tasks.stage.stage_dir import StageDir

MOST_BYTES = 1 << 22
"""Most bytes of one file of lines in one delta."""


@dataclass(frozen=True, slots=True)
class Held:
    """A file or folder of the stage directory, held for the driver until it is released."""

    name: str
    """Path relative to the stage directory, with slashes."""
    files: dict[str, int]
    """Size in bytes of each file by its path relative to `name`; one entry with an empty path for a single file."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new on a node since the last one."""

    lines: dict[str, bytes] = field(default_factory=dict)
    """New bytes by file name. Those of the journal and the events end with a newline."""
    held: tuple[Held, ...] = ()
    checkpoints: frozenset[str] | None = None
    """Names of all checkpoints that the stage has now, those being written included; None for a node that ships none."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is new."""
        return not self.lines and not self.held


@dataclass(slots=True)
class Outbox:
    """The outgoing side of one stage directory."""

    directory: StageDir
    everything: bool
    """Whether this node has the rank that writes. The others ship their log only."""
    _offsets: dict[str, int] = field(default_factory=dict)
    _stamps: dict[str, tuple[int, int]] = field(default_factory=dict)

    def begin(self) -> None:
        """Take what is there now for known: the driver sent it."""
        for path in self._lines():
            self._offsets[path.name] = path.stat().st_size if path.exists() else 0
        for path in self._complete():
            self._stamps[self._name(path)] = _stamp(path)

    def collect(self) -> Delta:
        """Everything that is new since the last call."""
        held: list[Held] = []
        checkpoints = None
        if self.everything:
            # Before anything is held: a checkpoint that is replaced at this moment counts as present.
            found = self.directory.checkpoints.glob("*step-*")
            checkpoints = frozenset(path.name.removeprefix(".").removesuffix(".part") for path in found)
            held = [each for path in self._complete() if (each := self._hold(path)) is not None]
        lines = {path.name: new for path in self._lines() if (new := self._new_bytes(path))}
        return Delta(lines, tuple(held), checkpoints)

    def read(self, name: str, file: str, offset: int, size: int) -> bytes:
        """Bytes of a file that is held."""
        with (self._shelf(name) / file if file else self._shelf(name)).open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)

    def release(self, name: str) -> None:
        """The driver has it."""
        shelf = self._shelf(name)
        if shelf.is_dir():
            shutil.rmtree(shelf)
        else:
            shelf.unlink(missing_ok=True)

    def _lines(self) -> list[Path]:
        directory = self.directory
        return [directory.log, directory.journal, directory.events] if self.everything else [directory.log]

    def _complete(self) -> list[Path]:
        """Whatever has its final name; every one was renamed to it when it was complete."""
        directory = self.directory
        folders = [*sorted(directory.checkpoints.glob("step-*")), directory.best, directory.final]
        files = [directory.token_budget, *sorted(directory.completions(0).parent.glob("*.parquet")), directory.result]
        return [path for path in [*files, *folders] if path.exists()]

    def _name(self, path: Path) -> str:
        return path.relative_to(self.directory.root).as_posix()

    def _shelf(self, name: str) -> Path:
        return self.directory.root / ".outbox" / name.replace("/", "-")

    def _hold(self, path: Path) -> Held | None:
        """Hold a path if it is new; None too when the trainer replaces it at this moment, and the next call sees the new one."""
        name = self._name(path)
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

    def _new_bytes(self, path: Path) -> bytes:
        offset = self._offsets.get(path.name, 0)
        try:
            with path.open("rb") as stream:
                stream.seek(offset)
                new = stream.read(MOST_BYTES)
        except FileNotFoundError:
            return b""
        if path != self.directory.log:
            new = new[: new.rfind(b"\n") + 1]
        self._offsets[path.name] = offset + len(new)
        return new


def _stamp(path: Path) -> tuple[int, int]:
    """Changes when the path is replaced: a renamed folder has another inode."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns

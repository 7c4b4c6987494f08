"""Every error a user can meet, on one page.

Each says where (`place`: a file and line, a config field, a reward function and row) and what to do (`fix`). What a user typed
may be of any length; an error never repeats more of it than a person would read.
They cross process borders as JSON (`to_json`, `from_json`), so a step that runs in a child process fails with the
same words as one that does not. Our own broken promises are `assert`s, not errors of this family.
"""

import errno
import importlib
import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Self

from schemas.secret import hide

MAX_LINE = 2_000
"""Characters of one line of an error; a longer line loses its middle."""
MAX_LINES = 60
"""Lines of an error; a longer one loses its end."""


def shorten(text: str, limit: int = MAX_LINE) -> str:
    """The text with the middle of overlong lines and the end of overlong lists left out; both say how much."""
    lines = text.split("\n")
    # One line less than allowed, so that shortening twice changes nothing: errors cross process borders.
    kept = lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], f"... {len(lines) - MAX_LINES + 1:,} more lines"]
    return "\n".join(_shorten_line(line, limit) for line in kept)


def _shorten_line(line: str, limit: int) -> str:
    if len(line) <= limit:
        return line
    head, tail = limit // 2, limit // 4
    return f"{line[:head]} ...[{len(line) - head - tail:,} characters left out]... {line[-tail:]}"


OUR_PACKAGES = ("schemas", "grpo_tasks", "flows")
"""Packages whose modules may define errors of the family."""


class UserError(Exception):
    """Something the user can fix. `str()` gives the whole text: message, place and fix."""

    title: ClassVar[str] = "The run cannot go on"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, place: str = "", fix: str = "") -> None:
        self.message, self.place, self.fix = (shorten(hide(text)) for text in (message, place, fix))
        super().__init__(self.message)

    def __str__(self) -> str:
        lines = [self.message]
        if self.place:
            lines.append(f"  where: {self.place}")
        if self.fix:
            lines.append(f"  fix:  {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.place, self.fix))

    def to_json(self) -> str:
        """One JSON object that `from_json` turns back into the same error."""
        kind = type(self)
        fields = {"type": kind.__qualname__, "module": kind.__module__, "message": self.message}
        return json.dumps(fields | {"place": self.place, "fix": self.fix})

    @staticmethod
    def from_json(text: str) -> "UserError":
        """The error that `to_json` wrote, of the same class; a class that is not ours comes back as plain `UserError`."""
        fields = json.loads(text)
        kind = _find(fields["type"], fields.get("module", __name__))
        return kind(fields["message"], place=fields["place"], fix=fields["fix"])

    def at(self, place: str) -> Self:
        """The same error with a place, for code that learns the place later than the fault."""
        return type(self)(self.message, place=place, fix=self.fix)


def _find(name: str, module: str) -> type[UserError]:
    if module.partition(".")[0] not in OUR_PACKAGES:
        # The file may come from a process that somebody else's code runs in: what it names is not imported.
        return UserError
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return UserError
    return found if isinstance(found, type) and issubclass(found, UserError) else UserError


def _rebuild(kind: type[UserError], message: str, place: str, fix: str) -> UserError:
    return kind(message, place=place, fix=fix)


class ConfigError(UserError):
    """A config file, a `--set` override or a form value that is refused."""

    title = "The configuration is refused"
    exit_code = 2


class DataError(UserError):
    """A data file that cannot be read, or more bad rows than allowed."""

    title = "The data is refused"


class RewardError(UserError):
    """A reward function that raised, hung, or broke its contract."""

    title = "A reward function failed"


class LabError(UserError):
    """The reward lab found a check that fails; nothing was trained."""

    title = "The reward lab stopped the run"


class ModelError(UserError):
    """A base model, tokenizer or adapter that cannot be loaded or used."""

    title = "The model cannot be used"


class TrainingError(UserError):
    """A stage that cannot go on: numbers that are not finite, a broken stage directory."""

    title = "The training stage stopped"


class NotFiniteError(TrainingError):
    """A loss or a gradient that is not finite; the weights are as they were before the update."""


class RolloutError(UserError):
    """The rollout server failed, or serves something else than it should."""

    title = "The rollout server cannot be used"


class ServerGoneError(RolloutError):
    """A server that does not answer any more, or says that its engine is dead."""


class MergeError(UserError):
    """A merged model that is not base + adapter; it is never published."""

    title = "The merge is refused"


class DamagedError(UserError):
    """A file that is not what the step that made it has written."""

    title = "A file was changed or damaged"


class TrackingError(UserError):
    """The tracking server refused something or cannot be reached."""

    title = "MLflow could not record the run"


class OrchestratorError(UserError):
    """The Prefect server that is configured does not answer."""

    title = "Prefect cannot be reached"


class ChildDied(UserError):  # noqa: N818 - it says what happened
    """A step's process ended without a result and without an error of its own (killed, out of memory)."""

    title = "A step's process died"


class DiskFullError(UserError):
    """There is no room left to write to."""

    title = "The disk is full"


def disk_full(error: BaseException) -> bool:
    """Whether an error, or one that led to it, says that a disk is full."""
    cause: BaseException | None = error
    while cause is not None:
        # Libraries that are not written in Python give no number; sqlite has words of its own.
        if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(words in str(cause) for words in _FULL):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


_FULL = ("No space left on device", "Disk quota exceeded", "database or disk is full")


@contextmanager
def hidden_errors() -> Iterator[None]:
    """An error that leaves the block is safe to log and to record: an error of a library may name a password in an address."""
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        hidden = hide(text)
        if hidden == text:
            raise
        if isinstance(error, UserError):
            # Its own words are safe; what led to it is not.
            raise error from None
        raise RuntimeError(hidden) from None


def refused_by_system(error: BaseException | None) -> UserError | None:
    """An error of ours for a path that the operating system will not read, write or follow; None for any other error.

    Only refusals that a person can lift: a file in the place of a folder, permissions, a read-only or broken disk. That something
    is not there (ENOENT) may as well be a fault of this program, and keeps its traceback.
    """
    if not isinstance(error, OSError) or error.errno not in _LIFTED or not isinstance(error.filename, str | bytes | os.PathLike):
        return None
    path = os.fsdecode(error.filename)
    return UserError(f"the system refuses {path}: {error.strerror}", place=path, fix=_LIFTED[error.errno])


_LIFTED = {
    errno.EACCES: "check the permissions of the path and of the folders above it",
    errno.EPERM: "check the permissions of the path and of the folders above it",
    errno.EROFS: "the disk is mounted read-only: name a path on another one",
    errno.ENOTDIR: "a file stands where a folder is needed: move it away, or name another path",
    errno.EEXIST: "something stands there already: move it away, or name another path",
    errno.EISDIR: "a folder stands where a file is needed: move it away, or name another path",
    errno.ELOOP: "the path is a link that leads back to itself: remove it",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENXIO: "it is a device or a pipe: name a file",
    errno.EIO: "the disk does not answer: check it",
}

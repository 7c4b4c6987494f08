"""All errors that a user can meet: each says where (`place`) and what to do (`fix`), and repeats little of the user's input.

They cross process boundaries as JSON. Violations of our own contracts are `assert`s, not errors of this family.
"""

import errno
import importlib
import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

from schemas.secret import hide

MAX_LINE = 2_000
MAX_LINES = 60


def shorten(text: str, limit: int = MAX_LINE) -> str:
    """The text without the middle of overlong lines and the end of overlong lists. A note says how much is missing."""
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        # One line fewer than allowed, so that shortening twice changes nothing: errors cross process boundaries.
        lines = [*lines[: MAX_LINES - 1], f"... {len(lines) - MAX_LINES + 1:,} more lines"]
    head, tail = limit // 2, limit // 4
    for number, line in enumerate(lines):
        if len(line) > limit:
            lines[number] = f"{line[:head]} ...[{len(line) - head - tail:,} characters left out]... {line[-tail:]}"
    return "\n".join(lines)


OUR_PACKAGES = ("schemas", "grpo_tasks", "flows")
"""Packages whose modules may define errors of the family."""


class UserError(Exception):
    """A problem that the user can fix. `str()` gives message, place and fix."""

    title: ClassVar[str] = "The run cannot continue"
    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, *, title: str | None = None, exit_code: int | None = None) -> None:
        cls.title, cls.exit_code = title or cls.title, exit_code or cls.exit_code

    def __init__(self, message: str, *, place: str = "", fix: str = "") -> None:
        self.message, self.place, self.fix = (shorten(hide(text)) for text in (message, place, fix))
        super().__init__(self.message)

    def __str__(self) -> str:
        lines = [self.message]
        if self.place:
            lines.append(f"  where: {self.place}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (UserError.from_json, (self.to_json(),))

    def to_json(self) -> str:
        """A JSON object that `from_json` turns back into the same error."""
        kind = type(self)
        fields = {"type": kind.__qualname__, "module": kind.__module__, "message": self.message}
        return json.dumps(fields | {"place": self.place, "fix": self.fix})

    @staticmethod
    def from_json(text: str) -> "UserError":
        """The error that `to_json` wrote, with its class. A class of another package becomes a plain `UserError`."""
        fields = json.loads(text)
        module, kind = fields.get("module", __name__), None
        # The text may come from a process that runs foreign code, so no other module that it names is imported.
        if module.partition(".")[0] in OUR_PACKAGES:
            with suppress(ImportError):
                kind = getattr(importlib.import_module(module), fields["type"], None)
        kind = kind if isinstance(kind, type) and issubclass(kind, UserError) else UserError
        return kind(fields["message"], place=fields["place"], fix=fields["fix"])


class ConfigError(UserError, title="The configuration is invalid", exit_code=2):
    """An invalid config file, `--set` override or form value."""


class DataError(UserError, title="The data is invalid"):
    """A data file that cannot be read, or more invalid rows than allowed."""


class RewardError(UserError, title="A reward function failed"):
    """A reward function that raised, timed out or violated its contract."""


class JudgeUnavailableError(RewardError, title="The judge is not available"):
    """The judge does not answer, or may not be asked any more. The stage can be resumed."""


class LabError(UserError, title="The reward lab stopped the run"):
    """A check of the reward lab failed; nothing was trained."""


class ModelError(UserError, title="The model cannot be used"):
    """A base model, tokenizer or adapter that cannot be loaded or used."""


class TrainingError(UserError, title="The training stage stopped"):
    """A stage that cannot continue: values that are not finite, or a damaged stage directory."""


class NotFiniteError(TrainingError):
    """A loss or gradient that is not finite. The weights are those before the update."""


class PrunedError(TrainingError, title="The run was pruned"):
    """A run of a sweep that ends early, because others do better. Its stage has a checkpoint to resume from."""


class RolloutError(UserError, title="The rollout server cannot be used"):
    """The rollout server failed, or serves another model than the policy."""


class ServerGoneError(RolloutError):
    """A server that does not answer in time or at all, or reports that its engine died."""

    pause_s: float = 0.0
    """How long (s) it asks to be left alone."""


class ServerBusyError(ServerGoneError):
    """A server that refuses a request because it has too many."""


class MergeError(UserError, title="The merged model is wrong"):
    """A merged model that differs from base + adapter. It is never published."""


class ServedModelError(UserError, title="The published model answers otherwise"):
    """An artifact that cannot be loaded, or answers otherwise than the merged model. It is not registered."""


class DamagedError(UserError, title="A file was changed or damaged"):
    """A file that changed since its step wrote it."""


class TrackingError(UserError, title="MLflow could not record the run"):
    """MLflow refused a request or cannot be reached."""


class StoreAwayError(TrackingError):
    """MLflow does not answer, or answers that it cannot at the moment."""


class OrchestratorError(UserError, title="Prefect cannot be reached"):
    """The configured Prefect server does not answer."""


class ClusterError(UserError, title="The cluster cannot be used"):
    """A Ray cluster that cannot be joined, or one of its nodes that cannot train the stage."""


class ChildDied(UserError, title="A step's process died"):  # noqa: N818 - it names what happened
    """The process of a step ended without a result and without an error of ours (killed, out of memory)."""


class DiskFullError(UserError, title="The disk is full"):
    """The disk is full."""


class EndedByOthers(KeyboardInterrupt):
    """Somebody else has ended the run, in Prefect. Whatever it was doing ends as by Ctrl-C."""

    def __init__(self, reason: str, state: object, *, failed: bool = False) -> None:
        super().__init__(reason)
        self.state = state  # what Prefect says about the run, and shall go on to say
        self.failed = failed  # then MLflow says so too


class Notice(UserWarning):
    """What a user should know of a step that continues, such as that it takes a slow way; shown once, wherever it arises."""


def disk_full(error: BaseException) -> bool:
    """Whether an error, or a cause of it, says that a disk is full."""
    cause: BaseException | None = error
    while cause is not None:
        # Libraries that are not written in Python set no errno; SQLite has its own message.
        if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(words in str(cause) for words in _FULL):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


_FULL = ("No space left on device", "Disk quota exceeded", "database or disk is full")


@contextmanager
def hidden_errors() -> Iterator[None]:
    """Makes errors that leave the block safe to log: an error of a library may contain an address with a password."""
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        hidden = hide(text)
        if hidden == text:
            raise
        if isinstance(error, UserError):
            # Its own message is safe; that of its cause is not.
            raise error from None
        raise RuntimeError(hidden) from None


def refused_by_system(error: BaseException | None) -> UserError | None:
    """A `UserError` for a path that the system refuses and a user can repair; None for any other error.

    A missing file (ENOENT) may as well be a bug of ours, so it keeps its traceback.
    """
    fix = _SYSTEM_FIXES.get(error.errno or 0) if isinstance(error, OSError) else None
    if not isinstance(error, OSError) or fix is None or not isinstance(error.filename, str | bytes | os.PathLike):
        return None
    path = os.fsdecode(error.filename)
    return UserError(f"the operating system refuses {path}: {error.strerror}", place=path, fix=fix)


_SYSTEM_FIXES = {
    errno.EACCES: "check the permissions of the path and of the folders above it",
    errno.EPERM: "check the permissions of the path and of the folders above it",
    errno.EROFS: "the disk is mounted read-only: name a path on another disk",
    errno.ENOTDIR: "there is a file where a folder is needed: move it, or name another path",
    errno.EEXIST: "the path exists already: move it, or name another path",
    errno.EISDIR: "there is a folder where a file is needed: move it, or name another path",
    errno.ELOOP: "the path is a link to itself: remove it",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENXIO: "the path is a device or a pipe: name a file",
    errno.EIO: "the disk reports an error: check it",
}

"""The files of a strange model are read in a process with limits of time and memory, before and while this process uses them.

A chat template is a program, and a tokenizer holds patterns: neither has to end. The process is one of grpo_tasks/processes, like
those of rewards and tools. What ships with this project is not strange.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from grpo_tasks.processes.worker_process import Reply, Shape, WorkerFault, WorkerProcess
from schemas.errors import ModelError
from schemas.paths import EMBEDDED, resolve

CHECK_S, RENDER_S = 300.0, 120.0
"""Time limits: for loading and trying everything, and for a batch of chats. A template takes a millisecond for a chat; a process
that shares its core with many others may have to wait a hundred times as long."""
MEMORY_BYTES = 4 * 2**30
BATCH = 256
"""Chats in one request."""
_CHECK_BYTES, _RENDER_BYTES = 2**16, 2**28
_READ = {"check": "trying the tokenizer, the chat template and the headers of the weights", "render": "the chat template"}


class _Checked(Reply):
    file: str = ""
    error: str = ""


class _Rendered(Reply):
    texts: list[str]
    refused: dict[int, str] = Field(default_factory=dict)


class LimitedModel:
    """The process, for the model at `place`."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._process = WorkerProcess("grpo_tasks.content.serve_model", MEMORY_BYTES)

    def check(self, path: str, revision: str | None) -> None:
        """Load and try tokenizer and chat template, and read the headers of the weights.

        ModelError where one of them does not end, takes too much memory, or a header is damaged.
        """
        made = self._ask("check", {"path": resolve(path), "revision": revision}, CHECK_S, _CHECK_BYTES, _Checked)
        if made.file:
            raise ModelError(
                f"the weights cannot be read: {made.error}", place=made.file, fix="download the file again, or name another model"
            )

    def render(
        self, template: str, special: Mapping[str, Any], chats: Sequence[Sequence[Mapping[str, Any]]], *, opened: bool
    ) -> tuple[list[str], dict[int, str]]:
        """As `serve_model._render`; raises ModelError where the template does not end or takes too much memory."""
        message = {"template": template, "special": special, "chats": chats, "opened": opened}
        made = self._ask("render", message, RENDER_S, _RENDER_BYTES, _Rendered)
        return made.texts, made.refused

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _ask(self, what: str, message: Mapping[str, Any], limit_s: float, max_bytes: int, shape: type[Shape]) -> Shape:
        if self._process.link is None:
            self._process.start()
        reply = self._process.exchange(what, message, shape, limit_s=limit_s, max_bytes=max_bytes)
        if not isinstance(reply, WorkerFault):
            return reply
        reason = {
            "hung": f"did not end within {limit_s:g} s",
            "memory": f"took more than {MEMORY_BYTES / 2**30:g} GiB of memory",
        }.get(reply.kind, f"ended the process that read it: {reply.detail}")
        again = "run the same command again if this machine was busy; otherwise " if reply.kind == "hung" else ""
        raise ModelError(
            f"{_READ[what]} {reason}",
            place=f"model.path: {self._place}",
            fix=f"{again}name another model, or repair its chat_template.jinja or tokenizer.json",
        )


_current: ContextVar[LimitedModel | None] = ContextVar("limited model", default=None)


def limited_model() -> LimitedModel | None:
    """The process in which chats are rendered now; None where they are rendered in this one."""
    return _current.get()


@contextmanager
def limited_templates(path: str) -> Iterator[None]:
    """Render chats in a process with limits while the block runs; nothing changes for a model that ships with this project."""
    if path.startswith(EMBEDDED):
        yield
        return
    model = LimitedModel(path)
    token = _current.set(model)
    try:
        yield
    finally:
        _current.reset(token)
        model.close()


def check_model_files(path: str, revision: str | None) -> None:
    """`LimitedModel.check`, unless the model ships with this project. A folder is tried again only when its files change."""
    if path.startswith(EMBEDDED):
        return
    folder = Path(path)
    files = [(file, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()] if folder.is_dir() else []
    _check_once(path, revision, tuple((file.name, stat.st_size, stat.st_mtime_ns) for file, stat in files))


@cache
def _check_once(path: str, revision: str | None, state: tuple[tuple[str, int, int], ...]) -> None:  # noqa: ARG001 - the cache's key
    current = limited_model()
    model = current or LimitedModel(path)
    try:
        model.check(path, revision)
    finally:
        if current is None:
            model.close()

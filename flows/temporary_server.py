"""The server that Prefect starts for a flow when none is configured, made safe for one machine.

closed      a random password that only this process tree knows: else any web page could write to the database of a worker
its port    bound here and inherited: Prefect looks for a free port, and binds it seconds later
outlasting  a session of its own, so that Ctrl-C ends it last and the run can record its own end; a kill ends it too
one by one  two servers that start at once in a new folder both find a database without tables, so each waits for the other
"""

import functools
import os
import re
import secrets
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import httpx
from prefect import Flow
from prefect.context import FlowRunContext, refresh_global_settings_context
from prefect.exceptions import MissingResult
from prefect.settings import get_current_settings
from prefect.states import Completed
from sqlalchemy.engine import make_url

from grpo_tasks.kit.lock import file_lock
from grpo_tasks.processes.serve import start_server
from schemas.errors import OrchestratorError, UserError, disk_full
from schemas.results.base import Result

if TYPE_CHECKING:
    from prefect.server.api.server import SubprocessASGIServer

P = ParamSpec("P")
R = TypeVar("R")


def is_temporary() -> bool:
    """Whether Prefect starts a server of its own for a flow. A profile may name a server even if the environment names none."""
    return get_current_settings().api.url is None


def check_database() -> None:
    """Refuse a folder in which the temporary server cannot keep its database; it would fail again and again."""
    file = _database()
    if file is None:
        return
    # Prefect has tried to make its folder when it was imported.
    refused = next((path for path in (file.parent, file) if path.exists() and not os.access(path, os.W_OK)), None)
    if refused is not None or not file.parent.is_dir():
        raise UserError(
            f"Prefect cannot write to {refused or file.parent}, where its temporary server keeps a database",
            place=f"PREFECT_HOME={get_current_settings().home}",
            fix="export PREFECT_HOME=/folder/that/can/be/written, or PREFECT_API_URL of a running server",
        )


def _database() -> Path | None:
    """The file in which the temporary server keeps its database, if it does."""
    given = get_current_settings().server.database.connection_url
    assert given is not None, "Prefect fills it in"
    url = make_url(given.get_secret_value())
    in_file = url.drivername.startswith("sqlite") and url.database and ":memory:" not in url.database
    return Path(str(url.database)) if in_file else None


def lock_temporary_server() -> None:
    """Set a password for the temporary server, unless a server is configured or the password has been set before."""
    if not is_temporary() or {"PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"} <= os.environ.keys():
        return
    password = os.environ.setdefault("PREFECT_SERVER_API_AUTH_STRING", f"grpo:{secrets.token_urlsafe(24)}")
    os.environ["PREFECT_API_AUTH_STRING"] = password
    # On a slow or busy machine the server needs more than the 20 s that Prefect allows.
    os.environ.setdefault(_START_S, "300")
    _patch_prefect()
    refresh_global_settings_context()


_START_S = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
_bound: dict[int, socket.socket] = {}
"""Sockets by their port, until the server has inherited them."""


_output = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the server
"""What the server prints: what it cannot do, the run reports by itself, once."""


def _bind_port(_: "SubprocessASGIServer") -> int:
    """Bind a port that the kernel chooses. Nothing listens there yet, so a connection is refused until the server is up."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = int(bound.getsockname()[1])
    _bound[port] = bound
    return port


def _not_started(code: int) -> OrchestratorError:
    home = f"PREFECT_HOME={get_current_settings().home}"
    # Its supervisor was killed, or says by which signal the server itself was.
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        fix = "run the same command again" + ("; signal 9 is often the kernel out of memory" if number == signal.SIGKILL else "")
        return OrchestratorError(f"Prefect's temporary server was killed while it started (signal {number})", place=home, fix=fix)
    _output.seek(0)
    printed = _output.read().decode(errors="replace").splitlines()
    lines = [line for line in printed if re.match(r"[\w.]+(Error|Exception)\b", line)]
    reason = f": {lines[-1][:300]}" if lines else ""
    full = any(disk_full(OSError(line)) for line in lines)
    return OrchestratorError(
        f"Prefect's temporary server ended while it started{reason}",
        place=home,
        fix="free some disk space" if full else "move its database away, or export PREFECT_HOME=/another/folder",
    )


class _Server(subprocess.Popen[bytes]):
    """Prefect calls `poll` while it waits for the first answer, and would wait for minutes for a server that has ended."""

    def poll(self) -> int | None:
        """Raises `OrchestratorError` when the server has ended. Prefect would start it on another port, again and again."""
        code = super().poll()
        if code is not None:
            raise _not_started(code)
        return None

    def send_signal(self, sig: int) -> None:
        """As `Popen.send_signal`, which asks `poll` whether the process has ended."""
        if super().poll() is None:
            os.kill(self.pid, sig)


@functools.cache
def _patch_prefect() -> None:
    """Let Prefect start its server in this way, from now on."""
    # It takes more than a second to import. With a server of one's own nothing here needs it.
    import prefect.server.api.server as prefect_server

    start, start_and_wait = prefect_server.SubprocessASGIServer._run_uvicorn_command, prefect_server.SubprocessASGIServer.start

    def start_locked(server: "SubprocessASGIServer", timeout: int | None = None) -> None:
        """Start the server and wait until it answers, one process at a time for each database."""
        file = _database()
        lock = file and file.with_name(f"{file.name}.start.lock")
        with nullcontext() if lock is None else file_lock(lock, holder="Prefect's temporary server"):
            try:
                start_and_wait(server, timeout)
            except (RuntimeError, httpx.HTTPError) as error:
                # Started, and too slow for Prefect's limits: for the first answer, or for one answer.
                raise OrchestratorError(
                    f"Prefect's temporary server did not answer in time: {type(error).__name__}: {error}",
                    place=f"PREFECT_HOME={get_current_settings().home}",
                    fix=f"run the same command again when this machine is less busy, or export {_START_S}=1800",
                ) from error

    def start_supervised(server: "SubprocessASGIServer") -> "subprocess.Popen[Any]":
        """Start the server as Prefect does, but on the bound port, and below a supervisor with a session of its own."""

        def popen(*, args: list[str], env: dict[str, str]) -> "subprocess.Popen[Any]":
            assert server.port is not None
            with _bound.pop(server.port) as bound:
                fd = bound.fileno()
                # uvicorn prefers an inherited socket to its arguments --host and --port.
                return start_server([*args, "--fd", str(fd)], environment=env, output=_output, popen=_Server, pass_fds=[fd])

        # Prefect has no setting for it.
        prefect_server.subprocess = SimpleNamespace(Popen=popen)  # type: ignore[assignment, attr-defined]
        try:
            return start(server)
        finally:
            prefect_server.subprocess = subprocess  # type: ignore[attr-defined]

    prefect_server.SubprocessASGIServer.find_available_port = _bind_port  # type: ignore[assignment, method-assign]
    prefect_server.SubprocessASGIServer._run_uvicorn_command = start_supervised  # type: ignore[assignment, method-assign]
    prefect_server.SubprocessASGIServer.start = start_locked  # type: ignore[assignment, method-assign]


_returned: ContextVar[list[Any]] = ContextVar("returned")
"""What the body of the flow that was called last has returned."""


class _LockedFlow(Flow[P, R]):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Inside another flow, the server runs already.
        if FlowRunContext.get() is None:
            lock_temporary_server()
        returned = list[Any]()
        outer = _returned.set(returned)
        try:
            return super().__call__(*args, **kwargs)
        except MissingResult:
            # Prefect asks again when a server is late with its reply. To a final state that it has recorded already the server
            # replies with the state alone, and Prefect takes that for the result.
            if not returned:
                raise
            return returned[-1]
        finally:
            _returned.reset(outer)


def locked_flow(*, name: str, description: str) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """`prefect.flow`, for flows that a script may call directly: their temporary server is locked too.

    The headline of the result becomes the message of the run's final state, which Prefect shows in lists of runs.
    """

    def decorate(function: Callable[P, R]) -> Flow[P, R]:
        @functools.wraps(function)
        def with_headline(*args: P.args, **kwargs: P.kwargs) -> Any:
            result = function(*args, **kwargs)
            _returned.get([]).append(result)
            message = result.headline() if isinstance(result, Result) else ""
            return Completed(message=message, data=result) if message else result

        # The folders of the steps are what is kept. A pickle of Prefect's would be a second, unverified copy.
        return _LockedFlow(with_headline, name=name, description=description, persist_result=False)

    return decorate

"""Servers: started so that they never outlive the process that wanted them, and waited for until they answer.

`start_server` starts a supervisor, the leader of a process group, which starts the server and forks a guard. The supervisor ends
the whole group when it receives a signal to end, when its caller has ended, however that happened, or when the server has ended
by itself, whose exit code it then has. The guard, which waits for nothing else, ends the group when the supervisor has ended. The
sockets of the server are removed too: vLLM leaves them in the temporary folder.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, NoReturn

from grpo_tasks.processes.lifetime import PARENT, start_module, wait_until

HOST = "127.0.0.1"
POLL_S = 0.3
GRACE_S = 8.0
"""Longest wait for the server to end after SIGTERM; what is left is killed."""


def free_port(host: str = HOST) -> int:
    """A port of an address of this machine that is free now; another process may take it before the caller does."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = HOST) -> list[int]:
    """As many different free ports of an address."""
    with ExitStack() as stack:
        # All are open at once: a port that was closed again could be given a second time.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


def start_server(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: IO[bytes],
    popen: Callable[..., "subprocess.Popen[bytes]"] = subprocess.Popen,
    pass_fds: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a server below a supervisor, which is returned: it ends with the server, and ends it on SIGTERM."""
    return start_module(
        "grpo_tasks.processes.serve",
        *command,
        output=output,
        environment=environment,
        pass_fds=pass_fds,
        own_session=True,
        popen=popen,
    )


def wait_until_up(url: str, limit_s: float, *, is_ours: Callable[[], bool]) -> bool:
    """Wait until a server answers with status 200; False if it does not within the limit.

    `is_ours` is called before each question. It says whether an answer would be that of our server, and raises if it has ended.
    """
    # Not above: the supervisor has to start at once.
    import urllib.request
    from http.client import HTTPException

    def is_up() -> bool:
        if is_ours():
            with suppress(OSError, HTTPException), urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - we started it
                return int(answer.status) == 200
        return False

    return wait_until(is_up, every_s=POLL_S, limit_s=limit_s)


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, indented."""
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:] if log.exists() else []
    return "\n".join(f"    {line}" for line in text)


def main(command: list[str]) -> NoReturn:
    """Run the command until it ends, a signal arrives, or the caller has ended; then end the process group."""
    caller = int(os.environ.get(PARENT) or os.getppid())
    stop_requested = False

    def request_stop(*_: object) -> None:
        nonlocal stop_requested
        stop_requested = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, request_stop)
    sockets = tempfile.mkdtemp(prefix="vllm-")  # short: the path of a socket has at most 107 bytes
    supervisor = os.getpid()
    if os.fork() == 0:
        wait_until(lambda: os.getppid() != supervisor, every_s=POLL_S)
        _end_group(sockets)
    # The server inherits what the caller has passed on, such as a bound socket.
    server = subprocess.Popen(command, env=os.environ | {"VLLM_RPC_BASE_PATH": sockets}, close_fds=False)
    wait_until(lambda: server.poll() is not None or stop_requested or os.getppid() != caller, every_s=POLL_S)
    code = server.poll()
    if code is not None:
        # The guard ends what the server has left.
        os._exit(code if code >= 0 else 128 - code)
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    _end_group(sockets)


def _end_group(sockets: str) -> NoReturn:
    shutil.rmtree(sockets, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    raise AssertionError


if __name__ == "__main__":
    main(sys.argv[1:])

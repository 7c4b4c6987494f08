"""Servers: started so that they never outlive the process that wanted them, and waited for until they answer.

    caller --start_server--> supervisor (leader of a process group) --starts--> server --starts--> its own processes
                                  |
                                  +--forks--> guard, which waits for the end of the supervisor and nothing else

The supervisor ends the whole process group when it receives a signal to end, when its caller has ended, however that happened, or
when the server has ended by itself, whose exit code it then has. The guard ends the group when the supervisor has ended. The
sockets of the server are removed too: vLLM leaves them in the temporary folder. Standard library only: it has to start at once.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from grpo_tasks.processes.lifetime import PARENT

POLL_S = 0.3
GRACE_S = 8.0
"""Longest wait for the server to end after SIGTERM; what is left is killed."""


def start_server(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: IO[bytes],
    popen: Callable[..., "subprocess.Popen[bytes]"] = subprocess.Popen,
    pass_fds: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start a server below a supervisor, which is returned: it ends with the server, and ends it on SIGTERM."""
    return popen(
        [sys.executable, "-P", "-m", "grpo_tasks.processes.serve", *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**environment, PARENT: str(os.getpid())},
        start_new_session=True,
        pass_fds=pass_fds,
    )


def wait_until_up(url: str, limit_s: float, *, is_ours: Callable[[], bool]) -> bool:
    """Wait until a server answers with status 200; False if it does not within the limit.

    `is_ours` is called before each question. It says whether an answer would be that of our server, and raises if it has ended.
    """
    # Not above: the supervisor has to start at once.
    import urllib.request
    from http.client import HTTPException

    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if is_ours():
            with suppress(OSError, HTTPException), urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - we started it
                if answer.status == 200:
                    return True
        time.sleep(POLL_S)
    return False


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
    _fork_guard(sockets)
    # The server inherits what the caller has passed on, such as a bound socket.
    server = subprocess.Popen(command, env=os.environ | {"VLLM_RPC_BASE_PATH": sockets}, close_fds=False)
    while server.poll() is None and not stop_requested and os.getppid() == caller:
        time.sleep(POLL_S)
    code = server.poll()
    if code is not None:
        # The guard ends what the server has left.
        os._exit(code if code >= 0 else 128 - code)
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    _end_group(sockets)


def _fork_guard(sockets: str) -> None:
    supervisor = os.getpid()
    if os.fork() == 0:
        while os.getppid() == supervisor:
            time.sleep(POLL_S)
        _end_group(sockets)


def _end_group(sockets: str) -> NoReturn:
    """Kill everything that is left of the process group, this process included."""
    shutil.rmtree(sockets, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    raise AssertionError


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python -m grpo_tasks.processes.server_supervisor COMMAND...`: runs a server that never outlives the process that wanted it.

    caller --starts--> supervisor (leader of a process group) --starts--> server --starts--> its own processes
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
from contextlib import suppress
from typing import NoReturn

from grpo_tasks.processes.lifetime import PARENT

POLL_S = 0.3
GRACE_S = 8.0
"""Longest wait for the server to end after SIGTERM; what is left is killed."""


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

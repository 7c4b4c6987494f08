"""`python -m grpo_tasks.processes.server_supervisor COMMAND...`: a server that never outlives whoever asked for it.

Started as the leader of a process group, which the server and all it starts join. The group is ended when this process is told
to end, when the process that started this one is gone (however it went), when the server ends by itself, and, by a second
process that waits for nothing else, when this one is killed. The server's sockets go too: vLLM leaves them in the temporary
folder. Standard library only: it has to start at once.
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

LOOK_S = 0.3
GRACE_S = 8.0


def main(command: list[str]) -> NoReturn:
    """Run the command until it ends, we are told to end, or our parent is gone; ends with the group."""
    parent = int(os.environ.get("GRPO_PARENT_PID") or os.getppid())
    told = {"to end": False}

    def end(*_: object) -> None:
        told["to end"] = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    sockets = tempfile.mkdtemp(prefix="vllm-")  # short: the path of a socket has 107 bytes at most
    keeper = os.getpid()
    if os.fork() == 0:
        while os.getppid() == keeper:
            time.sleep(LOOK_S)
        _end_group(sockets)
    server = subprocess.Popen(command, env=os.environ | {"VLLM_RPC_BASE_PATH": sockets})
    while server.poll() is None and not told["to end"] and os.getppid() == parent:
        time.sleep(LOOK_S)
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    _end_group(sockets)


def _end_group(sockets: str) -> NoReturn:
    """All that is left of the group, this process included."""
    shutil.rmtree(sockets, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
    raise AssertionError


if __name__ == "__main__":
    main(sys.argv[1:])

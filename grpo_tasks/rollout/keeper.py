"""`python -m grpo_tasks.rollout.keeper COMMAND...`: a server that never outlives whoever asked for it.

The server and all it starts are one process group. It is ended when this process is told to end, when the process that started
this one is gone (however it went), and it ends this one when it ends by itself. Its sockets go with it: vLLM leaves them in the
temporary folder when it is killed. Standard library only: it has to start at once.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time

LOOK_S = 0.3
GRACE_S = 8.0
PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    """Run the command until it ends, we are told to end, or our parent is gone; its exit code."""
    parent = int(os.environ.get("GRPO_PARENT_PID") or os.getppid())
    told = {"to end": False}

    def end(*_: object) -> None:
        told["to end"] = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    # A short name: the path of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as sockets:
        server = subprocess.Popen(
            command,
            env=os.environ | {"VLLM_RPC_BASE_PATH": sockets},
            start_new_session=True,
            preexec_fn=_die_with_keeper,  # noqa: PLW1509 - there are no threads here
        )
        while server.poll() is None and not told["to end"] and os.getppid() == parent:
            time.sleep(LOOK_S)
        _end_group(server)
    return server.returncode


def _die_with_keeper() -> None:
    # For a keeper that is killed itself (prctl(2)).
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_group(server: "subprocess.Popen[bytes]") -> None:
    """All of the group, also those whose leader has ended already."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and _lives(server):
            time.sleep(0.05)
    server.wait()


def _lives(server: "subprocess.Popen[bytes]") -> bool:
    server.poll()
    try:
        os.killpg(server.pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

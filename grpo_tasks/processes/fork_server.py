"""`python -m grpo_tasks.processes.fork_server FD`: the process that heavy children are forked from; started by child.py.

The libraries that each child needs take seconds to import, more than many a step has to do. Here they are imported once.
Only with a CPU build of torch: a process that may have talked to the driver of a GPU must not be forked, so with any other build
the children import for themselves. One child at a time. Server and child end with the process that asked, however it ends.
"""

import json
import os
import runpy
import signal
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
from setproctitle import setproctitle

from grpo_tasks.processes.lifetime import PARENT

POLL_S = 0.05


def main() -> None:
    """Fork and wait, until the other end of the socket is closed."""
    # Ctrl-C reaches the whole group; the one who asked ends his child himself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    if sys.platform == "linux" and torch.version.cuda is None and torch.version.hip is None:
        # By name: the room of child processes lies below the one that knows torch's libraries.
        import_module("grpo_tasks.policy.libraries").import_libraries()
    with Connection(descriptor) as connection, suppress(EOFError, OSError):
        while True:
            request = json.loads(connection.recv_bytes())
            pid = os.fork()
            if pid == 0:
                connection.close()
                _become(**request)
            connection.send_bytes(str(pid).encode())
            connection.send_bytes(str(_exit_code(pid, connection)).encode())


def _exit_code(pid: int, connection: Connection) -> int:
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        # Nobody speaks now: what can be read is the end of the one who asked.
        if connection.poll(POLL_S):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise EOFError


def _become(module: str, directory: str, log: str, environment: dict[str, str]) -> NoReturn:
    """What `python -m module directory >> log` would be."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(log, "ab", buffering=0) as file:  # noqa: PTH123 - it is the descriptor that counts
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    outputs: list[Any] = [sys.stdout, sys.stderr]
    for output in outputs:
        output.reconfigure(line_buffering=True)
    # Before the environment changes: the title is written where it begins.
    setproctitle(f"{sys.executable} -m {module} {directory}")
    os.environ.clear()
    os.environ.update(environment | {PARENT: str(os.getppid())})
    sys.argv = [module, directory]
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for output in outputs:
            output.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

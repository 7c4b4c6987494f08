"""`python -m grpo_tasks.processes.fork_server FD`: forks the child processes of steps; started by child.py.

It imports once what every child needs, which takes longer than many steps run: only with a CPU build of torch, because a process
that may have opened the driver of a GPU must not be forked. It ends with the process that started it, however that ends.

The `forkserver` context of multiprocessing was tried (Python 3.11) and breaks promises: it imports the caller's __main__ again in
every child (3.5 s under `grpo` against 0.12 s), fails for a script without a main guard, starts without -P, so a `datasets.py` in
the working directory replaces the library, lets the child of a killed server live on, and prints imports to the terminal.
"""

import gc
import json
import os
import runpy
import signal
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from setproctitle import setproctitle

from grpo_tasks.processes.child import IMPORTS
from grpo_tasks.processes.lifetime import PARENT

POLL_S = 0.05
LIBRARIES = ("transformers.models.auto.modeling_auto", "peft")
SLOW_IMPORTS = ("bitsandbytes", "sklearn")
"""Optional libraries that those two import, for features that are rarely used on a CPU."""
CACHED_CHECKS = (
    ("peft.import_utils", "is_bnb_available"),
    ("peft.import_utils", "is_bnb_4bit_available"),
    ("transformers.utils.import_utils", "is_bitsandbytes_available"),
)
"""Functions that cache whether bitsandbytes is installed. A 4-bit base model needs the true answer later."""


def import_libraries() -> None:
    """Import transformers and peft in two thirds of the time, before anything else imports them.

    Optional libraries are hidden meanwhile. With a GPU build of torch, or when peft is imported already, nothing happens.
    """
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None or "peft" in sys.modules:
        return
    hidden = [name for name in SLOW_IMPORTS if name not in sys.modules]
    # The import system takes None in sys.modules for "not installed".
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    for name in LIBRARIES:
        import_module(name)
    for name in hidden:
        del sys.modules[name]
    for module, name in CACHED_CHECKS:
        getattr(sys.modules[module], name).cache_clear()


def main() -> None:
    """Fork a child for each request and report its exit code, until the other end of the socket is closed."""
    # Ctrl-C in a terminal reaches the whole process group. The process that started this one decides when the child ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    # What is imported stays, so the garbage collector need not look through it: neither now, which takes a fifth of the time, nor
    # in each child, which would copy the memory that it shares with this process.
    gc.disable()
    import torch

    is_safe = sys.platform == "linux" and torch.version.cuda is None and torch.version.hip is None
    if is_safe:
        import_libraries()
    gc.freeze()
    gc.enable()
    with Connection(descriptor) as connection, suppress(EOFError, OSError):
        while True:
            request = json.loads(connection.recv_bytes())
            if IMPORTS in request:
                gc.disable()
                for module in request[IMPORTS] if is_safe else []:
                    # The child that needs it fails too, and has a log that says why.
                    with suppress(Exception):
                        import_module(module)
                gc.freeze()
                gc.enable()
                continue
            pid = os.fork()
            if pid == 0:
                connection.close()
                _become(**request)
            connection.send_bytes(str(pid).encode())
            connection.send_bytes(str(_exit_code(pid, connection)).encode())


def _exit_code(pid: int, connection: Connection) -> int:
    """Wait for the child; kill it and raise EOFError when the process that asked for it has ended."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        # No request comes while a child runs: what can be read now is the end of the connection.
        if connection.poll(POLL_S):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise EOFError


def _become(module: str, directory: str, log: str, environment: dict[str, str], cwd: str) -> NoReturn:
    """Turn the forked process into `python -m module directory >> log 2>&1`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # First of all: the other paths may be relative to it.
    os.chdir(cwd)
    with open(log, "ab", buffering=0) as file:  # noqa: PTH123 - it is the descriptor that counts
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    outputs: list[Any] = [sys.stdout, sys.stderr]
    for output in outputs:
        output.reconfigure(line_buffering=True)
    # Before the environment changes: setproctitle overwrites the memory that holds the arguments and the environment.
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

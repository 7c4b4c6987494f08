"""Several processes on this machine that train one stage together, each of them `python -m grpo_tasks.grpo` with a rank."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from schemas.child import ERROR, PARENT
from schemas.errors import ChildDied, UserError

POLL_S = 0.1


def launch(directory: Path, num_processes: int) -> None:
    """Start them and wait; when one fails the others are ended, for they would wait for it forever.

    Raises:
        UserError: one of them left one.
        ChildDied: one of them ended badly without saying why.
    """
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(num_processes)}
    command = [sys.executable, "-m", "grpo_tasks.grpo", str(directory)]
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=os.environ | rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank), PARENT: str(os.getpid())},
        )
        for rank in range(num_processes)
    ]
    try:
        while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
            time.sleep(POLL_S)
    finally:
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
    if any(codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        if (directory / ERROR).exists():
            raise UserError.from_json((directory / ERROR).read_text(encoding="utf-8"))
        raise ChildDied(
            f"process {rank} of {num_processes} ended with code {codes[rank]}; the others were ended too",
            place=str(directory),
            mend="see the end of the log; start the same command again: the stage goes on from its last checkpoint",
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port

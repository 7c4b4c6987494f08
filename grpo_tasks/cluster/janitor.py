"""`python -m grpo_tasks.cluster.janitor DIRECTORY`: removes a directory when the process at the other end of stdin ends.

An actor that is killed cannot remove its private stage directory. Its end of the pipe is closed by the kernel in any case. Ray
kills the children of an actor, so the janitor leaves the family first. Standard library only: it starts at once.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

SETTLING_S = 1.0
"""The trainer that dies with the actor may still be writing for a moment."""


def watch_over(directory: Path) -> IO[bytes]:
    """Start a janitor for a directory. It acts when the pipe that is returned is closed, by this process or by its end."""
    command = [sys.executable, "-P", "-m", "grpo_tasks.cluster.janitor", str(directory)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    process.wait()
    assert process.stdin is not None
    return process.stdin


def main(directory: Path) -> None:
    """Wait for the end of stdin in the background, then remove the directory."""
    if os.fork() != 0:
        os._exit(0)
    sys.stdin.buffer.read()
    for _ in range(5):
        time.sleep(SETTLING_S)
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))

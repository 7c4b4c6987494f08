"""A PostgreSQL cluster of the tests' own, from Debian's package, on a free port of the loopback address."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_tasks.operating.commands import HOST, free_port

SUPERUSER = "postgres"


def programs() -> Path | None:
    """Folder of initdb and pg_ctl; None when PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@contextmanager
def cluster() -> Iterator[str]:
    """Start one; gives its address, postgresql://USER@HOST:PORT. PostgreSQL refuses root, so root lends it its own user."""
    folder = programs()
    assert folder is not None
    home = Path(tempfile.mkdtemp(prefix="grpo-postgres-"))
    as_user = []
    if os.geteuid() == 0:
        shutil.chown(home, SUPERUSER)
        as_user = ["runuser", "-u", SUPERUSER, "--"]
    port = free_port(15432)

    def call(*command: object) -> None:
        subprocess.run([*as_user, *map(str, command)], check=True, cwd=home, stdout=subprocess.DEVNULL, timeout=60)

    call(folder / "initdb", "-D", home / "data", "-U", SUPERUSER, "--auth=trust", "-E", "UTF8", "--no-sync")
    options = f"-h {HOST} -p {port} -k {home} -c fsync=off"
    call(folder / "pg_ctl", "-D", home / "data", "-w", "-o", options, "-l", home / "log", "start")
    try:
        yield f"postgresql://{SUPERUSER}@{HOST}:{port}"
    finally:
        call(folder / "pg_ctl", "-D", home / "data", "-m", "immediate", "stop")
        shutil.rmtree(home)

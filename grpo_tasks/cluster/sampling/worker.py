"""The actor that samples shards on a node, each in a child process: `python -m grpo_tasks.rollout`."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_tasks.cluster.node import Node
from grpo_tasks.cluster.parcel import MODULES
from grpo_tasks.cluster.sampling.shards import SampleParcel
from grpo_tasks.processes.entry import ERROR, LOG, SPEC
from grpo_tasks.processes.lifetime import PARENT
from grpo_tasks.rollout.spec import SAMPLES


@dataclass(frozen=True, slots=True)
class ShardReport:
    """The state of a shard, each time the driver asks."""

    code: int | None
    """Exit code of the process; None while it runs, negative for a signal."""
    error: str = ""
    """The `UserError` that it left, as JSON; empty if there is none."""
    log: bytes = b""
    """Everything it printed, once it has ended."""
    size: int = 0
    """Bytes of the table, once it has ended well."""


class SampleNode(Node):
    """One worker. Ray calls one method at a time, always in the main thread, to which the process is tied."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = self._root

    def place(self, parcel: SampleParcel) -> None:
        """Give the files that were sent their places."""
        self._store.lay_out(parcel.files)
        (self._root / MODULES).mkdir(parents=True, exist_ok=True)

    def start(self, parcel: SampleParcel, number: int, only: Sequence[str]) -> None:
        """Sample shard `number`: the prompts with the ids `only`."""
        self._folder = self._root / f"shard-{number}"
        self._folder.mkdir()
        parcel.spec_at(self._root, only).save(self._folder / SPEC)
        with (self._folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "grpo_tasks.rollout", str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {PARENT: str(os.getpid())},
                # The user's modules are found in the working directory, as on the driver.
                cwd=self._root / MODULES,
            )

    def report(self) -> ShardReport:
        """How the process is."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return ShardReport(None)
        error, table = self._folder / ERROR, self._folder / SAMPLES
        text = error.read_text(encoding="utf-8") if code and error.exists() else ""
        size = 0 if code else table.stat().st_size
        return ShardReport(code, text, (self._folder / LOG).read_bytes(), size)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the table of the last shard."""
        with Path(self._folder / SAMPLES).open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)

"""The actors on a node: a private folder that ends with them, and the processes of a job as their children.

The processes end with the actor (processes/lifetime.py), the actor with its driver: Ray ends actors that are not detached, and a
node that has lost the head of its cluster ends all of its actors.
"""

import os
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
from ray.util import get_node_ip_address

from grpo_tasks.cluster.mirror import Delta, Mirrored, Outbox
from grpo_tasks.cluster.parcel import MODULES, NodeFiles
from grpo_tasks.cluster.versions import Versions, own_versions
from grpo_tasks.processes.child import ERROR, LOG, SPEC
from grpo_tasks.processes.lifetime import start_module
from grpo_tasks.processes.serve import free_port
from schemas.paths import resolve

JANITOR = 'exec 3<&0; (cat <&3; for attempt in 1 2 3 4 5; do sleep 1; rm -rf "$0"; done) > /dev/null 2>&1 &'
"""Removes a folder when the actor ends, whose end of the pipe the kernel closes in any case. An actor that is killed cannot do
it, and Ray kills its children, so the shell in the background is none. What dies with the actor may write for a moment."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the driver knows of a node."""

    name: str
    """Host name and address."""
    address: str
    root: Path
    """The private folder."""
    versions: Versions


@dataclass(frozen=True, slots=True)
class Job:
    """What a node runs: `python -m MODULE FOLDER`, once or several times."""

    module: str
    folder: str
    """Path relative to the private folder."""
    spec: str
    """Its spec.json, with the paths of the node."""
    mirrored: Mirrored
    environments: tuple[dict[str, str], ...] = ({},)
    """What each process has in its environment, in addition to that of the node."""


@dataclass(frozen=True, slots=True)
class Report:
    """The state of a job on a node, each time the driver asks."""

    codes: tuple[int | None, ...]
    """Exit code of each process; None while it runs, negative for a signal."""
    error: str
    """The `UserError` that one left, as JSON; empty if there is none."""
    delta: Delta


class Node(NodeFiles):
    """What the actors have in common: a private folder that ends with them, and files that the driver sends."""

    def __init__(self, address: str | None = None) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="grpo-stage-")))
        self._address = get_node_ip_address() if address is None else address
        self._janitor = subprocess.Popen(["sh", "-c", JANITOR, self.root], stdin=subprocess.PIPE, start_new_session=True)
        self._janitor.wait()

    def describe(self) -> NodeFacts:
        """Name, address, folder and versions."""
        return NodeFacts(f"{socket.gethostname()} ({self._address})", self._address, self.root, own_versions())

    def resolve(self, path: str) -> str:
        """The path on this node of a model that a specification names."""
        return resolve(path)


class JobNode(Node):
    """A node that runs one job after the other. Ray calls one method at a time, always in the main thread, to which the
    processes are tied."""

    def free_port(self) -> int:
        """A port that is free now, on all addresses of this node."""
        return free_port("")

    def start(self, job: Job) -> None:
        """Start the processes of a job, whose files were laid out."""
        self._folder = self.root / job.folder
        self._folder.mkdir(exist_ok=True)
        (self._folder / SPEC).write_text(job.spec, encoding="utf-8")
        self._outbox = Outbox(self._folder, job.mirrored)
        self._processes = [self._start_process(job.module, environment) for environment in job.environments]

    def report(self) -> Report:
        """How the processes are, and what is new. Exit codes are read first: after the last one nothing can follow."""
        codes = tuple(process.poll() for process in self._processes)
        error = self._folder / ERROR
        text = error.read_text(encoding="utf-8") if any(codes) and error.exists() else ""
        return Report(codes, text, self._outbox.collect())

    def read(self, name: str, file: str, offset: int, size: int) -> bytes:
        """Bytes of a file that the outbox holds."""
        return self._outbox.read(name, file, offset, size)

    def release(self, name: str) -> None:
        """The driver has it."""
        self._outbox.release(name)

    def append(self, name: str, line: str) -> None:
        """Append a line to a file of the job, whose processes read it."""
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def _start_process(self, module: str, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        # Processes that find each other by an address do so on the network of this one.
        found = interfaces(self._address) if "MASTER_ADDR" in environment else {}
        with (self._folder / LOG).open("ab") as log:
            # The user's modules are found in the working directory, as on the driver.
            own, cwd = os.environ | environment | found, self.root / MODULES
            return start_module(module, self._folder, output=log, environment=own, cwd=cwd)


def interfaces(address: str) -> dict[str, str]:
    """The environment variables by which gloo and NCCL use the interface of that address, unless they are set already."""
    # Where the host's own name stands for 127.0.1.1, gloo would listen there, and no other node would reach it. NCCL chooses
    # by itself, and may take a network that joins only some of the nodes.
    found = psutil.net_if_addrs().items()
    name = next((name for name, addresses in found if address in {each.address for each in addresses}), "")
    # NCCL takes a name for a prefix; after "=" only the same name counts.
    own = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}" if name else ""}
    return {variable: chosen for variable, ours in own.items() if (chosen := os.environ.get(variable) or ours)}

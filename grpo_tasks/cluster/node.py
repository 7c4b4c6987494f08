"""The actor on a node: a private stage directory, and the ranks of the stage as its child processes.

The ranks end with the actor (processes/lifetime.py), the actor with its driver: Ray ends actors that are not detached, and a node
that has lost the head of its cluster ends all of its actors.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_tasks.cluster.janitor import watch_over
from grpo_tasks.cluster.outbox import Delta, Outbox
from grpo_tasks.cluster.parcel import MODULES, NodeFiles, Parcel, ParcelFile, ServerAddress
from grpo_tasks.cluster.versions import Versions, own_versions
from grpo_tasks.judging.limits import LOCAL_RANKS
from grpo_tasks.processes.entry import ERROR
from grpo_tasks.processes.lifetime import PARENT
from grpo_tasks.stage.stage_dir import OWN_DISK, StageDir
from schemas.paths import resolve


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the driver knows of a node."""

    name: str
    """Host name and address."""
    address: str
    root: str
    """The private stage directory."""
    versions: Versions


@dataclass(frozen=True, slots=True)
class Report:
    """The state of a node, each time the driver asks."""

    codes: tuple[int | None, ...]
    """Exit code of each rank of the node; None while it runs, negative for a signal."""
    error: str
    """The `UserError` that a rank left, as JSON; empty if there is none."""
    delta: Delta


@dataclass(frozen=True, slots=True)
class Gang:
    """How the ranks of all nodes find each other."""

    address: str
    port: int
    first: int
    """Rank of the first process of this node."""
    local: int
    """Processes of this node."""
    ranks: int
    """Processes of all nodes."""


class Node:
    """What the actors of a stage have in common: a private directory that ends with them, and files that the driver sends."""

    def __init__(self, address: str) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="grpo-stage-"))
        self._janitor = watch_over(self._root)
        self._address = address
        self._store = NodeFiles(self._root)

    def describe(self) -> NodeFacts:
        """Name, address, directory and versions."""
        return NodeFacts(f"{socket.gethostname()} ({self._address})", self._address, str(self._root), own_versions())

    def missing(self, files: tuple[ParcelFile, ...]) -> set[str]:
        """Hashes of the files that the driver has to send."""
        return self._store.missing(files)

    def receive(self, file: ParcelFile, offset: int, data: bytes) -> None:
        """Store a part of a file."""
        self._store.receive(file, offset, data)


class StageNode(Node):
    """One node of a stage. Ray calls one method at a time, always in the main thread, to which the ranks are tied."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        super().__init__(address)
        self._environment, self._directory = environment, StageDir(self._root)
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._outbox = Outbox(self._directory, everything=False)

    def free_port(self) -> int:
        """A port of this node that is free now, on all its addresses."""
        with socket.socket() as found:
            found.bind(("", 0))
            return int(found.getsockname()[1])

    def start(self, parcel: Parcel, engine: str, gang: Gang, servers: Sequence[ServerAddress]) -> str:
        """Lay out the stage directory and start the ranks of this node; returns the path of the base model here."""
        self._store.unpack(parcel)
        spec = parcel.spec_at(self._root, ranks=gang.ranks, servers=servers)
        spec.save(self._directory.spec)
        self._outbox = Outbox(self._directory, everything=gang.first == 0)
        self._outbox.begin()
        self._ranks = [self._start_rank(engine, gang, local) for local in range(gang.local)]
        return resolve(spec.start.path)

    def report(self) -> Report:
        """How the ranks are, and what is new. Exit codes are read first: after the last one nothing can follow."""
        codes = tuple(rank.poll() for rank in self._ranks)
        error = self._root / ERROR
        text = error.read_text(encoding="utf-8") if any(codes) and error.exists() else ""
        return Report(codes, text, self._outbox.collect())

    def read(self, name: str, file: str, offset: int, size: int) -> bytes:
        """Bytes of a file that the outbox holds."""
        return self._outbox.read(name, file, offset, size)

    def release(self, name: str) -> None:
        """The driver has it."""
        self._outbox.release(name)

    def announce(self, server: ServerAddress) -> None:
        """Name a rollout server that joins to the ranks of this node."""
        with self._directory.servers.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"url": server.url, "weights_url": server.weights_url}) + "\n")

    def _start_rank(self, engine: str, gang: Gang, local: int) -> "subprocess.Popen[bytes]":
        environment = os.environ | self._environment | {PARENT: str(os.getpid())}
        if gang.ranks > 1:
            environment |= {
                "MASTER_ADDR": gang.address,
                "MASTER_PORT": str(gang.port),
                "WORLD_SIZE": str(gang.ranks),
                "RANK": str(gang.first + local),
                "LOCAL_RANK": str(local),
                LOCAL_RANKS: str(gang.local),
                OWN_DISK: "1",
                **interfaces(self._address),
            }
        with self._directory.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", engine, str(self._root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                # The user's modules are found in the working directory, as on the driver.
                cwd=self._root / MODULES,
            )


def interfaces(address: str) -> dict[str, str]:
    """The environment variables by which gloo and NCCL use the interface of that address, unless they are set already."""
    # Where the host's own name stands for 127.0.1.1, gloo would listen there, and no other node would reach it. NCCL chooses
    # by itself, and may take a network that joins only some of the nodes.
    name = interface_of(address)
    # NCCL takes a name for a prefix; after "=" only the same name counts.
    found = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}" if name else ""}
    return {variable: chosen for variable, own in found.items() if (chosen := os.environ.get(variable) or own)}


def interface_of(address: str) -> str:
    """The network interface of this machine with an address, empty if there is none."""
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if address in {each.address for each in addresses}), "")

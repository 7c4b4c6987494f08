"""A job on nodes: on each an actor with a private folder and the processes of the job as its children, watched by the driver.

The processes end with the actor (processes/lifetime.py), the actor with its driver: Ray ends actors that are not detached, and a
node that has lost the head of its cluster ends all of its actors. Ray's own restarts are not used: who has work for the nodes
decides what is done again, and from where.
"""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_tasks.cluster.connect import Versions, own_versions, require_equal
from grpo_tasks.cluster.mirror import CHUNK_BYTES, Delta, Inbox, Mirrored, Outbox
from grpo_tasks.cluster.parcel import MODULES, NodeFiles, ParcelFile
from grpo_tasks.cluster.placement import Share
from grpo_tasks.processes.child import DISK_FULL, ERROR, LOG, SPEC
from grpo_tasks.processes.lifetime import start_module
from grpo_tasks.processes.serve import free_port
from schemas.errors import ClusterError, DiskFullError, UserError, disk_full
from schemas.paths import resolve

JANITOR = 'exec 3<&0; (cat <&3; for attempt in 1 2 3 4 5; do sleep 1; rm -rf "$0"; done) > /dev/null 2>&1 &'
"""Removes a folder when the actor ends, whose end of the pipe the kernel closes in any case. An actor that is killed cannot do
it, and Ray kills its children, so the shell in the background is none. What dies with the actor may write for a moment."""
ANSWER_S = 60.0
"""A node that does not answer within so many seconds is lost. Ray notices most deaths at once."""
START_S = 300.0
SETTLING_S = 3.0
"""When a process ends badly, a node that died is often the reason. Ray may need so long to notice it."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Host name with address, address, private folder and versions of a node."""

    name: str
    address: str
    root: Path
    versions: Versions


@dataclass(frozen=True, slots=True)
class Job:
    """What a node runs: `python -m MODULE FOLDER`, once or several times."""

    module: str
    folder: str
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
    """An actor with a private folder that ends with it, for files that the driver sends."""

    def __init__(self, address: str | None = None) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="grpo-stage-")))
        self._address = get_node_ip_address() if address is None else address
        self._janitor = subprocess.Popen(["sh", "-c", JANITOR, self.root], stdin=subprocess.PIPE, start_new_session=True)
        self._janitor.wait()

    def describe(self) -> NodeFacts:
        """What the driver has to know."""
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
        self._processes = []
        for environment in job.environments:
            # Processes that find each other by an address do so on the network of this one.
            found = interfaces(self._address) if "MASTER_ADDR" in environment else {}
            with (self._folder / LOG).open("ab") as log:
                # The user's modules are found in the working directory, as on the driver.
                own, cwd = os.environ | environment | found, self.root / MODULES
                self._processes.append(start_module(job.module, self._folder, output=log, environment=own, cwd=cwd))

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


def interfaces(address: str) -> dict[str, str]:
    """The variables by which gloo and NCCL use the interface of that address, unless they are set already."""
    # Where the host's own name stands for 127.0.1.1, gloo would listen there, and no other node would reach it. NCCL chooses
    # by itself, and may take a network that joins only some of the nodes.
    found = psutil.net_if_addrs().items()
    name = next((name for name, addresses in found if address in {each.address for each in addresses}), "")
    # NCCL takes a name for a prefix; after "=" only the same name counts.
    own = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}" if name else ""}
    return {variable: chosen for variable, ours in own.items() if (chosen := os.environ.get(variable) or ours)}


class NodeLost(Exception):  # noqa: N818 - it names what happened
    """A node, an actor or a process died without an error of ours."""


def answer(ref: Any, name: str, patience_s: float = ANSWER_S) -> Any:
    """The answer of a node. Raises NodeLost, the UserError that it raised, or one that its disk is full; ClusterError where its
    actor cannot start, which another attempt would not change.
    """
    try:
        return ray.get(ref, timeout=patience_s)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        if disk_full(error):
            raise _full_disk(name) from error
        raise
    except RayError as error:
        lines = str(error).strip().splitlines() or [""]
        if not isinstance(error, RayActorError) or not error.actor_init_failed:
            raise NodeLost(f"{name} is lost ({type(error).__name__}: {lines[0]})") from error
        raise ClusterError(
            f"{name} cannot run our code: {lines[-1]}",
            place="resources.cluster",
            fix="install this project there with the same versions and restart Ray; `grpo cluster` compares all nodes",
        ) from error


def _full_disk(name: str) -> DiskFullError:
    fix = "free some space there, then run the same command again: it continues from the last checkpoint"
    return DiskFullError(f"the disk of {name} is full", place=name, fix=fix)


@dataclass(frozen=True, slots=True)
class Member:
    """An actor and its node."""

    actor: Any
    facts: NodeFacts

    def ask(self, method: str, *arguments: Any, patience_s: float = ANSWER_S) -> Any:
        """What a method of the actor returns; raises as `answer`."""
        return answer(getattr(self.actor, method).remote(*arguments), self.facts.name, patience_s)


def ask_each(members: Sequence[Member], method: str, *arguments: Any, patience_s: float = ANSWER_S) -> list[Any]:
    """The answers of all members, who are asked at once."""
    asked = [getattr(member.actor, method).remote(*arguments) for member in members]
    return [answer(ref, member.facts.name, patience_s) for ref, member in zip(asked, members, strict=True)]


def start_actor(kind: type[Node], group: PlacementGroup, index: int, share: Share, *arguments: Any) -> Any:
    """An actor on what bundle `index` of a group has reserved."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    options = {"num_cpus": share.cpus, "num_gpus": share.gpus, "max_restarts": 0, "scheduling_strategy": strategy}
    return ray.remote(kind).options(**options).remote(*arguments)


def join(actors: Sequence[Any], names: Sequence[str], files: Sequence[ParcelFile], patience_s: float = START_S) -> list[Member]:
    """Wait for actors, compare their versions with those of this machine, and send the files; `names` are for errors."""
    asked = [actor.describe.remote() for actor in actors]
    described = [answer(ref, name, patience_s) for ref, name in zip(asked, names, strict=True)]
    members = [Member(actor, facts) for actor, facts in zip(actors, described, strict=True)]
    require_equal((member.facts.name, member.facts.versions) for member in members)
    missing = list(zip(members, ask_each(members, "missing", files, patience_s=START_S), strict=True))
    for file in {file.key: file for file in files}.values():
        receivers = [member for member, keys in missing if file.key in keys]
        if not receivers:
            continue
        with file.source.open("rb") as stream:
            for offset in range(0, max(1, file.size), CHUNK_BYTES):
                # One copy in the object store serves all of them.
                ask_each(receivers, "receive", file, offset, ray.put(stream.read(CHUNK_BYTES)), patience_s=START_S)
    ask_each(members, "lay_out", files, patience_s=START_S)
    return members


@contextmanager
def job_nodes(group: PlacementGroup, share: Share, files: Sequence[ParcelFile]) -> Iterator[list[Member]]:
    """A node with these files on each bundle of a group. They end with the block, with their processes and private folders."""
    actors = [start_actor(JobNode, group, index, share) for index in range(group.bundle_count)]
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    places = placement_group_table(group)["bundles_to_node_id"]
    try:
        yield join(actors, [addresses.get(places[index], "") for index in range(group.bundle_count)], files)
    finally:
        for actor in actors:
            ray.kill(actor)


class RunningJob:
    """What some nodes run, which can go on only together. The inbox gets what they write; errors name the folder `here`."""

    def __init__(self, members: Sequence[Member], jobs: Sequence[Job], inbox: Inbox, here: str) -> None:
        self.members, self._inbox, self._here = members, inbox, here
        asked = [member.actor.start.remote(job) for member, job in zip(members, jobs, strict=True)]
        for member, ref in zip(members, asked, strict=True):
            answer(ref, member.facts.name, START_S)

    def poll(self) -> bool:
        """Ask every node once and store what is new; True when all processes have ended and everything is here.

        `NodeLost` where a node or a process died, and the `UserError` that a process left.
        """
        reports = self._reports()
        if any(code for report in reports for code in report.codes):
            time.sleep(SETTLING_S)
            # Raises NodeLost with the name of the node if that was the reason; fetches the rest of the log.
            raise self._failure(self._reports())
        return all(code == 0 for report in reports for code in report.codes) and all(each.delta.is_empty for each in reports)

    def _reports(self) -> list[Report]:
        reports = ask_each(self.members, "report")
        for member, report in zip(self.members, reports, strict=True):
            self._inbox.apply(report.delta, partial(member.ask, "read"), partial(member.ask, "release"))
        return reports

    def _failure(self, reports: Sequence[Report]) -> Exception:
        ended: list[tuple[int, str]] = []
        for member, report in zip(self.members, reports, strict=True):
            name = member.facts.name
            if report.error:
                return UserError.from_json(report.error.replace(str(member.facts.root), self._here))
            if DISK_FULL in report.codes:
                return _full_disk(name)
            ended += [(code, f"process {number} on {name}") for number, code in enumerate(report.codes) if code]
        # A signal, which is negative, is a cause; the exit codes of the others are often its consequence.
        code, what = min(ended)
        return NodeLost(f"{what} " + (f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"))

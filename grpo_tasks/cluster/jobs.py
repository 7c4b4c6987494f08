"""A job on nodes, as the driver sees it: actors are started, files sent, processes started, what they write is collected.

    job_nodes (actors started, versions compared, files sent) -> RunningJob.poll until all processes have ended, or NodeLost

Ray's own restarts are not used: who has work for the nodes decides what is done again, and from where.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_tasks.cluster.mirror import CHUNK_BYTES, Inbox
from grpo_tasks.cluster.node import Job, JobNode, Node, NodeFacts, Report
from grpo_tasks.cluster.parcel import ParcelFile
from grpo_tasks.cluster.placement import Share
from grpo_tasks.cluster.versions import require_equal
from grpo_tasks.processes.child import DISK_FULL
from schemas.errors import ClusterError, DiskFullError, UserError, disk_full

ANSWER_S = 60.0
"""A node that does not answer within so many seconds is lost. Ray notices most deaths at once."""
START_S = 300.0
"""Longest wait for the actors to start."""
SETTLING_S = 3.0
"""When a process ends badly, a node that died is often the reason. Ray may need so long to notice it."""


class NodeLost(Exception):  # noqa: N818 - it names what happened
    """A node, an actor or a process died without an error of ours."""


def answer(ref: Any, name: str, patience_s: float = ANSWER_S) -> Any:
    """The answer of a node.

    Raises:
        NodeLost: it is gone, or does not answer in time.
        UserError: the one that it raised, or its disk is full.
        ClusterError: its actor cannot start there; another attempt would end in the same way.
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
        """What a method of the actor returns; errors as in `answer`."""
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
    """Wait for actors, compare their versions with those of this machine, and send the files to them.

    `names` are used in errors until the actors say their own.
    """
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
    """A job on some nodes, which can go on only together.

    Args:
        members: the nodes.
        jobs: what each of them runs.
        inbox: where the driver puts what they write.
        here: what errors name instead of the private folder of a node.
    """

    def __init__(self, members: Sequence[Member], jobs: Sequence[Job], inbox: Inbox, here: str) -> None:
        self.members, self._inbox, self._here = members, inbox, here
        asked = [member.actor.start.remote(job) for member, job in zip(members, jobs, strict=True)]
        for member, ref in zip(members, asked, strict=True):
            answer(ref, member.facts.name, START_S)

    def poll(self) -> bool:
        """Ask every node once and store what is new; True when all processes have ended and everything is here.

        Raises:
            NodeLost: a node or a process died.
            UserError: one that a process left.
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

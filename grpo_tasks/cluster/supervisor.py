"""Trains a stage on the nodes of a cluster: reserves, sends, starts, collects, and starts again when something dies.

    reserve nodes and room for rollout servers, all of it or nothing -> start the servers
    attempt: compare versions -> send the stage -> start the ranks -> collect until all ranks ended
    a node, an actor or a rank dies: end the attempt, report it as an event of the stage, reserve nodes again, attempt again

Ray's own restarts are not used: the ranks of a stage can only go on together, from a checkpoint that all of them read.
"""

import random
import time
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_tasks.cluster.inbox import Inbox
from grpo_tasks.cluster.messages import START_S, Member, NodeLost, ask, full_disk, send
from grpo_tasks.cluster.node import Gang, Report, StageNode
from grpo_tasks.cluster.parcel import Parcel, ServerAddress, pack
from grpo_tasks.cluster.placement import Crowded, Demand, Share, reserved
from grpo_tasks.cluster.servers import ClusterServers, rollout_servers
from grpo_tasks.cluster.versions import require_equal
from grpo_tasks.processes.entry import DISK_FULL
from grpo_tasks.stage.journal import Events, Journal
from grpo_tasks.stage.run import package_of
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import TrainingError, UserError

POLL_S = 0.25
PAUSE_S = (2.0, 20.0)
"""Bounds of the pause before a stage that was too late for a part of what it needs tries again."""
SETTLING_S = 3.0
"""When a rank ends badly, a node that died is often the reason. Ray may need so long to notice it."""


class StageSupervisor:
    """Trains the stage of a stage directory on the cluster that this process has joined."""

    def __init__(self, directory: StageDir, spec: StageSpec) -> None:
        self.dir, self.spec = directory, spec
        self.cluster = spec.resources.cluster
        self.name = f"grpo {directory.root.parent.parent.name} {spec.stage.name}"
        self.restarts = 0
        self._wait_report = partial(self._report, "cluster")

    def train(self) -> None:
        """Attempt until the stage is finished.

        Raises:
            UserError: one that a rank left, nodes that differ, or a cluster that is too small.
            TrainingError: more nodes or processes died than `max_restarts` allows.
        """
        while True:
            try:
                self._train()
                return
            except Crowded as crowded:
                self._wait_report(f"{crowded}; releases what it has, and tries again")
                # Not all that are after the same nodes come back at once.
                time.sleep(random.uniform(*PAUSE_S))

    def _train(self) -> None:
        """Train with nodes and servers that are reserved together; the servers stay while nodes are replaced."""
        demand = Demand.of_stage(self.spec.resources, self.spec.rollout)
        with ExitStack() as nodes:
            group, found = nodes.enter_context(self._reserved(demand))
            with rollout_servers(self.spec, self.dir, self.name, self._wait_report) as servers:
                while not self._attempt(group, found, demand.share, servers):
                    nodes.close()
                    group, found = nodes.enter_context(self._reserved(demand, holds_servers=servers is not None))

    def _reserved(self, demand: Demand, *, holds_servers: bool = False) -> AbstractContextManager[tuple[PlacementGroup, int]]:
        wait_s, fewer = self.cluster.replacement_wait_s, self.restarts > 0
        return reserved(self.name, demand, report=self._wait_report, wait_s=wait_s, fewer=fewer, holds_servers=holds_servers)

    def _attempt(self, group: PlacementGroup, nodes: int, share: Share, servers: ClusterServers | None) -> bool:
        """Train on these nodes; False if something died."""
        attempt = Attempt(self.dir, self.spec, group, nodes, share, servers)
        try:
            attempt.run()
            return True
        except NodeLost as lost:
            self.restarts += 1
            self._report("node_lost", f"{lost}; restart {self.restarts} of {self.cluster.max_restarts}")
            if self.restarts > self.cluster.max_restarts:
                raise TrainingError(
                    f"the stage was interrupted {self.restarts} times, the last time because {lost}",
                    place=str(self.dir.log),
                    fix="see the end of the log and `grpo cluster`; the same command resumes from the last checkpoint; "
                    "resources.cluster.max_restarts allows more interruptions",
                ) from lost
            return False
        finally:
            attempt.end()

    def _report(self, event: str, detail: str) -> None:
        """An event of the stage: the step shows it in the log and in Prefect and sends it to MLflow."""
        Events(self.dir.events).append(Journal(self.dir.journal).last_step, event, detail)


class Attempt:
    """The stage on one set of nodes, until it ends or one of them dies."""

    def __init__(
        self,
        directory: StageDir,
        spec: StageSpec,
        group: PlacementGroup,
        nodes: int,
        share: Share,
        servers: ClusterServers | None,
    ) -> None:
        self.dir, self.spec, self.servers = directory, spec, servers
        self.local = spec.resources.cluster.processes_per_node
        self.addresses = [_address(group, index) for index in range(nodes)]
        self.actors: list[Any] = [
            ray.remote(StageNode)
            .options(
                num_cpus=share.cpus,
                num_gpus=share.gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            )
            .remote(address, {} if servers is None else servers.environment)
            for index, address in enumerate(self.addresses)
        ]

    def run(self) -> None:
        """Train to the end.

        Raises:
            NodeLost: something died.
            UserError: one that a rank left, or nodes that differ.
        """
        asked = [actor.describe.remote() for actor in self.actors]
        described = [ask(ref, address, START_S) for ref, address in zip(asked, self.addresses, strict=True)]
        members = [Member(actor, facts) for actor, facts in zip(self.actors, described, strict=True)]
        require_equal((member.facts.name, member.facts.versions) for member in members)
        # Opening both cuts off an incomplete last line that a killed driver left.
        Journal(self.dir.journal), Events(self.dir.events)
        parcel = pack(self.spec, self.dir)
        send(parcel.files, members)
        inbox = Inbox(self.dir, self.spec, self._start(parcel, members))
        inbox.clear()
        while not self._collect(inbox, members):
            if self.servers is not None:
                self.servers.tend(partial(self._announce, members))
            time.sleep(POLL_S)

    def end(self) -> None:
        """End the actors, with their ranks and their private directories."""
        for actor in self.actors:
            ray.kill(actor)

    def _start(self, parcel: Parcel, members: list[Member]) -> str:
        """Start all ranks; the path of the base model on the node of rank 0."""
        first = members[0]
        port = ask(first.actor.free_port.remote(), first.facts.name)
        ranks = self.local * len(members)
        gangs = [Gang(first.facts.address, port, index * self.local, self.local, ranks) for index in range(len(members))]
        engine = package_of(self.spec.stage)
        # Ranks that are given no server would start some of their own.
        servers = () if self.servers is None else tuple(self.servers.wait_for_one())
        started = [member.actor.start.remote(parcel, engine, gang, servers) for member, gang in zip(members, gangs, strict=True)]
        bases = [ask(each, member.facts.name, START_S) for each, member in zip(started, members, strict=True)]
        return str(bases[0])

    def _announce(self, members: list[Member], server: ServerAddress) -> None:
        for member in members:
            ask(member.actor.announce.remote(server), member.facts.name)

    def _collect(self, inbox: Inbox, members: list[Member]) -> bool:
        """Ask every node once and store what is new; True when the stage is finished."""
        reports = self._reports(inbox, members)
        if any(code for report in reports for code in report.codes):
            time.sleep(SETTLING_S)
            # Raises NodeLost with the name of the node if that was the reason; fetches the rest of the log.
            reports = self._reports(inbox, members)
            raise self._failure(reports, members)
        if any(code is None for report in reports for code in report.codes):
            return False
        while not all(report.delta.is_empty for report in reports):
            reports = self._reports(inbox, members)
        if not self.dir.result.exists():
            raise NodeLost("all ranks ended, but the result did not arrive")
        return True

    def _reports(self, inbox: Inbox, members: list[Member]) -> list[Report]:
        asked = [(member, member.actor.report.remote()) for member in members]
        reports = [ask(ref, member.facts.name) for member, ref in asked]
        for member, report in zip(members, reports, strict=True):
            name, actor = member.facts.name, member.actor

            def read(*args: Any, name: str = name, actor: Any = actor) -> bytes:
                return bytes(ask(actor.read.remote(*args), name))

            def release(held: str, name: str = name, actor: Any = actor) -> None:
                ask(actor.release.remote(held), name)

            inbox.apply(report.delta, read, release)
        return reports

    def _failure(self, reports: list[Report], members: list[Member]) -> Exception:
        for member, report in zip(members, reports, strict=True):
            if report.error:
                return UserError.from_json(report.error.replace(member.facts.root, str(self.dir.root)))
            if DISK_FULL in report.codes:
                return full_disk(member.facts.name)
        bad = [
            f"rank {index * self.local + local} on {member.facts.name} {_how(code)}"
            for index, (member, report) in enumerate(zip(members, reports, strict=True))
            for local, code in enumerate(report.codes)
            if code
        ]
        # A signal is a cause; the exit codes of the others are often its consequence.
        return NodeLost(next((each for each in bad if "signal" in each), bad[0]))


def _how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _address(group: PlacementGroup, index: int) -> str:
    node = ray.util.placement_group_table(group)["bundles_to_node_id"][index]
    return next((str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node), "")

"""Reserves what a stage needs: all of it or nothing, and says what it waits for.

nodes alone           one Ray placement group, which holds nothing while it waits
nodes and servers     two of them. Nothing is requested before both have room. If another run is faster, Crowded: the stage
                      releases what it has and tries again, so no two runs wait for what the other one holds
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self
from uuid import uuid4

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig, VllmConfig
from schemas.errors import ClusterError

POLL_S = 2.0
REPEAT_S = 60.0
"""Seconds between two reports of a run that waits."""
HOLD_S = 10.0
"""Longest wait for servers while nodes are held. They had room when the nodes were requested."""
JOIN_S = 900.0
"""A cluster that is too small may grow for so many seconds; then the run is refused."""
NODE_ID = "ray.io/node-id"
"""Label that Ray gives each node: its id."""
_ROUNDING = 1e-6


class Crowded(Exception):  # noqa: N818 - it names what happened
    """A part of what a stage needs is reserved, and the rest is not to be had: all of it has to be released."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a node, a process or a server has to reserve."""

    cpus: float
    gpus: int

    @classmethod
    def of(cls, resources: ResourcesConfig, processes: int | None = None) -> Self:
        """The resources of so many processes; None: of all processes of one node."""
        cluster = resources.cluster
        count = cluster.processes_per_node if processes is None else processes
        gpus = cluster.gpus_per_process
        if gpus is None:
            has_gpus = any(machine.get("GPU", 0) for machine in _machines().values())
            gpus = int(has_gpus and resources.device != "cpu")
        return cls(cluster.cpus_per_process * count, gpus * count)

    @classmethod
    def of_server(cls, resources: ResourcesConfig, vllm: VllmConfig) -> Self:
        """The resources of one rollout server."""
        gpus = vllm.tensor_parallel_size if cls.of(resources).gpus else 0
        return cls(resources.cluster.cpus_per_process, gpus)

    @property
    def bundle(self) -> dict[str, float]:
        """The same for Ray."""
        return {"CPU": self.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def times_in(self, machine: Mapping[str, float]) -> int:
        """How often a machine has it."""
        return min(int((machine.get(name, 0.0) + _ROUNDING) / amount) for name, amount in self.bundle.items())

    def __str__(self) -> str:
        gpus = f" and {self.gpus} GPU" if self.gpus else ""
        return f"{self.cpus:g} CPU{gpus}"


@dataclass(frozen=True, slots=True)
class Demand:
    """Everything that a stage or an evaluation reserves."""

    count: int
    """Nodes of a stage, or processes of an evaluation."""
    share: Share
    """Of each of them."""
    strategy: str
    """Of Ray: STRICT_SPREAD wants a machine for each, the others prefer many machines or few."""
    servers: int = 0
    server: Share = Share(1.0, 0)
    """What each rollout server reserves, on any machine."""
    each: str = "nodes"

    @classmethod
    def of_stage(cls, resources: ResourcesConfig, rollout: RolloutConfig) -> Self:
        """The nodes of a stage, and its rollout servers unless somebody else runs them."""
        cluster, vllm = resources.cluster, rollout.vllm
        servers = vllm.replicas if rollout.engine == "vllm" and not vllm.base_urls else 0
        server = Share.of_server(resources, vllm)
        return cls(cluster.num_nodes, Share.of(resources), cluster.placement, servers, server)

    @classmethod
    def of_processes(cls, resources: ResourcesConfig, count: int) -> Self:
        """Processes that know nothing of each other, wherever there is room."""
        strategy = "PACK" if resources.cluster.placement == "PACK" else "SPREAD"
        return cls(count, Share.of(resources, 1), strategy, each="processes")

    @property
    def is_gang(self) -> bool:
        """Whether all of them have to run at once, as those of a stage do."""
        return self.each == "nodes"

    def arranged(self, machines: Mapping[str, Mapping[str, float]]) -> tuple[str, ...] | None:
        """The machine of each node, such that the servers have room too; None if not all of it fits.

        Args:
            machines: what each has, by its id.
        """
        # best[n]: of the ways to place n nodes on the machines seen so far, the one that leaves room for the most servers.
        best: list[_Placed | None] = [_Placed(0, ()), *[None] * self.count]
        for name, machine in machines.items():
            most = min(self.share.times_in(machine), 1 if self.strategy == "STRICT_SPREAD" else self.count)
            room = [self._servers_next_to(machine, nodes) for nodes in range(most + 1)]
            # Downwards, so that best[total - here] does not count this machine yet.
            for total in range(self.count, -1, -1):
                ways = [
                    _Placed(min(self.servers, before.servers + room[here]), (*before.machines, *[name] * here))
                    for here in range(min(most, total) + 1)
                    if (before := best[total - here]) is not None
                ]
                best[total] = max(ways, key=_Placed.merit, default=None)
        found = best[self.count]
        return None if found is None or found.servers < self.servers else found.machines

    def _servers_next_to(self, machine: Mapping[str, float], nodes: int) -> int:
        """How many servers a machine holds in addition to so many nodes."""
        left = {name: amount - nodes * self.share.bundle.get(name, 0.0) for name, amount in machine.items()}
        return min(self.servers, self.server.times_in(left))

    def __str__(self) -> str:
        servers = f" and {self.servers} rollout servers with {self.server} each" if self.servers else ""
        return f"{self.count} {self.each} with {self.share} each{servers}"


@dataclass(frozen=True, slots=True)
class _Placed:
    """A way to place some nodes."""

    servers: int
    """Servers that have room next to them."""
    machines: tuple[str, ...]
    """One for each node."""

    def merit(self) -> tuple[int, int]:
        """What makes it better than another one: more servers, then fewer machines."""
        return self.servers, -len(set(self.machines))


@contextmanager
def reserved(
    name: str, demand: Demand, *, report: Callable[[str], None], wait_s: float, fewer: bool, holds_servers: bool = False
) -> Iterator[tuple[PlacementGroup, int]]:
    """Reserve nodes or processes while the block runs; the group and their number in it.

    Args:
        name: shown by `grpo cluster`.
        demand: what is reserved. Its servers are not, but nothing is before they have room too.
        report: told what the run waits for.
        wait_s: seconds after which fewer will do, down to one, if `fewer`. Processes of an evaluation may always be fewer when
            the cluster as a whole cannot hold them for so long.
        fewer: something has died, so fewer will do even if the cluster is only busy.
        holds_servers: the stage has its servers already.

    Raises:
        Crowded: with `holds_servers`, not even one was to be had within `wait_s`.
        ClusterError: the cluster as a whole has been too small for JOIN_S or `wait_s`, whichever is longer.
    """
    wait = _Wait(name, demand, report, wait_s, fewer, holds_servers)
    try:
        while not wait.is_over():
            pass
        assert wait.group is not None
        yield wait.group, wait.demand.count
    finally:
        wait.release()


class _Wait:
    """The wait of `reserved`; see there for the arguments."""

    def __init__(
        self, name: str, demand: Demand, report: Callable[[str], None], wait_s: float, fewer: bool, holds_servers: bool
    ) -> None:
        self.demand = demand
        self.group: PlacementGroup | None = None
        self._name, self._report, self._wait_s = name, report, wait_s
        self._fewer, self._holds_servers = fewer, holds_servers
        self._began = self._fitted = time.monotonic()
        self._reported = -REPEAT_S

    def is_over(self) -> bool:
        """Look at the cluster once; True when everything is reserved."""
        demand = self.demand
        if demand.servers and not self._holds_servers:
            # Each node on the machine that leaves room for the servers.
            machines = demand.arranged(_free())
            if machines is None:
                time.sleep(POLL_S)
            else:
                self._request([{NODE_ID: machine} for machine in machines])
                if self._is_reserved(HOLD_S):
                    return True
                self.release()
        else:
            if self.group is None:
                self._request(None)
            if self._is_reserved(POLL_S):
                return True
        self._consider(time.monotonic())
        return False

    def release(self) -> None:
        """Release what is reserved or requested."""
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None

    def _request(self, places: list[dict[str, str]] | None) -> None:
        bundles = [self.demand.share.bundle] * self.demand.count
        self.group = _group(self._name, bundles, self.demand.strategy, places)

    def _is_reserved(self, patience_s: float) -> bool:
        assert self.group is not None
        return bool(self.group.wait(timeout_seconds=patience_s))

    def _consider(self, now: float) -> None:
        """Whether to wait further, for what, and what to say about it."""
        demand = self.demand
        if fits := demand.arranged(_machines()) is not None:
            self._fitted = now
        missing = replace(demand, servers=0) if self._holds_servers else demand
        may_be_fewer = self._fewer or not demand.is_gang
        if may_be_fewer and now - (self._began if self._fewer else self._fitted) >= self._wait_s:
            if demand.count > 1:
                self.release()
                self.demand = replace(demand, count=demand.count - 1)
                self._report(f"no {missing} within {self._wait_s:g} s: continues with {self.demand.count}")
                return
            if self._holds_servers:
                raise Crowded(f"no {missing} within {self._wait_s:g} s")
        if now - self._fitted >= max(JOIN_S, self._wait_s):
            raise _too_large(demand)
        if now - self._reported >= REPEAT_S:
            self._reported = now
            too_much = "" if fits else ", which is more than the whole cluster has"
            self._report(f"waits for {missing}{too_much}; {describe_nodes()}")


def _too_large(demand: Demand) -> ClusterError:
    return ClusterError(
        f"the cluster cannot hold {demand}: {describe_nodes()}",
        place="resources.cluster",
        fix="lower num_nodes, processes_per_node, cpus_per_process, rollout.vllm.replicas or tensor_parallel_size, or add nodes; "
        "`grpo cluster` shows what there is. A higher replacement_wait_s waits longer for nodes that join",
    )


@contextmanager
def reserved_servers(name: str, share: Share, count: int, *, report: Callable[[str], None]) -> Iterator[PlacementGroup]:
    """Reserve room for rollout servers while the block runs, on different nodes where there are enough.

    Args:
        name: shown by `grpo cluster`.
        share: what each server reserves.
        count: how many servers.
        report: told what the run waits for.

    Raises:
        Crowded: another run was faster. The nodes of the stage are held meanwhile, so this does not wait for it.
    """
    group = _group(name, [share.bundle] * count, "SPREAD")
    try:
        if not group.wait(timeout_seconds=HOLD_S):
            report(f"no room for {count} rollout servers with {share} each; {describe_nodes()}")
            raise Crowded(f"no {count} rollout servers with {share} each within {HOLD_S:g} s")
        yield group
    finally:
        remove_placement_group(group)


def _group(
    name: str, bundles: list[dict[str, float]], strategy: str, places: list[dict[str, str]] | None = None
) -> PlacementGroup:
    """Request a group. Ray refuses a name that another one has, and two runs may have the same config and stage."""
    return placement_group(bundles, strategy=strategy, name=f"{name} #{uuid4().hex[:6]}", bundle_label_selector=places)


def describe_nodes() -> str:
    """What is free on each node, and who holds the rest."""
    free = ray._private.state.available_resources_per_node()
    nodes = [
        f"{node['NodeManagerAddress']} has {_amount(free, node, 'CPU')} CPU, {_amount(free, node, 'GPU')} GPU free"
        for node in ray.nodes()
        if node["Alive"]
    ]
    holders = sorted({group["name"] for group in groups() if group["state"] == "CREATED"})
    return "; ".join(nodes) + (f"; held by {', '.join(holders)}" if holders else "")


def groups() -> list[dict[str, Any]]:
    """All reservations of the cluster that are not removed."""
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def _machines() -> dict[str, dict[str, float]]:
    """Everything that each node has, by its id."""
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _free() -> dict[str, dict[str, float]]:
    """What is free on each node, by its id."""
    return dict(ray._private.state.available_resources_per_node())


def _amount(free: dict[str, Any], node: dict[str, Any], what: str) -> str:
    return f"{free.get(node['NodeID'], {}).get(what, 0):g} of {node['Resources'].get(what, 0):g}"

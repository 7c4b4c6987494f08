"""Reserves what a stage needs: all of it or nothing, and says what it waits for.

Nodes alone are one Ray placement group, which holds nothing while it waits. With servers there are two, because the servers stay
while nodes are replaced: nothing is requested before both have room, and if another run is faster both are released.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self
from uuid import uuid4

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig, VllmConfig
from schemas.errors import ClusterError

POLL_S = 2.0
REPEAT_S = 60.0
HOLD_S = 10.0
"""Longest wait for nodes and for servers, which had room when they were requested."""
PAUSE_S = (2.0, 20.0)
"""Bounds of the pause before a run that was too late for a part of what it needs tries again."""
JOIN_S = 900.0
"""A cluster that is too small may grow for so many seconds; then the run is refused."""
NODE_ID = "ray.io/node-id"
"""Label that Ray gives each node: its id."""
_ROUNDING = 1e-6


class ReservationConflict(Exception):  # noqa: N818 - it names what happened
    """The servers of a stage are reserved, and no node is to be had: all of it has to be released."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a node, a process or a server has to reserve."""

    cpus: float
    gpus: int

    @classmethod
    def of(cls, resources: ResourcesConfig, processes: int) -> Self:
        """For so many processes."""
        gpus = resources.cluster.gpus_per_process
        if gpus is None:
            has_gpus = any(machine.get("GPU", 0) for machine in _machines().values())
            gpus = int(has_gpus and resources.device != "cpu")
        return cls(resources.cluster.cpus_per_process * processes, gpus * processes)

    @classmethod
    def of_server(cls, resources: ResourcesConfig, vllm: VllmConfig) -> Self:
        """For a rollout server."""
        return cls(resources.cluster.cpus_per_process, vllm.tensor_parallel_size if cls.of(resources, 1).gpus else 0)

    @property
    def bundle(self) -> dict[str, float]:
        """In Ray's words."""
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
    strategy: str
    """Of Ray: STRICT_SPREAD wants a machine for each, the others prefer many machines or few."""
    servers: int = 0
    server: Share = Share(1.0, 0)
    """What each rollout server reserves, on any machine."""
    each: Literal["nodes", "processes"] = "nodes"
    """Nodes have to run at once; processes start with as many as there is room for."""

    @classmethod
    def of_stage(cls, resources: ResourcesConfig, rollout: RolloutConfig) -> Self:
        """The nodes of a stage, and its rollout servers unless somebody else runs them."""
        cluster, vllm = resources.cluster, rollout.vllm
        servers = vllm.replicas if rollout.engine == "vllm" and not vllm.base_urls else 0
        share, server = Share.of(resources, cluster.processes_per_node), Share.of_server(resources, vllm)
        return cls(cluster.num_nodes, share, cluster.placement, servers, server)

    @classmethod
    def of_processes(cls, resources: ResourcesConfig, rollout: RolloutConfig, count: int) -> Self:
        """Processes that know nothing of each other, wherever there is room. With vLLM each starts a server."""
        strategy = "PACK" if resources.cluster.placement == "PACK" else "SPREAD"
        share = Share.of_server(resources, rollout.vllm) if rollout.engine == "vllm" else Share.of(resources, 1)
        return cls(count, share, strategy, each="processes")

    def arranged(self, machines: Mapping[str, Mapping[str, float]]) -> tuple[str, ...] | None:
        """The machine of each node, such that the servers have room too; None if not all of it fits on machines with so much."""
        # best[n]: of the ways to place n nodes on the machines seen so far, one with room for the most servers (at most as many
        # as are wanted), and of these one on the fewest machines: (servers, -machines, the machine of each node).
        best: dict[int, tuple[int, int, tuple[str, ...]]] = {0: (0, 0, ())}
        for name, machine in machines.items():
            most = min(self.share.times_in(machine), 1 if self.strategy == "STRICT_SPREAD" else self.count)
            ways = defaultdict(list)
            for placed, (servers, used, chosen) in best.items():
                for here in range(min(most, self.count - placed) + 1):
                    left = {what: amount - here * self.share.bundle.get(what, 0.0) for what, amount in machine.items()}
                    room = min(self.servers, servers + self.server.times_in(left))
                    ways[placed + here].append((room, used - bool(here), (*chosen, *[name] * here)))
            best = {placed: max(found) for placed, found in ways.items()}
        found = best.get(self.count)
        return None if found is None or found[0] < self.servers else found[2]

    def __str__(self) -> str:
        servers = f" and {self.servers} rollout servers with {self.server} each" if self.servers else ""
        return f"{self.count} {self.each} with {self.share} each{servers}"


class Reservation:
    """What a stage or an evaluation has reserved. `grpo cluster` shows its name, and `report` hears what it waits for."""

    def __init__(self, name: str, demand: Demand, report: Callable[[str], None], wait_s: float) -> None:
        self.name, self.demand = name, demand
        self.nodes: PlacementGroup | None = None
        self.servers: PlacementGroup | None = None
        self._report, self._wait_s = report, wait_s

    def reserve(self, *, fewer: bool = False) -> PlacementGroup:
        """Wait for the nodes or processes, and for the servers unless they are reserved already; the group of the former.

        After `wait_s` seconds fewer will do, down to one: with `fewer`, because something has died, even if the cluster is only
        busy; for processes of an evaluation when the cluster as a whole cannot hold them for so long. `ReservationConflict` where
        the servers are reserved and not even one node was to be had, `ClusterError` where the cluster as a whole has been too
        small for JOIN_S or `wait_s`, whichever is longer.
        """
        self._release_nodes()
        demand, began = self.demand, time.monotonic()
        fitted, reported = began, -REPEAT_S
        while not (reserved := self._reserve(demand)):
            now = time.monotonic()
            fits = demand.arranged(_machines()) is not None
            fitted = now if fits else fitted
            missing = demand if self.servers is None else replace(demand, servers=0)
            if (fewer or demand.each == "processes") and now - (began if fewer else fitted) >= self._wait_s:
                if demand.count > 1:
                    self._release_nodes()
                    demand = replace(demand, count=demand.count - 1)
                    self._report(f"no {missing} within {self._wait_s:g} s: continues with {demand.count}")
                    continue
                if self.servers is not None:
                    raise ReservationConflict(f"no {missing} within {self._wait_s:g} s")
            if now - fitted >= max(JOIN_S, self._wait_s):
                raise ClusterError(
                    f"the cluster cannot hold {demand}: {describe_nodes()}",
                    place="resources.cluster",
                    fix="lower num_nodes, processes_per_node, cpus_per_process, rollout.vllm.replicas or tensor_parallel_size, "
                    "or add nodes; `grpo cluster` shows what there is. A higher replacement_wait_s waits longer for nodes that "
                    "join",
                )
            if now - reported >= REPEAT_S:
                reported = now
                too_much = "" if fits else ", which is more than the whole cluster has"
                self._report(f"waits for {missing}{too_much}; {describe_nodes()}")
        return reserved

    def close(self) -> None:
        """Release everything that is reserved or requested."""
        self._release_nodes()
        if self.servers is not None:
            remove_placement_group(self.servers)
            self.servers = None

    def _release_nodes(self) -> None:
        if self.nodes is not None:
            remove_placement_group(self.nodes)
            self.nodes = None

    def _reserve(self, demand: Demand) -> PlacementGroup | None:
        # Ray refuses a name that another group has, and two runs may have the same config and stage.
        bundles, mark = [demand.share.bundle] * demand.count, uuid4().hex[:6]
        if not demand.servers or self.servers is not None:
            # A group holds nothing while it waits.
            self.nodes = self.nodes or placement_group(bundles, strategy=demand.strategy, name=f"{self.name} #{mark}")
            return self.nodes if self.nodes.wait(timeout_seconds=POLL_S) else None
        machines = demand.arranged(_free())
        if machines is None:
            time.sleep(POLL_S)
            return None
        # Each node on the machine that leaves room for the servers, which are on different machines where there are enough.
        places = [{NODE_ID: machine} for machine in machines]
        self.nodes = placement_group(bundles, strategy=demand.strategy, name=f"{self.name} #{mark}", bundle_label_selector=places)
        servers = [demand.server.bundle] * demand.servers
        self.servers = placement_group(servers, strategy="SPREAD", name=f"{self.name} servers #{mark}")
        if self.nodes.wait(timeout_seconds=HOLD_S) and self.servers.wait(timeout_seconds=HOLD_S):
            return self.nodes
        # Another run was faster. Not all that are after the same nodes come back at once.
        self.close()
        time.sleep(random.uniform(*PAUSE_S))
        return None


def describe_nodes() -> str:
    """What is free on each node, and who holds the rest."""
    free, parts = _free(), []
    for node in ray.nodes():
        if node["Alive"]:
            here = free.get(node["NodeID"], {})
            cpus, gpus = (f"{here.get(what, 0):g} of {node['Resources'].get(what, 0):g} {what}" for what in ("CPU", "GPU"))
            parts.append(f"{node['NodeManagerAddress']} has {cpus}, {gpus} free")
    holders = sorted({group["name"] for group in groups() if group["state"] == "CREATED"})
    return "; ".join(parts) + (f"; held by {', '.join(holders)}" if holders else "")


def groups() -> list[dict[str, Any]]:
    """All reservations of the cluster that are not removed."""
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def _machines() -> dict[str, dict[str, float]]:
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _free() -> dict[str, dict[str, float]]:
    return dict(ray._private.state.available_resources_per_node())

"""Reserves nodes for a stage: all of them or none (a Ray placement group), and says what it waits for."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import VllmConfig

POLL_S = 2.0
REPEAT_S = 60.0
"""Seconds between two reports of a run that waits."""


@dataclass(frozen=True, slots=True)
class Share:
    """What each node has to reserve."""

    cpus: float
    gpus: int

    @classmethod
    def of(cls, resources: ResourcesConfig) -> "Share":
        """The resources of all processes of one node."""
        cluster = resources.cluster
        gpus = cluster.gpus_per_process
        if gpus is None:
            has_gpus = any(node["Alive"] and node["Resources"].get("GPU", 0) for node in ray.nodes())
            gpus = int(has_gpus and resources.device != "cpu")
        return cls(cluster.cpus_per_process * cluster.processes_per_node, gpus * cluster.processes_per_node)

    @classmethod
    def of_server(cls, resources: ResourcesConfig, vllm: VllmConfig) -> "Share":
        """The resources of one rollout server."""
        gpus = vllm.tensor_parallel_size if cls.of(resources).gpus else 0
        return cls(resources.cluster.cpus_per_process, gpus)

    @property
    def bundle(self) -> dict[str, float]:
        """The same for Ray."""
        return {"CPU": self.cpus} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def __str__(self) -> str:
        gpus = f" and {self.gpus} GPU" if self.gpus else ""
        return f"{self.cpus:g} CPU{gpus}"


@contextmanager
def reserved(
    name: str, resources: ResourcesConfig, nodes: int, *, report: Callable[[str], None], patience_s: float | None
) -> Iterator[tuple[PlacementGroup, int]]:
    """Reserve the nodes while the block runs; the group and the number of nodes in it.

    Args:
        name: shown by `grpo cluster`.
        resources: what each process reserves.
        nodes: how many nodes.
        report: told what the run waits for.
        patience_s: seconds after which fewer nodes will do, down to one. None: wait for all of them.
    """
    share = Share.of(resources)
    group, deadline = _request(name, resources, share, nodes), _deadline(patience_s)
    reported = -REPEAT_S
    try:
        while not group.wait(timeout_seconds=POLL_S):
            now = time.monotonic()
            if now >= deadline and nodes > 1:
                remove_placement_group(group)
                nodes -= 1
                report(f"no {nodes + 1} nodes with {share} each within {patience_s:g} s: continues with {nodes}")
                group, deadline = _request(name, resources, share, nodes), now + POLL_S
            elif now - reported >= REPEAT_S:
                reported = now
                report(f"waits for {nodes} nodes with {share} each; {describe_nodes()}")
        yield group, nodes
    finally:
        remove_placement_group(group)


@contextmanager
def reserved_servers(name: str, share: Share, count: int, *, report: Callable[[str], None]) -> Iterator[PlacementGroup]:
    """Reserve room for rollout servers while the block runs, on different nodes where there are enough.

    Args:
        name: shown by `grpo cluster`.
        share: what each server reserves.
        count: how many servers.
        report: told what the run waits for.
    """
    group = placement_group([share.bundle] * count, strategy="SPREAD", name=name)
    reported = -REPEAT_S
    try:
        while not group.wait(timeout_seconds=POLL_S):
            if (now := time.monotonic()) - reported >= REPEAT_S:
                reported = now
                report(f"waits for room for {count} rollout servers with {share} each; {describe_nodes()}")
        yield group
    finally:
        remove_placement_group(group)


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


def _amount(free: dict[str, Any], node: dict[str, Any], what: str) -> str:
    return f"{free.get(node['NodeID'], {}).get(what, 0):g} of {node['Resources'].get(what, 0):g}"


def _request(name: str, resources: ResourcesConfig, share: Share, nodes: int) -> PlacementGroup:
    return placement_group([share.bundle] * nodes, strategy=resources.cluster.placement, name=name)


def _deadline(patience_s: float | None) -> float:
    return float("inf") if patience_s is None else time.monotonic() + patience_s

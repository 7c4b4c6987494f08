"""Joins a running Ray cluster for as long as a block runs, and says what it has. It never starts one."""

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from grpo_tasks.cluster.versions import own_versions
from schemas.errors import ClusterError, ConfigError

ADDRESS = "RAY_ADDRESS"
PLACE = "resources.cluster.address"
NAMESPACE = "grpo"
ANSWER_S = 60.0
"""Longest wait for a node to say what it runs."""


def cluster_address(address: str) -> str:
    """The address of the config, or that of the environment.

    Raises:
        ConfigError: there is neither, the address cannot be used, or Ray is not installed.
    """
    found = address or os.environ.get(ADDRESS, "")
    if not found:
        raise ConfigError(
            f"no cluster is named: {PLACE} is empty and {ADDRESS} is not set",
            place=PLACE,
            fix=f"start one with `ray start --head`, then set {PLACE}: auto, or export {ADDRESS}=HOST:PORT",
        )
    if found.startswith("ray://"):
        raise ConfigError(
            f"{found} is the address of Ray's client, and the driver has to be a member of the cluster",
            place=PLACE,
            fix="run `ray start --address HOST:6379 --num-cpus 0` on this machine, then name that HOST:PORT",
        )
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed", place="resources.cluster.engine", fix="pip install 'grpo-pipeline[ray]'")
    return found


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster while the block runs. Its actors and reservations end with this process at the latest.

    Raises:
        ConfigError: no cluster is named.
        ClusterError: it does not answer, or this machine is not a member.
    """
    found = cluster_address(address)
    # Ray would change CUDA_VISIBLE_DEVICES of processes without a GPU, and says in a warning that it will stop doing so.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    try:
        ray.init(address=found, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # ConnectionError, RuntimeError, ValueError: Ray has no class for it
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ClusterError(
            f"the Ray cluster cannot be joined: {reason}",
            place=found,
            fix="check `ray status`; run `ray start --address HOST:PORT --num-cpus 0` on this machine if it is not a member",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as `grpo cluster` shows it."""

    address: str
    cpus: tuple[float, float]
    """Free, and all."""
    gpus: tuple[float, float]
    faults: tuple[str, ...]
    """In what it differs from this machine, or why it cannot train; empty if it can."""


def overview() -> tuple[list[NodeView], list[tuple[str, str]]]:
    """Every node of the cluster that this process has joined, and name and state (CREATED, PENDING) of each reservation."""
    import ray
    from ray._private.state import available_resources_per_node

    from grpo_tasks.cluster.placement import groups

    free = available_resources_per_node()
    views = []
    for node in ray.nodes():
        if node["Alive"]:
            here = free.get(node["NodeID"], {})
            cpus, gpus = ((here.get(what, 0.0), node["Resources"].get(what, 0.0)) for what in ("CPU", "GPU"))
            views.append(NodeView(node["NodeManagerAddress"], cpus, gpus, _faults(node["NodeID"]) if cpus[1] else ()))
    return views, sorted((group["name"], group["state"]) for group in groups())


def _faults(node_id: str) -> tuple[str, ...]:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Without a CPU of its own it runs beside whatever the node does.
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    asked = ray.remote(own_versions).options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote()
    try:
        return tuple(own_versions().differences(ray.get(asked, timeout=ANSWER_S)))
    except RayError as error:
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return (f"cannot run our code: {last}",)

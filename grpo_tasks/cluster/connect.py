"""Joins a running Ray cluster for as long as a block runs, and says what its nodes have and run. It never starts one.

Nodes that run another Python, torch, Ray or other code of ours would train something else, or fail in the middle.
"""

import importlib.util
import logging
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grpo_tasks.content.hashes import digest_of, file_sha256
from schemas.errors import ClusterError, ConfigError

ADDRESS = "RAY_ADDRESS"
PLACE = "resources.cluster.address"
NAMESPACE = "grpo"
ANSWER_S = 60.0
"""Longest wait for a node to say what it runs."""
_TOP = Path(__file__).resolve().parents[2]
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "ray")
"""Packages that decide what is computed, and how nodes speak to each other."""


def cluster_address(address: str) -> str:
    """The address of the config, or that of the environment; raises ConfigError for one that cannot be used, or without Ray."""
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
        raise ConfigError(
            "Ray is not installed", place="resources.cluster.engine", fix="pip install -c deploy/constraints.txt '.[ray]'"
        )
    return found


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster while the block runs. Its actors and reservations end with this process at the latest.

    `ConfigError` where no cluster is named, `ClusterError` where it does not answer, or this machine is not a member.
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

    # Without a CPU of its own it runs along with whatever the node does.
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    asked = ray.remote(own_versions).options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote()
    try:
        return tuple(own_versions().differences(ray.get(asked, timeout=ANSWER_S)))
    except RayError as error:
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return (f"cannot run our code: {last}",)


@dataclass(frozen=True, slots=True)
class Versions:
    """What decides whether two machines compute the same."""

    python: str
    libraries: dict[str, str]
    """Installed version of each of `LIBRARIES`; empty where it is missing."""
    code: str
    """SHA-256 (hex) over our own source files."""

    def differences(self, other: "Versions") -> list[str]:
        """What another machine has instead, in words."""
        pairs = [("Python", self.python, other.python)]
        pairs += [(name, ours, other.libraries.get(name, "")) for name, ours in self.libraries.items()]
        pairs += [("our code", self.code[:12], other.code[:12])]
        return [f"{name} {theirs or 'missing'} instead of {ours or 'none'}" for name, ours, theirs in pairs if ours != theirs]


def own_versions() -> Versions:
    """Those of this machine."""
    libraries = {}
    for name in LIBRARIES:
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            libraries[name] = ""
    return Versions(platform.python_version(), libraries, code_sha256(_TOP))


@cache
def code_sha256(top: Path) -> str:
    """SHA-256 (hex) over the Python files of `grpo_tasks` and `schemas` below a folder."""
    files = [path for package in ("grpo_tasks", "schemas") for path in (top / package).rglob("*.py")]
    return digest_of((path.relative_to(top).as_posix(), file_sha256(path)) for path in files)


def require_equal(versions: Iterable[tuple[str, Versions]]) -> None:
    """Raise ClusterError with each of these nodes that differs from this machine, and in what. Two nodes may have one name."""
    own = own_versions()
    faults = sorted((node, own.differences(theirs)) for node, theirs in versions)
    lines = [f"{node}: {', '.join(fault)}" for node, fault in faults if fault]
    if lines:
        raise ClusterError(
            "nodes of the cluster run something else than the driver:\n" + "\n".join(lines),
            place="resources.cluster",
            fix="install the same versions on these nodes and restart Ray there; `grpo cluster` compares all nodes",
        )

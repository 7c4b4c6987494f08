"""Joins a running Ray cluster for as long as a block runs. It never starts one."""

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from schemas.errors import ClusterError, ConfigError

ADDRESS = "RAY_ADDRESS"
PLACE = "resources.cluster.address"
NAMESPACE = "grpo"


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

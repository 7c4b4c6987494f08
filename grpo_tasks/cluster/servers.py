"""The rollout servers of a stage, each an actor on a node of the cluster. They stay while ranks die and start again.

reserve room for each -> send the base model -> start all -> tend: replace those whose actor or node died, and announce these
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_tasks.cluster.messages import Member, NodeLost, ask, send
from grpo_tasks.cluster.parcel import Parcel, ServerAddress, pack
from grpo_tasks.cluster.placement import Share, reserved_servers
from grpo_tasks.cluster.server_node import ServerNode
from grpo_tasks.cluster.versions import require_equal
from grpo_tasks.rollout.vllm_server import ServedModel, authorization, swaps_merged_weights
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ClusterError, UserError
from schemas.paths import resolve

START_S = 1_800.0
"""Longest wait for a server; a large model travels to its node first."""
TEND_S = 2.0
"""Seconds between two looks at the servers."""


@contextmanager
def rollout_servers(spec: StageSpec, directory: StageDir, name: str, report: Callable[[str], None]) -> Iterator["Servers | None"]:
    """Servers for a stage that samples with vLLM and names none of its own; None for any other stage.

    Args:
        spec: the stage.
        directory: its directory.
        name: shown by `grpo cluster`.
        report: told what is waited for and what happens to a server.

    Raises:
        UserError: a server does not come up.
    """
    vllm = spec.rollout.vllm
    if spec.rollout.engine != "vllm" or vllm.base_urls:
        yield None
        return
    share = Share.of_server(spec.resources, vllm)
    with reserved_servers(f"{name} servers", share, vllm.replicas, report=report) as group:
        servers = Servers(spec, pack(spec, directory), group, share, report)
        try:
            servers.start()
            yield servers
        finally:
            servers.end()


@dataclass(slots=True)
class Server:
    """One replica."""

    number: int
    actor: Any = None
    address: ServerAddress | None = None
    """None while it starts."""
    starting: Thread | None = None
    fault: UserError | NodeLost | None = None
    """Why the last start failed."""
    asked: Any = field(default=None)
    """The answer to the last look at it, when it is there."""


class Servers:
    """The replicas of a stage; see `rollout_servers`."""

    def __init__(
        self, spec: StageSpec, parcel: Parcel, group: PlacementGroup, share: Share, report: Callable[[str], None]
    ) -> None:
        config = spec.rollout.vllm
        key = authorization().get("Authorization", "").removeprefix("Bearer ") or secrets.token_urlsafe(24)
        self.environment = {"VLLM_API_KEY": key}
        """What the ranks need to reach the servers."""
        self._parcel, self._group, self._share, self._report = parcel, group, share, report
        # Every node has its own working directory.
        python = str(Path(config.python).absolute())
        self._config = config.model_copy(update={"replicas": 1, "devices": [], "python": python})
        # To the ranks they are servers of somebody else, which decides how the policy travels.
        foreign, cuda = config.model_copy(update={"base_urls": ["http://cluster"]}), share.gpus > 0
        merged = swaps_merged_weights(foreign, spec.model, cuda=cuda)
        rank = None if merged or spec.model.lora is None else spec.model.lora.r
        self._served = ServedModel(Path(resolve(spec.start.path)), spec.model.dtype, rank, cuda)
        self._next_look = 0.0
        self._servers = [Server(number) for number in range(config.replicas)]

    @property
    def addresses(self) -> list[ServerAddress]:
        """Those of all servers that have started."""
        return [server.address for server in self._servers if server.address is not None]

    def start(self) -> None:
        """Start all servers at once and wait for them; one whose node is lost meanwhile joins later.

        Raises:
            UserError: one does not come up, or all of their nodes are lost.
        """
        for server in self._servers:
            self._begin(server)
        for server in self._servers:
            assert server.starting is not None
            server.starting.join()
            if isinstance(server.fault, UserError):
                raise server.fault
            if server.fault is None:
                server.starting = None
        if not self.addresses:
            raise ClusterError(
                f"no rollout server has started: {self._servers[0].fault}",
                place="rollout.vllm.replicas",
                fix="see `grpo cluster`, then start the same command again",
            )

    def tend(self, announce: Callable[[ServerAddress], None]) -> None:
        """Look at every server, without waiting for one; `announce` is told of one that replaces another."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + TEND_S
        for server in self._servers:
            if server.starting is None:
                self._look_at(server)
            elif not server.starting.is_alive():
                self._has_started(server, announce)

    def end(self) -> None:
        """End the actors, with their servers and their private directories."""
        for server in self._servers:
            if server.actor is not None:
                ray.kill(server.actor)

    def _begin(self, server: Server) -> None:
        """Start it in a thread: a node may have to be waited for, and vLLM takes a minute."""
        server.address, server.asked, server.fault = None, None, None
        server.starting = Thread(target=self._start, args=(server,), name=f"server-{server.number}", daemon=True)
        server.starting.start()

    def _start(self, server: Server) -> None:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=server.number)
        options = {"num_cpus": self._share.cpus, "num_gpus": self._share.gpus, "scheduling_strategy": strategy}
        name, files = f"rollout server {server.number}", self._parcel.base
        try:
            server.actor = ray.remote(ServerNode).options(max_restarts=0, **options).remote(self.environment["VLLM_API_KEY"])
            facts = ask(server.actor.describe.remote(), name, START_S)
            require_equal({facts.name: facts.versions})
            send(files, [Member(server.actor, facts)])
            started = server.actor.start.remote(files, self._parcel.spec.start.path, self._config, self._served)
            server.address = ask(started, f"{name} on {facts.name}", START_S)
        except (UserError, NodeLost) as error:
            server.fault = error

    def _has_started(self, server: Server, announce: Callable[[ServerAddress], None]) -> None:
        server.starting = None
        if server.address is not None:
            self._report(f"rollout server {server.number} joins at {server.address.url}")
            announce(server.address)
            return
        self._report(f"rollout server {server.number} did not start, and is tried again: {server.fault}")
        ray.kill(server.actor)
        self._begin(server)

    def _look_at(self, server: Server) -> None:
        if server.asked is None:
            server.asked = server.actor.tend.remote()
        elif ray.wait([server.asked], timeout=0)[0]:
            answer, server.asked = server.asked, None
            try:
                happened = ask(answer, f"rollout server {server.number}")
            except NodeLost as lost:
                self._report(f"{lost}; another one is started")
                ray.kill(server.actor)
                self._begin(server)
            else:
                if happened:
                    self._report(str(happened))

"""The rollout servers of a stage, each an actor on a node of the cluster. They stay while ranks die and start again.

reserve room for each -> send the base model -> start all -> tend: replace those that are lost, and announce these

A server that is lost is started again at once. The next attempts wait longer and longer, and after `rollout.vllm.max_restarts`
failures in a row it is left out.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from traceback import format_exception_only
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_tasks.cluster.messages import Member, NodeLost, ask, send
from grpo_tasks.cluster.parcel import Parcel, ServerAddress, pack
from grpo_tasks.cluster.placement import Share, reserved_servers
from grpo_tasks.cluster.server_node import ServerNode
from grpo_tasks.cluster.versions import require_equal
from grpo_tasks.rollout.vllm_server import ServerModel, authorization, swaps_merged_weights
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ClusterError, UserError
from schemas.paths import resolve

START_S = 1_800.0
"""Longest wait for a server; a large model travels to its node first."""
TEND_S = 2.0
"""Seconds between two looks at the servers."""
PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""Time before the second attempt to start a server again; it doubles with every further one, up to the longest."""
SETTLED_S = 600.0
"""A server that is lost after it ran for so long (s) had no failure before."""


@contextmanager
def rollout_servers(
    spec: StageSpec, directory: StageDir, name: str, report: Callable[[str], None]
) -> Iterator["ClusterServers | None"]:
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
        servers = ClusterServers(spec, pack(spec, directory), group, share, report)
        try:
            servers.start()
            yield servers
        finally:
            servers.end()


@dataclass(slots=True)
class ClusterServer:
    """One replica."""

    number: int
    actor: Any = None
    address: ServerAddress | None = None
    """None until it has started."""
    starting: Thread | None = None
    """The thread that starts it, until `tend` has seen how it ended."""
    fault: Exception | None = None
    """Why it is not there."""
    asked: Any = None
    """The answer to the last look at it, when it is there."""
    joined: float | None = None
    """When (s) it started."""
    failures: int = 0
    """How often in a row it failed."""
    retry_at: float | None = None
    """When (s) it is started again; None: it runs, starts or is left out."""
    reported: str = ""
    """The reason that was reported last."""

    @property
    def runs(self) -> bool:
        """True if it has started, and `tend` has seen that."""
        return self.address is not None and self.starting is None

    @property
    def left_out(self) -> bool:
        """True if it failed too often."""
        return self.address is None and self.starting is None and self.retry_at is None


class ClusterServers:
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
        self._served = ServerModel(
            Path(resolve(spec.start.path)), spec.model.dtype, rank, cuda, num_adapters=spec.resources.ranks
        )
        self._next_look = 0.0
        self._servers = [ClusterServer(number) for number in range(config.replicas)]

    @property
    def addresses(self) -> list[ServerAddress]:
        """Those of all servers that have started."""
        # One whose start `tend` has not seen yet is announced later, to ranks that would otherwise have it twice.
        return [server.address for server in self._servers if server.address is not None and server.runs]

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
            if server.fault is None:
                server.starting, server.joined = None, time.monotonic()
            elif not isinstance(server.fault, NodeLost):
                raise server.fault
        if not self.addresses:
            raise ClusterError(
                f"no rollout server has started: {self._servers[0].fault}",
                place="rollout.vllm.replicas",
                fix="see `grpo cluster`, then start the same command again",
            )

    def wait_for_one(self) -> list[ServerAddress]:
        """The addresses of all servers that have started, and of the first one that does if there is none.

        Raises:
            ClusterError: none is left.
        """
        while not self.addresses:
            self.tend(lambda _: None)
            time.sleep(TEND_S)
        return self.addresses

    def tend(self, announce: Callable[[ServerAddress], None]) -> None:
        """Look at every server, without waiting for one; `announce` hears of one that replaces another.

        Raises:
            ClusterError: none is left.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + TEND_S
        for server in self._servers:
            if server.runs:
                self._look_at(server)
            elif server.starting is not None and not server.starting.is_alive():
                self._has_started(server, announce)
            elif server.retry_at is not None and now >= server.retry_at:
                self._begin(server)
        if all(server.left_out for server in self._servers):
            raise ClusterError(
                f"no rollout server is left: {self._servers[0].fault}",
                place="rollout.vllm.max_restarts",
                fix="see `grpo cluster` and the events of the stage; the same command resumes it",
            )

    def end(self) -> None:
        """End the actors, with their servers and their private directories."""
        for server in self._servers:
            if server.actor is not None:
                ray.kill(server.actor)

    def _begin(self, server: ClusterServer) -> None:
        """Start it in a thread: a node may have to be waited for, and vLLM takes a minute."""
        server.address = server.asked = server.fault = server.joined = server.retry_at = None
        server.starting = Thread(target=self._start, args=(server,), name=f"server-{server.number}", daemon=True)
        server.starting.start()

    def _start(self, server: ClusterServer) -> None:
        name = f"rollout server {server.number}"
        try:
            files = self._parcel.base
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=server.number)
            options = {"num_cpus": self._share.cpus, "num_gpus": self._share.gpus, "scheduling_strategy": strategy}
            server.actor = ray.remote(ServerNode).options(max_restarts=0, **options).remote(self.environment["VLLM_API_KEY"])
            facts = ask(server.actor.describe.remote(), name, START_S)
            require_equal([(facts.name, facts.versions)])
            send(files, [Member(server.actor, facts)])
            started = server.actor.start.remote(files, self._parcel.spec.start.path, self._config, self._served)
            server.address = ask(started, f"{name} on {facts.name}", START_S)
        except Exception as fault:  # in a thread: whoever waits for it raises or reports it
            server.fault = fault

    def _has_started(self, server: ClusterServer, announce: Callable[[ServerAddress], None]) -> None:
        server.starting = None
        if server.fault is not None:
            self._failed(server, server.fault)
            return
        assert server.address is not None
        server.joined, server.reported = time.monotonic(), ""
        self._report(f"rollout server {server.number} joins at {server.address.url}")
        announce(server.address)

    def _look_at(self, server: ClusterServer) -> None:
        if server.asked is None:
            server.asked = server.actor.tend.remote()
        elif ray.wait([server.asked], timeout=0)[0]:
            answer, server.asked = server.asked, None
            try:
                happened = ask(answer, f"rollout server {server.number}")
            except Exception as fault:  # whatever it is: the other servers sample, and this one is replaced
                self._failed(server, fault)
            else:
                if happened:
                    self._report(str(happened))

    def _failed(self, server: ClusterServer, fault: Exception) -> None:
        """It is lost or did not start: end what is left of it, and plan the next attempt if there is one."""
        if server.actor is not None:
            ray.kill(server.actor)
        now = time.monotonic()
        settled = server.joined is not None and now - server.joined > SETTLED_S
        server.failures = 1 if settled else server.failures + 1
        server.actor = server.address = server.asked = None
        server.fault = fault
        if server.failures > self._config.max_restarts:
            plan = f"is left out after {server.failures} failures in a row (rollout.vllm.max_restarts)"
        else:
            pause_s = 0.0 if server.failures == 1 else min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (server.failures - 2))
            server.retry_at = now + pause_s
            plan = "is started again"
        ours = isinstance(fault, UserError | NodeLost)
        detail = str(fault) if ours else "".join(format_exception_only(fault)).strip().splitlines()[-1]
        # The rest may be the end of a log, which is never the same.
        reason = detail.partition("\n")[0]
        if reason != server.reported or server.left_out:
            self._report(f"rollout server {server.number} {plan}: {detail}")
        server.reported = reason

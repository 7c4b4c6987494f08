"""The rollout servers of a stage, each an actor on a node of the cluster. They stay while ranks die and start again.

A server that is lost is started again at once, on its node or on another one. The next attempts wait longer and longer, and after
`rollout.vllm.max_restarts` failures in a row it is left out.
"""

import math
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from traceback import format_exception_only
from typing import Any, Self

import ray
from ray.util.placement_group import PlacementGroup

from grpo_tasks.cluster.jobs import Node, NodeLost, answer, join, start_actor
from grpo_tasks.cluster.parcel import model_at, model_files
from grpo_tasks.cluster.placement import Share
from grpo_tasks.processes.lifetime import start_module
from grpo_tasks.processes.serve import free_port, tail
from grpo_tasks.rollout.vllm_server import OwnServer, ServerModel, authorization, swaps_merged_weights
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.rollout import VllmConfig
from schemas.errors import ClusterError, RolloutError, UserError

KEY = "VLLM_API_KEY"
START_S = 1_800.0
"""Longest wait for a server; a large model travels to its node first."""
CHECK_S = 2.0
PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""Time before the second attempt to start a server again; it doubles with every further one, up to the longest."""
SETTLED_S = 600.0
"""A server that is lost after it ran for so long (s) had no failure before."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A rollout server on a node."""

    url: str
    weights_url: str


class ServerNode(Node):
    """The actor of one server: vLLM, and a receiver of weights next to it, at the node's address only. Requests carry `key`."""

    def __init__(self, key: str, address: str | None = None) -> None:
        super().__init__(address)
        os.environ[KEY] = key

    def start(self, config: VllmConfig, served: ServerModel) -> ServerAddress:
        """Start both; raises RolloutError without a vLLM environment, or where one of them does not come up."""
        if not Path(config.python).exists():
            raise RolloutError(
                f"there is no {config.python} on {self._address}",
                place="rollout.vllm.python",
                fix="run `make vllm` on every node that has a server, and name the same path on all of them",
            )
        port, self._log = free_port(self._address), self.root / "weights.log"
        module = "grpo_tasks.content.weights_server"
        with self._log.open("ab") as output:
            self._receiver = start_module(module, self.root / "weights", self._address, port, output=output)
        self._server = OwnServer(config, served, self.root / "vllm.log", host=self._address)
        self._server.start()
        self.check()
        return ServerAddress(self._server.address, f"http://{self._address}:{port}")

    def check(self) -> None:
        """Raise RolloutError where the server or the receiver has ended; the driver starts another one."""
        code = self._receiver.poll()
        if code is not None:
            what = f"the receiver of weights on {self._address} ended with exit code {code}"
            raise RolloutError(f"{what}; the end of its log:\n{tail(self._log)}", place=self._address)
        if not self._server.runs:
            what = f"the server at {self._server.address} ended"
            raise RolloutError(f"{what}; the end of its log:\n{tail(self.root / 'vllm.log')}", place=self._server.address)


@dataclass(frozen=True, slots=True)
class News:
    """What happened to a server."""

    number: int
    message: str
    """Empty if there is nothing to report."""
    address: ServerAddress | None = None
    """Where it runs from now on; None: it is lost, or did not start."""
    fault: Exception | None = None
    left_out: bool = False


class ClusterServers:
    """The replicas of a stage. Each is kept in a thread of its own: a node may have to be waited for, and vLLM takes a minute.

    `group` has a bundle for each server, with its `share`; `report` hears what happens to one.
    """

    def __init__(self, spec: StageSpec, group: PlacementGroup, share: Share, report: Callable[[str], None]) -> None:
        self._spec, self._group, self._share, self._report = spec, group, share, report
        self._base = spec.start.model_copy(update={"adapter": None})
        self._files = model_files(self._base)
        key = authorization().get("Authorization", "").removeprefix("Bearer ") or secrets.token_urlsafe(24)
        self.environment = {KEY: key}
        self._count, self._max_restarts = spec.rollout.vllm.replicas, spec.rollout.vllm.max_restarts
        self._news: SimpleQueue[News] = SimpleQueue()
        self._addresses: dict[int, ServerAddress] = {}
        self._last: dict[int, News] = {}
        self._actors: dict[int, Any] = {}
        self._ended = Event()

    def __enter__(self) -> Self:
        """Start all servers at once and wait for them; one whose node is lost meanwhile joins later.

        `UserError` where one does not come up, or all of their nodes are lost.
        """
        try:
            for number in range(self._count):
                Thread(target=self.keep, args=(number,), name=f"server-{number}", daemon=True).start()
            while len(self._last) < self._count:
                news = self._news.get()
                if news.fault is not None and not isinstance(news.fault, NodeLost):
                    raise news.fault
                self._take(news)
            if not self._addresses:
                raise ClusterError(
                    f"no rollout server has started: {self._last[0].fault}",
                    place="rollout.vllm.replicas",
                    fix="see `grpo cluster`, then start the same command again",
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the actors, with their servers and their private folders. One that starts at this moment ends with its group."""
        self._ended.set()
        for number in range(self._count):
            self._kill(number)

    def wait_for_one(self) -> list[ServerAddress]:
        """The addresses of all servers that run, and of the first one that does if there is none; raises as `check`."""
        while not self._addresses:
            self.check()
            time.sleep(CHECK_S)
        return [*self._addresses.values()]

    def check(self) -> list[ServerAddress]:
        """Report what happened meanwhile; the addresses that are new to ranks that run. Raises ClusterError if none is left."""
        new = []
        while not self._news.empty():
            news = self._news.get()
            self._take(news)
            new += [news.address] if news.address is not None else []
        if all(news.left_out for news in self._last.values()):
            raise ClusterError(
                f"no rollout server is left: {self._last[0].fault}",
                place="rollout.vllm.max_restarts",
                fix="see `grpo cluster` and the events of the stage; the same command resumes it",
            )
        return new

    def _take(self, news: News) -> None:
        self._last[news.number] = news
        self._addresses.pop(news.number, None)
        if news.address is not None:
            self._addresses[news.number] = news.address
        if news.message:
            self._report(f"rollout server {news.number} {news.message}")

    def keep(self, number: int) -> None:
        """Start a server, and again whenever it is lost, until it is left out or all of them are ended."""
        failures, reported, pause_s = 0, "", 0.0
        while failures <= self._max_restarts and not self._ended.wait(pause_s):
            joined = math.inf
            try:
                address = self._start(number)
                joined, message = time.monotonic(), f"joins at {address.url}"
                # The ranks that start after it know it.
                self._news.put(News(number, message if failures else "", address))
                reported = ""
                while not self._ended.wait(CHECK_S):
                    answer(self._actors[number].check.remote(), f"rollout server {number}")
            except Exception as fault:  # whatever it is: the other servers sample, and this one is replaced
                failures = 1 if time.monotonic() - joined > SETTLED_S else failures + 1
                pause_s = 0.0 if failures == 1 else min(LONGEST_PAUSE_S, PAUSE_S * 2 ** (failures - 2))
                left_out, plan = failures > self._max_restarts, "is started again"
                if left_out:
                    plan = f"is left out after {failures} failures in a row (rollout.vllm.max_restarts)"
                ours = isinstance(fault, UserError | NodeLost)
                detail = str(fault) if ours else "".join(format_exception_only(fault)).strip().splitlines()[-1]
                # The rest may be the end of a log, which is never the same.
                before, reported = reported, detail.partition("\n")[0]
                message = f"{plan}: {detail}" if left_out or reported != before else ""
                self._news.put(News(number, message, fault=fault, left_out=left_out))
            finally:
                self._kill(number)

    def _start(self, number: int) -> ServerAddress:
        name, spec = f"rollout server {number}", self._spec
        self._actors[number] = actor = start_actor(ServerNode, self._group, number, self._share, self.environment[KEY])
        [member] = join([actor], [name], self._files, START_S)
        _, base = model_at(member.facts.root, spec.model, self._base, self._files)
        # To the ranks they are servers of somebody else, which decides how the policy travels.
        foreign, cuda = spec.rollout.vllm.model_copy(update={"base_urls": ["http://cluster"]}), self._share.gpus > 0
        merged = swaps_merged_weights(foreign, spec.model, cuda=cuda)
        rank = None if merged or spec.model.lora is None else spec.model.lora.r
        model = Path(member.ask("resolve", base.path))
        served = ServerModel(model, spec.model.dtype, rank, cuda, num_adapters=spec.resources.ranks)
        # Every node has its own working directory.
        python = str(Path(spec.rollout.vllm.python).absolute())
        config = spec.rollout.vllm.model_copy(update={"replicas": 1, "devices": [], "python": python})
        address: ServerAddress = answer(actor.start.remote(config, served), f"{name} on {member.facts.name}", START_S)
        return address

    def _kill(self, number: int) -> None:
        actor = self._actors.pop(number, None)
        if actor is not None:
            ray.kill(actor)

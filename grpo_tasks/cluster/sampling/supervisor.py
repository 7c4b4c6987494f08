"""Samples on the nodes of a cluster: reserves, sends, hands out shards, collects, and hands out again what a dead worker had.

The workers know nothing of each other, unlike the ranks of a stage. So each is placed wherever there is room, and there are fewer
of them where the cluster cannot hold all. When one dies, the others take its shard. Workers are reserved again only when none is
left.
"""

import io
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_tasks.cluster.inbox import CHUNK_BYTES
from grpo_tasks.cluster.messages import START_S, Member, NodeLost, ask, full_disk, send
from grpo_tasks.cluster.node import Node
from grpo_tasks.cluster.parcel import INPUTS, MODULES, ParcelFile, config_at, file_at, model_at, model_files, module_files
from grpo_tasks.cluster.placement import Demand, Share, reserved
from grpo_tasks.cluster.versions import require_equal
from grpo_tasks.content.modules import own_sources
from grpo_tasks.processes.entry import DISK_FULL, ERROR, LOG, SPEC
from grpo_tasks.processes.lifetime import PARENT
from grpo_tasks.rollout.spec import SAMPLES, SampleSpec, chosen_rows
from schemas.config.operations import ClusterConfig, ResourcesConfig
from schemas.errors import ClusterError, UserError
from schemas.prompts import GREEDY

POLL_S = 0.1
SETTLING_S = 3.0
"""A process that ends badly may do so because its node died, which Ray may need so long to notice."""


PROMPTS = f"{INPUTS}/prompts.parquet"


@dataclass(frozen=True, slots=True)
class SampleParcel:
    """Completions to sample, ready to be sent."""

    spec: SampleSpec
    """As the driver has it."""
    files: tuple[ParcelFile, ...]
    """Prompts, model, and modules with tools or an environment."""

    @classmethod
    def of(cls, spec: SampleSpec) -> "SampleParcel":
        """List the inputs with their hashes."""
        own = own_sources(spec.interaction.own_code, spec.interaction.module_dirs())
        return cls(spec, (file_at(PROMPTS, spec.prompts), *model_files(spec.ref), *module_files(own)))

    def spec_at(self, root: Path, only: Sequence[str]) -> SampleSpec:
        """The specification of a shard with the paths of a node, where a process samples alone.

        Args:
            root: private directory on the node.
            only: ids of the prompts of the shard.
        """
        rollout = self.spec.rollout
        # A server of its own, on the cards that the process has.
        own = {"replicas": 1, "devices": [], "base_urls": [], "weights_urls": []}
        ref = model_at(self.spec.ref, self.files, root)
        update = {
            "model": config_at(self.spec.model, self.spec.ref, ref),
            "ref": ref,
            "prompts": root / PROMPTS,
            "only": list(only),
            "interaction": self.spec.interaction.model_copy(update={"module_dir": root / MODULES}),
            "rollout": rollout.model_copy(update={"vllm": rollout.vllm.model_copy(update=own)}),
            "resources": self.spec.resources.model_copy(update={"num_processes": 1, "cluster": ClusterConfig()}),
        }
        return self.spec.model_copy(update=update)


def shards(spec: SampleSpec, most: int) -> list[list[str]]:
    """The prompt ids of each shard: at most so many contiguous shards of nearly equal size, none of them empty."""
    ids = [row.prompt_id for row in chosen_rows(spec.prompts, spec.max_prompts, spec.only)]
    count = max(1, min(most, len(ids)))
    return [ids[len(ids) * index // count : len(ids) * (index + 1) // count] for index in range(count)]


def joined(tables: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """The tables of all shards, in order, as the table of one process: sampled completions first, then greedy ones."""
    # One chunk, so that the file has the same row groups too.
    whole = pl.concat(tables)
    return pl.concat([whole.filter(pl.col("sample") != GREEDY), whole.filter(pl.col("sample") == GREEDY)], rechunk=True)


@dataclass(slots=True)
class Worker:
    """An actor and the shard that it has."""

    member: Member
    shard: int | None = None

    @property
    def name(self) -> str:
        """Of its node."""
        return self.member.facts.name


class SamplingSupervisor:
    """Samples the completions of a spec on the cluster that this process has joined.

    Args:
        directory: of the step; what is reported goes to its log.
        spec: what to sample.
    """

    def __init__(self, directory: Path, spec: SampleSpec) -> None:
        self.cluster = spec.resources.cluster
        self.resources = _resources(spec)
        vllm = spec.rollout.vllm
        # Every node has its own working directory.
        there = vllm.model_copy(update={"python": str(Path(vllm.python).absolute())})
        spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"vllm": there})})
        self.name, self.parcel = f"grpo {directory.parent.name} {directory.name}", SampleParcel.of(spec)
        self.shards = shards(spec, self.cluster.num_nodes * self.cluster.processes_per_node)
        self.waiting = deque(range(len(self.shards)))
        self.tables: dict[int, pl.DataFrame] = {}
        self.workers: list[Worker] = []
        self.deaths = 0

    def sample(self) -> pl.DataFrame:
        """The table of all completions, in the order of one process.

        Raises:
            UserError: one that a process left, or nodes that differ.
            ClusterError: more workers died than `max_restarts` allows.
        """
        while len(self.tables) < len(self.shards):
            # No more processes than there are shards left.
            count = min(self.cluster.num_nodes * self.cluster.processes_per_node, len(self.shards) - len(self.tables))
            demand, wait_s = Demand.of_processes(self.resources, count), self.cluster.replacement_wait_s
            with reserved(self.name, demand, report=_report, wait_s=wait_s, fewer=self.deaths > 0) as (group, found):
                actors = self._actors(group, found, demand.share)
                try:
                    self._open(actors)
                    while self.workers and len(self.tables) < len(self.shards):
                        for worker in list(self.workers):
                            self._tend(worker)
                        time.sleep(POLL_S)
                except NodeLost as lost:
                    self._count(lost)
                finally:
                    self._close(actors)
        return joined([self.tables[number] for number in range(len(self.shards))])

    def _actors(self, group: PlacementGroup, processes: int, share: Share) -> list[Any]:
        return [
            ray.remote(SampleNode)
            .options(
                num_cpus=share.cpus,
                num_gpus=share.gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            )
            .remote(f"worker {index}")
            for index in range(processes)
        ]

    def _open(self, actors: list[Any]) -> None:
        """Compare versions and send the inputs; raises NodeLost if a node dies meanwhile."""
        asked = [actor.describe.remote() for actor in actors]
        members = [Member(actor, ask(ref, "a node", START_S)) for actor, ref in zip(actors, asked, strict=True)]
        require_equal((member.facts.name, member.facts.versions) for member in members)
        send(self.parcel.files, members)
        placed = [(member, member.actor.place.remote(self.parcel)) for member in members]
        for member, ref in placed:
            ask(ref, member.facts.name, START_S)
        self.workers = [Worker(member) for member in members]

    def _close(self, actors: list[Any]) -> None:
        """End the actors, with their processes and private directories; what they had waits again."""
        for worker in self.workers:
            self._give_back(worker)
        self.workers = []
        for actor in actors:
            ray.kill(actor)

    def _tend(self, worker: Worker) -> None:
        """Give an idle worker a shard, or look at the one that it has; a worker that died is left out from now on."""
        try:
            if worker.shard is not None:
                self._look_at(worker, worker.shard)
            elif self.waiting:
                worker.shard = self.waiting.popleft()
                ask(worker.member.actor.start.remote(self.parcel, worker.shard, self.shards[worker.shard]), worker.name, START_S)
        except NodeLost as lost:
            self._give_back(worker)
            self.workers.remove(worker)
            # The process and the private directory end, if only the process died.
            ray.kill(worker.member.actor)
            self._count(lost)

    def _look_at(self, worker: Worker, shard: int) -> None:
        report: ShardReport = ask(worker.member.actor.report.remote(), worker.name)
        if report.code is None:
            return
        sys.stdout.write(report.log.decode(errors="replace"))
        if report.error:
            raise UserError.from_json(report.error.replace(worker.member.facts.root, worker.name))
        if report.code == DISK_FULL:
            raise full_disk(worker.name)
        if report.code:
            time.sleep(SETTLING_S)
            # Raises with a better reason if the node has died.
            ask(worker.member.actor.report.remote(), worker.name)
            how = f"was killed by signal {-report.code}" if report.code < 0 else f"ended with exit code {report.code}"
            raise NodeLost(f"the process that samples on {worker.name} {how}")
        parts = [
            ask(worker.member.actor.read.remote(offset, CHUNK_BYTES), worker.name)
            for offset in range(0, report.size, CHUNK_BYTES)
        ]
        self.tables[shard] = pl.read_parquet(io.BytesIO(b"".join(parts)))
        worker.shard = None

    def _give_back(self, worker: Worker) -> None:
        if worker.shard is not None:
            self.waiting.appendleft(worker.shard)
            worker.shard = None

    def _count(self, lost: NodeLost) -> None:
        self.deaths += 1
        if self.deaths > self.cluster.max_restarts:
            raise ClusterError(
                f"sampling was interrupted {self.deaths} times, the last time because {lost}",
                place="resources.cluster.max_restarts",
                fix="see the end of the log and `grpo cluster`, then start the same command again; a higher max_restarts allows "
                "more interruptions",
            ) from lost
        _report(f"{lost}; others sample what it had ({self.deaths} of {self.cluster.max_restarts} interruptions)")


def _report(happened: str) -> None:
    """A line of the step's log."""
    print(happened, flush=True)


def _resources(spec: SampleSpec) -> ResourcesConfig:
    """What each process reserves; one that starts a server needs the server's cards."""
    if spec.rollout.engine != "vllm":
        return spec.resources
    gpus = Share.of_server(spec.resources, spec.rollout.vllm).gpus
    cluster = spec.resources.cluster.model_copy(update={"gpus_per_process": gpus})
    return spec.resources.model_copy(update={"cluster": cluster})


@dataclass(frozen=True, slots=True)
class ShardReport:
    """The state of a shard, each time the driver asks."""

    code: int | None
    """Exit code of the process; None while it runs, negative for a signal."""
    error: str = ""
    """The `UserError` that it left, as JSON; empty if there is none."""
    log: bytes = b""
    """Everything it printed, once it has ended."""
    size: int = 0
    """Bytes of the table, once it has ended well."""


class SampleNode(Node):
    """One worker. Ray calls one method at a time, always in the main thread, to which the process is tied."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = self._root

    def place(self, parcel: SampleParcel) -> None:
        """Give the files that were sent their places."""
        self._store.lay_out(parcel.files)
        (self._root / MODULES).mkdir(parents=True, exist_ok=True)

    def start(self, parcel: SampleParcel, number: int, only: Sequence[str]) -> None:
        """Sample shard `number`: the prompts with the ids `only`."""
        self._folder = self._root / f"shard-{number}"
        self._folder.mkdir()
        parcel.spec_at(self._root, only).save(self._folder / SPEC)
        with (self._folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "grpo_tasks.rollout", str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {PARENT: str(os.getpid())},
                # The user's modules are found in the working directory, as on the driver.
                cwd=self._root / MODULES,
            )

    def report(self) -> ShardReport:
        """How the process is."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return ShardReport(None)
        error, table = self._folder / ERROR, self._folder / SAMPLES
        text = error.read_text(encoding="utf-8") if code and error.exists() else ""
        size = 0 if code else table.stat().st_size
        return ShardReport(code, text, (self._folder / LOG).read_bytes(), size)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the table of the last shard."""
        with Path(self._folder / SAMPLES).open("rb") as stream:
            stream.seek(offset)
            return stream.read(size)

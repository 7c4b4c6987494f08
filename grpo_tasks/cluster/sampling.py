"""`python -m grpo_tasks.cluster.sampling DIRECTORY`: what `python -m grpo_tasks.rollout DIRECTORY` does, on a cluster.

Every completion has a seed of its own, so who samples a shard of prompts does not matter. The workers know nothing of each other,
unlike the ranks of a stage: each is placed wherever there is room, and there are fewer of them where the cluster cannot hold all.
When one dies, the others take its shard. Workers are reserved again only when none is left.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polars as pl
import ray

from grpo_tasks.cluster.connect import connected
from grpo_tasks.cluster.jobs import Job, Member, NodeLost, RunningJob, job_nodes
from grpo_tasks.cluster.mirror import Inbox, Mirrored, Refused
from grpo_tasks.cluster.parcel import INPUTS, ParcelFile, interaction_at, model_at, model_files, module_files
from grpo_tasks.cluster.placement import Demand, Reservation
from grpo_tasks.content.modules import own_sources
from grpo_tasks.kit.progress import Count
from grpo_tasks.processes.child import SPEC, run_child
from grpo_tasks.rollout.parts import joined
from grpo_tasks.rollout.spec import SAMPLES, SampleSpec, chosen_rows
from schemas.config.operations import ClusterConfig
from schemas.errors import ClusterError

POLL_S = 0.1
PROMPTS = f"{INPUTS}/prompts.parquet"
MIRRORED = Mirrored(complete=(SAMPLES,))


def sample_files(spec: SampleSpec) -> tuple[ParcelFile, ...]:
    """Prompts, model, and modules with tools or an environment."""
    own = own_sources(spec.interaction.own_code, spec.interaction.module_dirs())
    return (ParcelFile.of(PROMPTS, spec.prompts), *model_files(spec.ref), *module_files(own))


def spec_at(root: Path, spec: SampleSpec, files: Sequence[ParcelFile], only: Sequence[str]) -> SampleSpec:
    """The specification of a shard, the prompts `only`, with the paths of a node, where a process samples alone."""
    # A server of its own, on the cards that the process has.
    own = {"replicas": 1, "devices": [], "base_urls": [], "weights_urls": []}
    model, ref = model_at(root, spec.model, spec.ref, files)
    update = {
        "model": model,
        "ref": ref,
        "prompts": root / PROMPTS,
        "only": list(only),
        "interaction": interaction_at(root, spec.interaction),
        "rollout": spec.rollout.model_copy(update={"vllm": spec.rollout.vllm.model_copy(update=own)}),
        "resources": spec.resources.model_copy(update={"num_processes": 1, "cluster": ClusterConfig()}),
    }
    return spec.model_copy(update=update)


def shards(spec: SampleSpec, most: int) -> list[list[str]]:
    """The prompt ids of each of at most so many contiguous shards of nearly equal size, none of them empty."""
    ids = [row.prompt_id for row in chosen_rows(spec.prompts, spec.max_prompts, spec.only)]
    count = max(1, min(most, len(ids)))
    return [ids[len(ids) * index // count : len(ids) * (index + 1) // count] for index in range(count)]


@dataclass(slots=True)
class Worker:
    """A node that samples shards."""

    member: Member
    shard: int = 0
    job: RunningJob | None = None


class SamplingSupervisor:
    """Samples the completions of a spec on the cluster that this process has joined, for a step with this directory."""

    def __init__(self, directory: Path, spec: SampleSpec) -> None:
        self.cluster = spec.resources.cluster
        vllm = spec.rollout.vllm
        # Every node has its own working directory.
        there = vllm.model_copy(update={"python": str(Path(vllm.python).absolute())})
        self.spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"vllm": there})})
        self.directory, self.name = directory, f"grpo {directory.parent.name} {directory.name}"
        self.files = sample_files(self.spec)
        self.processes = self.cluster.num_nodes * self.cluster.processes_per_node
        self.shards = shards(spec, self.processes)
        self.waiting = deque(range(len(self.shards)))
        self.tables: dict[int, pl.DataFrame] = {}
        self.count = Count("sampling", len(self.shards), "shards")
        self.deaths = 0

    def sample(self) -> pl.DataFrame:
        """The table of all completions, in the order of one process.

        The `UserError` that a process left, or `ClusterError` where more workers died than `max_restarts` allows.
        """
        while self.waiting:
            # No more processes than there are shards left.
            demand = Demand.of_processes(self.spec.resources, self.spec.rollout, min(self.processes, len(self.waiting)))
            with closing(Reservation(self.name, demand, _report, self.cluster.replacement_wait_s)) as held:
                try:
                    with job_nodes(held.reserve(fewer=self.deaths > 0), demand.share, self.files) as members:
                        self._sample(members)
                except NodeLost as lost:
                    self._count(lost)
        return joined([self.tables[number] for number in range(len(self.shards))])

    def _sample(self, members: Sequence[Member]) -> None:
        """Sample on these nodes until all shards are done, or none of the nodes is left."""
        workers = [Worker(member) for member in members]
        while workers and (self.waiting or any(worker.job is not None for worker in workers)):
            for worker in list(workers):
                try:
                    self._continue(worker)
                except NodeLost as lost:
                    self.waiting.appendleft(worker.shard)
                    workers.remove(worker)
                    # The process and the private folder end, if only the process died.
                    ray.kill(worker.member.actor)
                    self._count(lost)
            time.sleep(POLL_S)

    def _continue(self, worker: Worker) -> None:
        """Give an idle worker a shard, or collect what it has done."""
        if worker.job is not None:
            worker.job = None if worker.job.poll() else worker.job
        elif self.waiting:
            worker.shard = self.waiting.popleft()
            root = worker.member.facts.root
            spec = spec_at(root, self.spec, self.files, self.shards[worker.shard]).model_dump_json()
            job = Job("grpo_tasks.rollout", f"shard-{worker.shard}", spec, MIRRORED)
            inbox = Inbox(self.directory, MIRRORED, partial(self._take, worker.shard))
            worker.job = RunningJob([worker.member], [job], inbox, worker.member.facts.name)

    def _take(self, shard: int, _: str, path: Path) -> None:
        self.tables[shard] = pl.read_parquet(path)
        self.count.add()
        # Only the log of a worker goes into the folder of the step.
        raise Refused

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
    print(happened, flush=True)


def main(directory: Path) -> None:
    """Sample the completions and write the table."""
    spec = SampleSpec.load(directory / SPEC)
    with connected(spec.resources.cluster.address):
        SamplingSupervisor(directory.resolve(), spec).sample().write_parquet(directory / SAMPLES)


if __name__ == "__main__":
    run_child(main)

"""`python -m grpo_tasks.cluster.stage STAGE_DIR`: trains a stage on the nodes of a Ray cluster, or resumes it.

When a node, an actor or a rank dies, the attempt ends with an event of the stage, nodes are reserved again, and the next attempt
begins: the ranks of a stage can only go on together, from a checkpoint that all of them read.
"""

import json
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ray.util.placement_group import PlacementGroup

from grpo_tasks.cluster.connect import connected
from grpo_tasks.cluster.jobs import Job, Member, NodeLost, RunningJob, ask_each, job_nodes
from grpo_tasks.cluster.mirror import Inbox, Mirrored, Refused
from grpo_tasks.cluster.parcel import (
    INPUTS,
    MODULES,
    ParcelFile,
    folder_files,
    interaction_at,
    model_at,
    model_files,
    module_files,
)
from grpo_tasks.cluster.placement import Demand, Reservation, ReservationConflict, Share
from grpo_tasks.cluster.servers import ClusterServers, ServerAddress
from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.content.modules import own_sources
from grpo_tasks.judging.store import LOCAL_RANKS
from grpo_tasks.processes.child import run_child
from grpo_tasks.stage.checkpoint import is_intact
from grpo_tasks.stage.journal import Events, Journal
from grpo_tasks.stage.run import TRAINER
from grpo_tasks.stage.stage_dir import OWN_DISK, StageDir, StageSpec
from schemas.config.operations import ClusterConfig
from schemas.errors import TrainingError
from schemas.paths import resolve
from schemas.results.model import StageResult

POLL_S = 0.25
REPLACED_S = 1_800.0
"""Longest wait for a rollout server that replaces one: a node may have to be waited for, and vLLM takes a minute."""
TRAIN, EVAL = f"{INPUTS}/train.parquet", f"{INPUTS}/eval.parquet"
CHECKPOINTS = "checkpoints"
MIRRORED = Mirrored(
    lines=("metrics.jsonl", "events.jsonl"),
    # A checkpoint counts on the best weights. The result, which marks the stage as finished, comes last.
    complete=("token_budget.json", "completions/*.parquet", "best", "final", f"{CHECKPOINTS}/step-*", "result.json"),
    tidied=CHECKPOINTS,
)
"""What comes back from the node of rank 0. The others send their log only."""


def stage_files(spec: StageSpec, directory: StageDir) -> tuple[ParcelFile, ...]:
    """The inputs of the stage and everything that it has made so far, with hashes."""
    files = [ParcelFile.of(TRAIN, spec.train)]
    if spec.eval is not None:
        files.append(ParcelFile.of(EVAL, spec.eval))
    files += model_files(spec.start)
    rewards, demonstrations = spec.rewards, spec.stage.demonstrations
    modules = own_sources(rewards.references, rewards.module_dirs())
    modules |= own_sources(spec.interaction.own_code, spec.interaction.module_dirs())
    if demonstrations is not None and demonstrations.function:
        modules |= own_sources([demonstrations.function], demonstrations.module_dirs())
    files += module_files(modules)
    files += [ParcelFile.of(p.name, p) for p in (directory.journal, directory.events, directory.token_budget) if p.exists()]
    return (*files, *folder_files(CHECKPOINTS, directory.checkpoints), *folder_files("best", directory.best))


def spec_at(
    root: Path, spec: StageSpec, files: Sequence[ParcelFile], *, ranks: int, servers: Sequence[ServerAddress] = ()
) -> StageSpec:
    """The specification with the paths of a node, for as many ranks and with these rollout servers."""
    model, start = model_at(root, spec.model, spec.start, files)
    changes: dict[str, object] = {
        "train": root / TRAIN,
        "eval": None if spec.eval is None else root / EVAL,
        "model": model,
        "start": start,
        "rewards": spec.rewards.model_copy(update={"module_dir": root / MODULES}),
        "resources": spec.resources.model_copy(update={"num_processes": ranks, "cluster": ClusterConfig()}),
        "interaction": interaction_at(root, spec.interaction),
    }
    if spec.stage.demonstrations is not None:
        here = spec.stage.demonstrations.model_copy(update={"module_dir": root / MODULES})
        changes["stage"] = spec.stage.model_copy(update={"demonstrations": here})
    if servers:
        vllm = spec.rollout.vllm
        # The driver replaces a server that is lost, so the trainers wait for it.
        urls: dict[str, object] = {"patience_s": max(vllm.patience_s, REPLACED_S)}
        urls |= {"base_urls": [each.url for each in servers], "weights_urls": [each.weights_url for each in servers]}
        changes["rollout"] = spec.rollout.model_copy(update={"vllm": vllm.model_copy(update=urls)})
    return spec.model_copy(update=changes)


def rank_environments(address: str, port: int, node: int, local: int, ranks: int) -> tuple[dict[str, str], ...]:
    """What the `local` processes of a node need to find all `ranks`, at address and port of rank 0."""
    if ranks == 1:
        return ({},)
    shared = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), LOCAL_RANKS: str(local), OWN_DISK: "1"}
    return tuple(shared | {"RANK": str(node * local + rank), "LOCAL_RANK": str(rank)} for rank in range(local))


def store(directory: StageDir, spec: StageSpec, node_base: str, name: str, path: Path) -> None:
    """Make what has arrived from a node, at `path`, that of a stage on this machine; `Refused` for an incomplete checkpoint.

    peft writes `node_base`, the path of the base model on the node, into adapter_config.json.
    """
    if name.startswith(CHECKPOINTS) and not is_intact(path):
        raise Refused
    config = path / "adapter_config.json"
    if name in ("final", "best") and config.exists():
        # The file keeps its layout.
        text = config.read_text(encoding="utf-8").replace(json.dumps(node_base), json.dumps(resolve(spec.start.path)))
        config.write_text(text, encoding="utf-8")
    if name == "result.json":
        result = StageResult.load(path).moved_to(directory.root)
        # Its hash is that of the weights as they are here.
        changes: dict[str, object] = {"sha256": folder_sha256(directory.final)}
        if spec.model.lora is not None:
            changes |= {"path": spec.start.path}
        result.model_copy(update={"model": result.model.model_copy(update=changes)}).save(path)


class StageSupervisor:
    """Trains the stage of a stage directory on the cluster that this process has joined."""

    def __init__(self, directory: StageDir, spec: StageSpec) -> None:
        self.dir, self.spec = directory, spec
        self.cluster = spec.resources.cluster
        self.name = f"grpo {directory.root.parent.parent.name} {spec.stage.name}"
        self.restarts = 0
        self._wait_report = partial(self._report, "cluster")

    def train(self) -> None:
        """Attempt until the stage is finished. Nodes and servers are reserved together; servers stay while nodes are replaced.

        `TrainingError` where more died than `max_restarts` allows; another `UserError` where a rank left it, nodes differ, or the
        cluster is too small.
        """
        demand = Demand.of_stage(self.spec.resources, self.spec.rollout)
        while not self.dir.result.exists():
            with closing(Reservation(self.name, demand, self._wait_report, self.cluster.replacement_wait_s)) as held:
                try:
                    nodes, room = held.reserve(fewer=self.restarts > 0), held.servers
                    own = nullcontext() if room is None else ClusterServers(self.spec, room, demand.server, self._wait_report)
                    with own as servers:
                        while not self._attempt(nodes, demand.share, servers):
                            nodes = held.reserve(fewer=True)
                except ReservationConflict as conflict:
                    self._wait_report(f"{conflict}; releases what it has, and tries again")

    def _attempt(self, nodes: PlacementGroup, share: Share, servers: ClusterServers | None) -> bool:
        """Whether the stage was trained on these nodes; if something died, that is reported."""
        # Opening both cuts off an incomplete last line that a killed driver left.
        Journal(self.dir.journal), Events(self.dir.events)
        files = stage_files(self.spec, self.dir)
        try:
            with job_nodes(nodes, share, files) as members:
                job = self._start(members, files, servers)
                while not job.poll():
                    for server in [] if servers is None else servers.check():
                        ask_each(members, "append", self.dir.servers.name, json.dumps(asdict(server)))
                    time.sleep(POLL_S)
            if not self.dir.result.exists():
                raise NodeLost("all ranks ended, but the result did not arrive")
            return True
        except NodeLost as lost:
            self.restarts += 1
            self._report("node_lost", f"{lost}; restart {self.restarts} of {self.cluster.max_restarts}")
            if self.restarts > self.cluster.max_restarts:
                raise TrainingError(
                    f"the stage was interrupted {self.restarts} times, the last time because {lost}",
                    place=str(self.dir.log),
                    fix="see the end of the log and `grpo cluster`; the same command resumes from the last checkpoint; "
                    "resources.cluster.max_restarts allows more interruptions",
                ) from lost
            return False

    def _start(self, members: Sequence[Member], files: Sequence[ParcelFile], servers: ClusterServers | None) -> RunningJob:
        first, local = members[0], self.cluster.processes_per_node
        port, ranks = first.ask("free_port"), local * len(members)
        # Ranks that are given no server would start some of their own.
        given = () if servers is None else servers.wait_for_one()
        key = {} if servers is None else servers.environment
        jobs = []
        for number, member in enumerate(members):
            spec = spec_at(member.facts.root, self.spec, files, ranks=ranks, servers=given)
            environments = rank_environments(first.facts.address, port, number, local, ranks)
            mirrored = Mirrored() if number else MIRRORED
            environments = tuple(rank | key for rank in environments)
            jobs.append(Job(TRAINER, "", spec.model_dump_json(), mirrored, environments))
        base = first.ask("resolve", model_at(first.facts.root, self.spec.model, self.spec.start, files)[1].path)
        inbox = Inbox(self.dir.root, MIRRORED, partial(store, self.dir, self.spec, base))
        return RunningJob(members, jobs, inbox, str(self.dir.root))

    def _report(self, event: str, detail: str) -> None:
        """An event of the stage: the step shows it in the log and in Prefect and sends it to MLflow."""
        Events(self.dir.events).append(Journal(self.dir.journal).last_step, event, detail)


def main(root: Path) -> None:
    """Train the stage; a finished one is left as it is."""
    directory = StageDir(root.resolve())
    if directory.result.exists():
        return
    spec = StageSpec.load(directory.spec)
    with connected(spec.resources.cluster.address):
        StageSupervisor(directory, spec).train()


if __name__ == "__main__":
    run_child(main)

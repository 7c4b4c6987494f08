"""A stage on two nodes loses a rank, its actor, a node and the driver. It ends in the bytes of two local processes."""

import json
import random
import subprocess
import sys
import time

import pytest
from mlflow import MlflowClient

from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageSpec
from grpo_tasks.tracking.runs import open_run
from schemas.config.run import RunConfig
from tests.cluster.processes import MARK, not_of_ray, running
from tests.processes.waiting import until

pytestmark = [pytest.mark.xdist_group("heavy"), pytest.mark.long, pytest.mark.timeout(3600)]

UPDATES = 8
TRAINING = {"max_steps": UPDATES, "save_steps": 2, "learning_rate": 3e-3}


def command(directory):
    return [sys.executable, "-P", "-m", "grpo_tasks.cluster.stage", str(directory.root)]


def ranks():
    return running("grpo_tasks.grpo")


def journal(directory):
    if not directory.journal.exists():
        return []
    return [json.loads(line)["step"] for line in directory.journal.read_bytes().split(b"\n")[:-1]]


def private_folders(nodes):
    return [path for root in nodes.folder.glob("node-*") for path in (root / "tmpdir").glob("grpo-stage-*")]


class Stage:
    """One stage on the cluster, trained by a driver in a process of its own."""

    def __init__(self, stages, nodes, name):
        cluster = {"engine": "ray", "address": nodes.address, "num_nodes": 2, "max_restarts": 20, "replacement_wait_s": 120}
        self.directory = stages.write(name, resources={"cluster": cluster}, **TRAINING)
        self.nodes, self.driver, self.starts = nodes, None, 0

    def start(self):
        self.starts += 1
        with self.directory.log.open("ab") as log:
            self.driver = subprocess.Popen(command(self.directory), stdout=log, stderr=log)

    def run(self, *kills, tick=lambda: None):
        """Train to the end; for each (after, kill), in order, call `kill` when `after` updates are in the journal. A driver that
        died is started again.
        """
        waiting, old = list(kills), set()
        self.start()
        while self.driver.poll() is None or not self.directory.result.exists():
            if self.driver.poll() is not None:
                assert self.driver.returncode < 0, self.directory.log.read_text()[-3000:]
                self.left_nothing()
                self.start()
            if waiting and len(journal(self.directory)) >= waiting[0][0]:
                # Those of the kill before are ending.
                now = {rank.pid for rank in ranks()}
                if now and now.isdisjoint(old):
                    old = now
                    waiting.pop(0)[1](self)
            tick()
            time.sleep(0.05)
        assert self.driver.returncode == 0, self.directory.log.read_text()[-3000:]
        assert not waiting, "it ended before it was killed"
        self.left_nothing()
        return json.loads(self.directory.result.read_text())["sha256"]

    def left_nothing(self):
        """Whoever has ended, driver or stage, leaves no process and no folder on the nodes."""
        until(lambda: not not_of_ray())
        until(lambda: not private_folders(self.nodes))


def kill_rank(stage):
    random.Random(stage.directory.root.name).choice(ranks()).kill()


def kill_actor(_):
    ranks()[0].parent().kill()


def kill_node(stage):
    node = stage.nodes.made.pop(0)
    stage.nodes.remove(node)
    stage.nodes.made.append(stage.nodes.add(**MARK))


def kill_driver(stage):
    stage.driver.kill()


KILLS = {"rank": kill_rank, "actor": kill_actor, "node": kill_node, "driver": kill_driver}


def test_a_stage_that_loses_everything_once_ends_in_the_local_bytes(nodes, stages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    local = StageSpec.load(stages.write("local", resources={"num_processes": 2}, **TRAINING).spec)
    whole = run_stage(local, tmp_path / "local-run").sha256
    nodes.made = [nodes.add(**MARK) for _ in range(2)]
    stage, chance = Stage(stages, nodes, "killed"), random.Random(20261124)
    victims = chance.sample([*KILLS], len(KILLS))
    kills = [(2 * number + chance.randrange(2), KILLS[victim]) for number, victim in enumerate(victims)]
    config = RunConfig(
        name="kills",
        data={"train": [{"path": "train.jsonl"}]},
        stages=[{"name": "s", "rewards": ["format"], "max_steps": UPDATES}],
        tracking={"tracking_uri": f"sqlite:///{tmp_path / 'mlflow.db'}"},
    )
    with open_run(config, key="kills") as run:
        followed = []

        def ship():
            # A step that is tried again, because its driver died, follows the journal from its beginning.
            if len(followed) < stage.starts:
                followed.append(run.follow(stage.directory.root))
            followed[-1].ship()

        assert stage.run(*kills, tick=ship) == whole, (victims, kills)
        followed[-1].finish()
    assert len(followed) == 2, "the driver died once"
    assert stage.directory.events.read_text().count("node_lost") >= len(KILLS) - 1, "all but the driver are on a node"
    assert journal(stage.directory) == list(range(1, UPDATES + 1))
    assert not list(stage.directory.root.rglob(".*.part"))
    client = MlflowClient(config.tracking.tracking_uri)
    [child] = [
        each
        for each in client.search_runs([client.get_experiment_by_name("kills").experiment_id])
        if each.data.tags.get("grpo.stage") == "s"
    ]
    for metric in ("reward", "learning_rate"):
        assert [point.step for point in client.get_metric_history(child.info.run_id, metric)] == list(range(1, UPDATES + 1))

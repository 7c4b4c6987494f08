"""A stage on two nodes, killed at seeded points: a rank, its actor, a node, the driver. It ends in the same bytes."""

import json
import os
import random
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

pytestmark = [pytest.mark.xdist_group("heavy"), pytest.mark.long, pytest.mark.timeout(3600)]

OWN, UPDATES = "GRPO_TEST_KILLS_OF", 8
VICTIMS = ("rank", "actor", "node", "driver") * 5


def command(directory):
    return [sys.executable, "-P", "-m", "grpo_tasks.cluster", str(directory.root)]


def of_this_test():
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(OWN) == str(os.getpid()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def ranks():
    found = []
    for process in of_this_test():
        # It may end at any moment.
        with suppress(psutil.Error):
            if process.cmdline()[1:4] == ["-P", "-m", "grpo_tasks.grpo"]:
                found.append(process)
    return found


def journal(directory):
    if not directory.journal.exists():
        return []
    return [json.loads(line)["step"] for line in directory.journal.read_bytes().split(b"\n")[:-1]]


def private_folders(nodes):
    return [path for root in nodes.folder.glob("node-*") for path in (root / "tmpdir").glob("grpo-stage-*")]


def soon(condition, limit_s=120):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


class Stage:
    """One stage on the cluster, trained by a driver in a process of its own."""

    def __init__(self, stages, nodes, name):
        cluster = {"engine": "ray", "address": nodes.address, "num_nodes": 2, "max_restarts": 20, "replacement_wait_s": 120}
        settings = {"max_steps": UPDATES, "save_steps": 2, "learning_rate": 3e-3, "resources": {"cluster": cluster}}
        self.directory = stages.write(name, **settings)
        self.nodes, self.driver = nodes, None

    def start(self):
        with self.directory.log.open("ab") as log:
            self.driver = subprocess.Popen(command(self.directory), stdout=log, stderr=log)

    def run(self, kill=None, after=0):
        """Train to the end; when `after` updates are in the journal, call `kill`, and start the driver again if it died."""
        self.start()
        while self.driver.poll() is None or not self.directory.result.exists():
            if self.driver.poll() is not None:
                assert self.driver.returncode < 0, self.directory.log.read_text()[-3000:]
                soon(lambda: not ranks())
                self.start()
            if kill is not None and len(journal(self.directory)) >= after and ranks():
                kill(self)
                kill = None
            time.sleep(0.05)
        assert self.driver.returncode == 0, self.directory.log.read_text()[-3000:]
        assert kill is None, "it ended before it was killed"
        return json.loads(self.directory.result.read_text())["sha256"]


def kill_rank(stage):
    random.Random(stage.directory.root.name).choice(ranks()).kill()


def kill_actor(_):
    ranks()[0].parent().kill()


def kill_node(stage):
    node = stage.nodes.made.pop(0)
    stage.nodes.remove(node)
    stage.nodes.made.append(stage.nodes.add(**{OWN: str(os.getpid())}))


def kill_driver(stage):
    stage.driver.kill()


KILLS = {"rank": kill_rank, "actor": kill_actor, "node": kill_node, "driver": kill_driver}


def test_twenty_kills_end_in_the_same_bytes_and_leave_nothing(nodes, stages):
    nodes.made = [nodes.add(**{OWN: str(os.getpid())}) for _ in range(2)]
    whole = Stage(stages, nodes, "whole").run()
    chance = random.Random(20261123)
    for number, victim in enumerate(VICTIMS):
        stage = Stage(stages, nodes, f"{victim}-{number}")
        after = chance.randrange(UPDATES - 1)
        assert stage.run(KILLS[victim], after) == whole, (victim, after)
        assert journal(stage.directory) == list(range(1, UPDATES + 1)), (victim, after)
        if victim != "driver":
            assert "node_lost" in stage.directory.events.read_text()
        soon(lambda: not ranks())
        soon(lambda: not private_folders(nodes))
        assert not list(stage.directory.root.rglob(".part-*"))


def test_a_driver_that_dies_for_good_leaves_no_process_and_no_folder_on_any_node(nodes, stages):
    nodes.made = [nodes.add(**{OWN: str(os.getpid())}) for _ in range(2)]
    stage = Stage(stages, nodes, "alone")
    stage.start()
    soon(lambda: len(journal(stage.directory)) >= 2)
    assert len(ranks()) == 2
    stage.driver.kill()
    stage.driver.wait()
    soon(lambda: not ranks())
    soon(lambda: not private_folders(nodes))

"""Ctrl-C in a terminal, where every process of the command gets the signal, and no server is configured."""

import os
import re
import signal
import subprocess

import psutil
import pytest
import yaml

from tests.flows.place import BIN, SMALL, Place, wait_for_step

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("interrupted"), pytest.mark.timeout(1800)]

UPDATES = 60
CONFIG = SMALL | {"stages": [SMALL["stages"][0] | {"max_steps": UPDATES, "save_steps": 5}]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("interrupted"))
    place.write("small.yaml", yaml.safe_dump(CONFIG))
    return place


def started(place):
    """The command as a shell starts it: leader of a process group."""
    return subprocess.Popen(
        [BIN / "grpo", "run", "small.yaml"],
        cwd=place.root,
        env=place.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def in_its_stage(place, process, step):
    """Wait for this update; every process that the command has started by then, its temporary server included."""
    wait_for_step("runs/small/train_stage/*/metrics.jsonl", place.root, step, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("uvicorn" in " ".join(one.cmdline()) for one in family)
    return family


def alive(family):
    return [one.cmdline() for one in psutil.wait_procs(family, timeout=60)[1]]


def test_ctrl_c_says_from_where_the_same_command_continues_and_leaves_nothing(place):
    process = started(place)
    family = in_its_stage(place, process, 12)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output[-3000:]
    said = re.search(r"^stopped; the same command continues from update (\d+) of stage format$", output, re.M)
    assert said, output[-3000:]
    assert "Traceback" not in output
    assert "ConnectError" not in output
    assert alive(family) == []
    assert place.parent("small").info.status == "KILLED"
    [journal] = place.root.glob("runs/small/train_stage/*/metrics.jsonl")
    known = journal.read_text().splitlines()
    assert 10 < int(said[1]) <= len(known) + 1


def test_the_temporary_server_ends_with_a_command_that_is_killed(place):
    process = started(place)
    [journal] = place.root.glob("runs/small/train_stage/*/metrics.jsonl")
    family = in_its_stage(place, process, len(journal.read_text().splitlines()) + 2)
    process.kill()
    process.communicate(timeout=60)
    assert alive(family) == []

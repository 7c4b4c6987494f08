"""Runs that are killed, interrupted, started twice at once, or out of disk: the same command continues, and learns as ever."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
import yaml

from grpo_tasks.stage.checkpoint import is_intact
from schemas.results.model import StageResult
from tests.flows.place import BIN, SMALL, Place, wait_for_step
from tests.flows.test_demo import assert_learnt
from tests.flows.test_ui import FLOW
from tests.tracking.test_report_to import tensorboard_runs

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.xdist_group("demo")
def test_a_killed_demo_resumes_and_learns_with_another_seed_too(tmp_path_factory, prefect_api):
    place = Place(tmp_path_factory.mktemp("killed"), prefect_api)
    command = ("run", "demo", "--set", "seed=7", "--set", "tracking.report_to=tensorboard")
    process = place.start(*command)
    stage_dir = wait_for_step("runs/grpo-demo/train_stage/format-*/metrics.jsonl", place.root, 25, process)
    family = psutil.Process(process.pid).children(recursive=True)
    ours = [child for child in family if "grpo_tasks" in " ".join(child.cmdline())]
    assert ours
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(ours, timeout=60)
    assert not alive
    place.grpo(*command)
    result = StageResult.load(stage_dir / "result.json")
    assert result.resumed == 1
    steps = [json.loads(line)["step"] for line in (stage_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, result.steps + 1))
    child = place.child("format")
    shipped = [point.step for point in place.client.get_metric_history(child.info.run_id, "reward")]
    assert shipped == steps
    reported = tensorboard_runs(place.root / "runs" / "grpo-demo")
    [format_run] = [seen for name, seen in reported.items() if name.startswith("format-")]
    assert [step for step, *_ in format_run] == steps
    assert len(reported) == 2
    assert_learnt(place.parent())


UPDATES = 60
CONFIG = SMALL | {"stages": [SMALL["stages"][0] | {"max_steps": UPDATES, "save_steps": 5}]}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
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


@pytest.mark.xdist_group("interrupted")
def test_ctrl_c_says_from_where_the_same_command_continues_and_leaves_nothing(interrupted):
    place = interrupted
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


@pytest.mark.xdist_group("interrupted")
def test_the_temporary_server_ends_with_a_command_that_is_killed(interrupted):
    place = interrupted
    process = started(place)
    [journal] = place.root.glob("runs/small/train_stage/*/metrics.jsonl")
    family = in_its_stage(place, process, len(journal.read_text().splitlines()) + 2)
    process.kill()
    process.communicate(timeout=60)
    assert alive(family) == []


@pytest.mark.xdist_group("interrupted")
def test_the_same_command_continues_to_the_end(interrupted):
    place = interrupted
    place.grpo("run", "small.yaml")
    [result] = place.root.glob("runs/small/train_stage/*/result.json")
    # Not begun anew; a start that was killed before its first checkpoint is not counted.
    assert StageResult.load(result).resumed in (1, 2)
    journal = (result.parent / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in journal] == list(range(1, UPDATES + 1))
    assert place.parent("small").info.status == "FINISHED"


KILLS, SECONDS = 6, 10.0


@pytest.fixture
def empty(tmp_path):
    def place(name="place"):
        (tmp_path / name).mkdir()
        made = Place(tmp_path / name)
        made.write("small.yaml", yaml.safe_dump(SMALL))
        return made

    return place


def kill_all(process):
    """Kill the command and every process that it has started, as when the machine goes down."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.communicate()


@pytest.mark.xdist_group("first")
@pytest.mark.parametrize("number", range(KILLS))
def test_a_first_run_killed_in_its_first_seconds_works_the_second_time(empty, number):
    """Both databases are made in these seconds. The second time, one runs the whole pipeline; for the others a flow will do."""
    place = empty()
    process = place.start("run", "small.yaml")
    with suppress(psutil.TimeoutExpired):
        psutil.Process(process.pid).wait((number + random.Random(number).random()) * SECONDS / KILLS)
    kill_all(process)
    if number == KILLS - 1:
        place.grpo("run", "small.yaml")
        assert place.parent("small").info.status == "FINISHED"
        assert place.child("format", "small").info.status == "FINISHED"
    else:
        subprocess.run([sys.executable, "-c", FLOW], cwd=place.root, env=place.environment, check=True, timeout=900)
        assert "FINISHED" in {run.info.status for run in place.runs("small")}


@pytest.mark.xdist_group("first")
@pytest.mark.parametrize("attempt", range(2))
def test_two_pipelines_at_once_in_one_empty_folder_both_complete(empty, attempt):
    place, seeds = empty(), (7, 7 + attempt % 2)
    both = [place.start("run", "small.yaml", "--set", f"seed={seed}") for seed in seeds]
    outputs = [process.communicate(timeout=900)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(output[-3000:] for output in outputs)
    parents = [run for run in place.runs("small") if "mlflow.parentRunId" not in run.data.tags]
    assert len(parents) == len(set(seeds))
    assert {run.info.status for run in place.runs("small")} == {"FINISHED"}
    versions = place.client.search_model_versions("name='small'")
    assert len(versions) == len(set(seeds))
    assert len({version.tags["grpo.sha256"] for version in versions}) == len(versions)


STAGE = SMALL["stages"][0] | {"max_steps": 60, "save_steps": 5, "save_total_limit": 3}


@pytest.fixture
def small_disk(place):
    """`runs` in the working directory is a file system of its own."""
    folder = place.root / "runs"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(path):
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


@pytest.mark.xdist_group("away")
def test_a_full_disk_is_reported_and_the_last_checkpoint_is_complete(place, small_disk):
    place.write("small.yaml", yaml.safe_dump(SMALL | {"stages": [STAGE]}))
    process = place.start("run", "small.yaml")
    stage_dir = wait_for_step("runs/small/train_stage/*/metrics.jsonl", place.root, 12, process)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        fill(filler)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 1, output
    assert "the disk is full" in output
    assert "it continues from the last complete checkpoint" in output
    checkpoints = sorted((stage_dir / "checkpoints").iterdir())
    assert checkpoints
    assert all(is_intact(checkpoint) for checkpoint in checkpoints)
    assert place.parent("small").info.status == "FAILED"

    more = small_disk / "more"
    with pytest.raises(OSError, match="No space left"):
        fill(more)
    assert "the disk is full" in place.grpo("run", "small.yaml", expect=1)

    more.unlink()
    filler.unlink()
    place.grpo("run", "small.yaml")
    result = StageResult.load(stage_dir / "result.json")
    assert (result.steps, result.resumed) == (60, 1)
    steps = [json.loads(line)["step"] for line in (stage_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 61))

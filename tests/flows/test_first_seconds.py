"""A first run in an empty folder without any server: killed in its first ten seconds, or started twice at once."""

import random
from contextlib import suppress

import psutil
import pytest
import yaml

from tests.flows.place import SMALL, Place

pytestmark = [pytest.mark.xdist_group("first"), pytest.mark.long, pytest.mark.timeout(1800)]

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


@pytest.mark.parametrize("number", range(KILLS))
def test_a_first_run_killed_in_its_first_seconds_works_the_second_time(empty, number):
    place = empty()
    process = place.start("run", "small.yaml")
    with suppress(psutil.TimeoutExpired):
        psutil.Process(process.pid).wait((number + random.Random(number).random()) * SECONDS / KILLS)
    kill_all(process)
    place.grpo("run", "small.yaml")
    assert place.parent("small").info.status == "FINISHED"
    assert place.child("format", "small").info.status == "FINISHED"


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

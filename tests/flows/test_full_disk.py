"""A disk that fills up while a stage trains: a real one, of a few megabytes."""

import json
import subprocess

import pytest
import yaml

from grpo_tasks.stage.checkpoint import is_intact
from schemas.results.model import StageResult
from tests.flows.place import SMALL, wait_for_step

pytestmark = [pytest.mark.xdist_group("away"), pytest.mark.long]

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

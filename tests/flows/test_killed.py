"""kill -9, then the same command: the run resumes, repeats nothing, loses nothing, and ends in the same bytes."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from grpo_tasks.content.hashes import file_sha256
from grpo_tasks.grpo.__main__ import main
from schemas.results.model import StageResult
from tests.flows.test_demo import assert_learnt
from tests.kill_at import PROCESSES

pytestmark = [pytest.mark.xdist_group("demo"), pytest.mark.timeout(1800)]


def wait_for_step(pattern, root, step, process, limit_s=600):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for journal in root.glob(pattern):
            if len(journal.read_text().splitlines()) >= step:
                return journal.parent
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    raise AssertionError(f"no update {step} within {limit_s} s")


@pytest.mark.long
def test_a_killed_demo_resumes_and_learns_with_another_seed_too(tmp_path_factory):
    from tests.flows.place import Place

    place = Place(tmp_path_factory.mktemp("killed"))
    command = ("run", "demo", "--set", "seed=7")
    process = place.start(*command)
    stage_dir = wait_for_step("runs/grpo-demo/train_stage/format-*/metrics.jsonl", place.root, 25, process)
    family = psutil.Process(process.pid).children(recursive=True)
    ours = [child for child in family if "grpo_tasks" in " ".join(child.cmdline())]
    assert ours
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(ours, timeout=60)
    assert not alive
    # Prefect's temporary server does not notice that its command has gone.
    for child in psutil.wait_procs(family, timeout=0)[1]:
        child.terminate()

    place.grpo(*command)
    result = StageResult.load(stage_dir / "result.json")
    assert result.resumed == 1
    steps = [json.loads(line)["step"] for line in (stage_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, result.steps + 1))
    child = place.child("format")
    shipped = [point.step for point in place.client.get_metric_history(child.info.run_id, "reward")]
    assert shipped == steps
    assert_learnt(place.parent())


@pytest.fixture
def stage_dir(tmp_path, demo):
    """The demo's first stage, shortened, as a directory ready to be trained."""
    from grpo_tasks.stage.stage_dir import StageSpec

    place, _ = demo
    [spec] = place.root.glob("runs/grpo-demo/train_stage/format-*/spec.json")
    spec = StageSpec.load(spec)
    stage = spec.stage.model_copy(
        update={
            "max_steps": 9,
            "save_steps": 3,
            "log_completions_steps": 5,
            "num_generations": 4,
            "per_device_train_batch_size": 8,
        }
    )

    def make(name, **changes):
        directory = tmp_path / name
        directory.mkdir()
        spec.model_copy(update={"stage": stage.model_copy(update=changes)}).save(directory / "spec.json")
        return directory

    return make


def train(directory, kill_at=None):
    """Train the stage in a process of its own, forked where the libraries are loaded, as the step does it."""
    process, journal = PROCESSES.Process(target=main, args=(directory,)), directory / "metrics.jsonl"
    process.start()
    if kill_at:
        while not journal.exists() or journal.read_text().count("\n") < kill_at:
            assert process.is_alive()
            time.sleep(0.01)
        process.kill()
    process.join(900)
    assert process.exitcode == (-signal.SIGKILL if kill_at else 0)


def adapter(directory: Path):
    return file_sha256(directory / "final" / "adapter_model.safetensors")


@pytest.mark.long
def test_the_same_seed_twice_gives_byte_identical_adapters(stage_dir):
    one, two = stage_dir("one"), stage_dir("two")
    train(one)
    train(two)
    assert adapter(one) == adapter(two)


@pytest.mark.long
@pytest.mark.ci
@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2, "beta": 0.05}])
def test_a_stage_that_is_killed_and_restarted_ends_in_the_same_bytes(stage_dir, changes):
    whole, killed = stage_dir("whole", **changes), stage_dir("killed", **changes)
    train(whole)
    train(killed, kill_at=5)
    assert not (killed / "result.json").exists()
    train(killed)
    assert adapter(killed) == adapter(whole)
    assert StageResult.load(killed / "result.json").resumed == 1

"""kill -9, then the same command: the run resumes, repeats nothing, loses nothing, and learns as ever."""

import json
import signal

import psutil
import pytest

from schemas.results.model import StageResult
from tests.flows.place import Place, wait_for_step
from tests.flows.test_demo import assert_learnt

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("demo"), pytest.mark.timeout(1800)]


def test_a_killed_demo_resumes_and_learns_with_another_seed_too(tmp_path_factory):
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
    place.grpo(*command)
    result = StageResult.load(stage_dir / "result.json")
    assert result.resumed == 1
    steps = [json.loads(line)["step"] for line in (stage_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, result.steps + 1))
    child = place.child("format")
    shipped = [point.step for point in place.client.get_metric_history(child.info.run_id, "reward")]
    assert shipped == steps
    assert_learnt(place.parent())

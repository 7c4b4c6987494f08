"""The whole chain on a real pretrained model of 30 layers and 49,152 tokens: two updates of each stage, killed and resumed."""

import signal
import time

import psutil
import pytest
import yaml

from schemas.results.data import LabReport
from schemas.results.evaluation import EvalReport
from schemas.results.model import StageResult
from tests.flows.contents import contents, differences
from tests.flows.place import SMALL, Place, wait_for_step

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(7200)]

STAGE = SMALL["stages"][0] | {"max_steps": 2, "num_generations": 2, "per_device_train_batch_size": 4, "save_steps": 1}
REWARD = """
def letters(completions, **columns):
    return [len(set(completion[0]["content"])) / 100 for completion in completions]
"""
"""Differs within nearly every group: two updates of a real model find no format by themselves, and would change nothing."""
SAME = ("status", "events", "adapters", "merged", "samples", "versions")


def config_of(model):
    return SMALL | {
        "model": {"path": str(model), "dtype": "bfloat16", "lora": {"r": 4, "lora_alpha": 8}},
        "rollout": {"max_completion_length": 12},
        "rewards": {"functions": {"letters": {"function": "rewards:letters"}}},
        "stages": [
            STAGE | {"rewards": ["incremental_format", "format", "letters"]},
            STAGE | {"name": "correctness", "rewards": ["format", "correctness", "letters"]},
        ],
        "evaluation": {"max_prompts": 2, "num_samples": 1, "greedy": False, "stages": False, "max_truncated": 1.0},
        "lab": {"num_rows": 2, "num_prompts": 2},
    }


def test_a_real_model_goes_through_the_chain_and_survives_a_kill(real_model, tmp_path_factory, prefect_api):
    whole, killed = (Place(tmp_path_factory.mktemp(name), prefect_api) for name in ("whole", "killed"))
    for place in (whole, killed):
        place.write("rewards.py", REWARD)
        place.write("small.yaml", yaml.safe_dump(config_of(real_model)))
    process = killed.start("run", "small.yaml")
    stage_dir = wait_for_step("runs/small/train_stage/correctness-*/metrics.jsonl", killed.root, 1, process, limit_s=3600)
    while not list(stage_dir.glob("checkpoints/step-*")):
        # The journal has an update before its checkpoint is complete.
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs([child for child in family if "grpo_tasks" in " ".join(child.cmdline())], timeout=60)
    assert not alive
    for place in (killed, whole):
        place.grpo("run", "small.yaml", timeout=3600)
    assert StageResult.load(stage_dir / "result.json").resumed == 1
    found, wanted = ({name: contents(place)[name] for name in SAME} for place in (killed, whole))
    assert not differences(found, wanted, "killed and resumed")
    assert [steps for _, steps in wanted["adapters"].values()] == [2, 2]
    assert len({sha256 for sha256, _ in wanted["adapters"].values()}) == 2
    assert len(wanted["merged"]) == len(wanted["versions"]) == 1
    [lab] = whole.root.glob("runs/small/probe_rewards/*/result.json")
    assert {one.stage for one in LabReport.load(lab).forecasts} == {"format", "correctness"}
    reports = [EvalReport.load(path) for path in whole.root.glob("runs/small/evaluate_model/*/result.json")]
    assert {report.label: report.prompts for report in reports} == {"base": 2, "correctness": 2, "merged": 2}

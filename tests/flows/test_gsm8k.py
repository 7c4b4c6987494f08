"""The real data through validation, lab, four updates, merge and publication (with the embedded model and tokenizer)."""

import json
import re

import polars as pl
import pytest
import yaml

from schemas.config.load import PRESETS
from schemas.results.data import DataReport, LabReport

pytestmark = [pytest.mark.xdist_group("commands"), pytest.mark.timeout(900)]


@pytest.fixture
def config(real_data, place):
    preset = yaml.safe_load((PRESETS / "gsm8k-qwen2.5-0.5b.yaml").read_text())
    data = preset["data"]
    for side, name in (("train", "train"), ("eval", "test")):
        data[side] = [{"path": str(real_data / "gsm8k" / f"{name}.jsonl")}]
    stages = [
        stage | {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
                 "optim": "adamw_torch", "early_stop": None, "learning_rate": 1e-4}
        for stage in preset["stages"]
    ]  # fmt: skip
    tree = {
        "name": "gsm8k",
        "data": data,
        "completion": preset["completion"],
        "validation": {"max_prompt_length": 1500},
        "rollout": {"max_completion_length": 64},
        "stages": stages,
        "evaluation": {"max_prompts": 8, "num_samples": 2, "stages": False},
        "lab": {"num_rows": 16, "num_prompts": 4},
    }
    return place.write("gsm8k.yaml", yaml.safe_dump(tree))


@pytest.mark.long
def test_gsm8k_is_accepted_completely_probed_trained_on_and_published(place, config, real_data):
    place.grpo("run", config)
    [report] = place.root.glob("runs/gsm8k/validate_data/*/result.json")
    data = DataReport.load(report)
    assert (data.train_rows, data.eval_rows, data.quarantined) == (7473, 1319, 0)
    for side, name, count in (("train", "train", 7473), ("eval", "test", 1319)):
        [table] = place.root.glob(f"runs/gsm8k/validate_data/*/{side}.parquet")
        rows = pl.read_parquet(table).sort("line")
        lines = (real_data / "gsm8k" / f"{name}.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
        truths = [re.search(r"#### (.+)", json.loads(line)["answer"]).group(1).replace(",", "") for line in lines]
        assert len(truths) == rows.height == count
        assert [float(answer) for answer in rows["answer"]] == [float(truth) for truth in truths]
    [report] = place.root.glob("runs/gsm8k/probe_rewards/*/result.json")
    outcomes = {check.outcome for check in LabReport.load(report).checks}
    assert "passed" in outcomes
    assert "failed" not in outcomes
    assert len(place.client.search_model_versions("name='gsm8k'")) == 1

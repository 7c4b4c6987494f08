"""The promises of `make demo`, checked on the run: it learns, MLflow has all of it, and an unchanged run is skipped."""

import json
import re
import subprocess
import sys

import polars as pl
import pytest

from schemas.config.load import load_config
from tests.flows.place import BIN

pytestmark = [pytest.mark.long, pytest.mark.ci, pytest.mark.xdist_group("demo"), pytest.mark.timeout(1800)]

ASK = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained(sys.argv[1]), AutoModelForCausalLM.from_pretrained(sys.argv[1])
chat = [{"role": "user", "content": "What is 15 + 27?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
assert "mlflow" not in sys.modules and "peft" not in sys.modules
"""


def assert_learnt(parent):
    figures = parent.data.metrics
    assert figures["base/format_rate"] <= 0.30
    assert figures["base/accuracy"] <= 0.40
    assert figures["merged/format_rate"] >= 0.98
    assert figures["merged/accuracy"] >= 0.95


def test_the_demo_learns_format_and_arithmetic(demo):
    place, _ = demo
    assert_learnt(place.parent())
    [report] = place.root.glob("runs/grpo-demo/evaluate_model/merged-*/samples.parquet")
    samples = pl.read_parquet(report)
    assert samples.filter(pl.col("sample") >= 0)["prompt_id"].n_unique() >= 256


def test_every_field_of_the_config_is_a_parameter(demo):
    from grpo_tasks.tracking.description import flatten

    place, _ = demo
    recorded = place.parent().data.params
    for name, value in flatten(load_config("demo")).items():
        assert recorded[name] == value, name


def test_each_stage_is_a_child_run_with_every_step_once(demo):
    place, _ = demo
    for stage in load_config("demo").stages:
        child = place.child(stage.name)
        assert child.info.status == "FINISHED"
        steps = [point.step for point in place.client.get_metric_history(child.info.run_id, "reward")]
        assert steps == list(range(1, stage.max_steps + 1))
        paths = {item.path for item in place.client.list_artifacts(child.info.run_id)}
        assert {"adapter", "completions", "plots", "metrics.jsonl"} <= paths


def test_reports_tables_and_plots_are_artifacts_of_the_parent_run(demo):
    place, _ = demo
    run_id = place.parent().info.run_id
    for folder, name in {
        "data": "report.md",
        "lab": "report.md",
        "evaluation/base": "samples.parquet",
        "evaluation/merged": "report.md",
        "plots": "overview.png",
        "merge": "proof.json",
    }.items():
        assert f"{folder}/{name}" in {item.path for item in place.client.list_artifacts(run_id, folder)}
    inputs = place.client.get_run(run_id).inputs.dataset_inputs
    assert {tag.value for item in inputs for tag in item.tags} == {"training", "evaluation"}


def test_the_champion_downloaded_with_mlflow_needs_only_transformers_to_answer(demo, tmp_path):
    place, _ = demo
    environment = place.environment | {"MLFLOW_TRACKING_URI": f"sqlite:///{place.root / 'mlflow.db'}"}
    command = [BIN / "mlflow", "artifacts", "download", "-u", "models:/grpo-demo@champion", "-d", tmp_path]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=600)
    # No system prompt: the model's chat template has the one of the training.
    asked = subprocess.run(
        [sys.executable, "-c", ASK, tmp_path / "model"], check=True, capture_output=True, text=True, timeout=600
    )
    assert "<answer>42</answer>" in asked.stdout


def test_the_champion_asked_by_mlflows_own_command_answers_42(demo, tmp_path):
    place, _ = demo
    environment = place.environment | {"MLFLOW_TRACKING_URI": f"sqlite:///{place.root / 'mlflow.db'}"}
    (tmp_path / "request.json").write_text('{"messages": [{"role": "user", "content": "What is 15 + 27?"}]}')
    command = [BIN / "mlflow", "models", "predict", "-m", "models:/grpo-demo@champion", "--env-manager", "local", "-t", "json"]
    command += ["-i", tmp_path / "request.json", "-o", tmp_path / "reply.json"]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=600)
    [choice] = json.loads((tmp_path / "reply.json").read_text())["choices"]
    assert "<answer>42</answer>" in choice["message"]["content"]


def test_a_second_run_with_another_prefect_home_skips_all_steps(demo, tmp_path):
    place, _ = demo
    process = place.start("run", "demo", PREFECT_HOME=str(tmp_path))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert output.count("unchanged, skipped") == 11, output
    # One line for each step, and none by Prefect.
    assert re.findall(r"\| (\d+)/12 \w+", output) == [str(number) for number in range(1, 13)], output
    assert "Finished in state" not in output
    assert len(place.client.search_model_versions("name='grpo-demo'")) == 1
    assert place.parent().info.status == "FINISHED"


def test_the_registered_version_names_the_decision_and_the_run(demo):
    place, _ = demo
    version = place.client.get_model_version_by_alias("grpo-demo", "champion")
    assert version.run_id == place.parent().info.run_id
    assert "better than the base" in version.tags["grpo.decision"]

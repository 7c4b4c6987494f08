"""The engine in a script of one's own, without Prefect and MLflow; page, module and example have the same ten lines."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import polars as pl
import pytest
import safetensors.torch
import yaml

from grpo_tasks import library
from grpo_tasks.library import base_model, load_data, measure_difficulty, train_stage
from schemas.config.load import check_recorded, load_config
from schemas.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "library" / "train.py"
WEIGHTS = "final/adapter_model.safetensors"
SETTINGS = [
    "stages.0.max_steps=2",
    "stages.0.per_device_train_batch_size=8",
    "data.train.0.max_rows=50",
    "data.eval.0.max_rows=16",
    "evaluation.num_samples=1",
    "resources.num_threads=1",
    "stages.1.max_steps=2",
    "stages.1.per_device_train_batch_size=8",
]
PAGE = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("## Library")[2]
FIRST_STAGE, SECOND_STAGE, IN_PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SCRIPT = f"""
import json, re, sys
from grpo_tasks.library import evaluate, generate, load_data, merge, train_stage
from schemas.config.load import load_config

LONGEST = 80

def brief(completions, **columns):
    return [1.0 if len(re.sub("<.*?>", "", completion[0]["content"])) < LONGEST else 0.0 for completion in completions]

config = load_config("demo", {SETTINGS})
data = load_data(config, "work/data")
stage = train_stage(config, "format", data, "work/format", rewards={{"brief": brief}})
merged = merge(config, stage.model, data, "work/merged")
assert train_stage(config, "format", data, "work/format", rewards={{"brief": brief}}) == stage
report = evaluate(config, merged.model, data, "work/evaluation")
{SECOND_STAGE}
assert both.policy == second.model
answers = generate(config, merged.model, ["What is 15 + 27?", "What is 20 + 2?"], num_samples=2, temperature=1.0)

assert not {{"prefect", "mlflow"}} & set(sys.modules)
print(json.dumps([data.train_rows, second.steps, stage.steps, stage.metrics["rewards/brief/mean"], report.prompts, answers]))
"""


@pytest.fixture(scope="module")
def worked(tmp_path_factory):
    """A folder in which the script has run, and what it printed."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.ci
@pytest.mark.xdist_group("library")
def test_a_script_trains_with_its_own_reward_merges_evaluates_and_asks(worked):
    folder, (rows, _, steps, brief, prompts, answers) = worked
    assert (rows, steps, prompts) == (50, 2, 16)
    assert 0.0 <= brief <= 1.0
    assert [len(samples) for samples in answers] == [2, 2]
    assert (folder / "work" / "merged" / "model" / "model.safetensors").exists()
    assert (folder / "work" / "evaluation" / "report.md").exists()


@pytest.mark.long
@pytest.mark.ci
@pytest.mark.xdist_group("library")
def test_a_second_stage_starts_from_the_model_of_the_first(worked):
    folder, (_, second_steps, *_) = worked
    assert second_steps == 2
    first, second = (safetensors.torch.load_file(folder / "work" / stage / WEIGHTS) for stage in ("format", "correctness"))
    base = {name: tensor for name, tensor in first.items() if "lora_B" in name}
    # Two updates at this rate move no weight as far as the first stage has: a new adapter would begin at zero.
    moved = sum(float((second[name] - tensor).norm()) for name, tensor in base.items())
    assert 0 < moved < 2 * sum(float(tensor.norm()) for tensor in base.values())
    spec = json.loads((folder / "work" / "correctness" / "spec.json").read_text())
    assert spec["start"]["adapter"] == str(folder / "work" / "format" / "final")


@pytest.mark.long
@pytest.mark.ci
@pytest.mark.xdist_group("library")
def test_another_model_or_reward_is_another_stage(worked, tmp_path):
    folder, _ = worked
    config = load_config("demo", SETTINGS)
    data = load_data(config, tmp_path)
    trained = base_model(config).model_copy(update={"adapter": folder / "work" / "format" / "final"})
    for other in ({"start": trained}, {"rewards": {"brief": "missing:brief"}}, {}):
        with pytest.raises(ConfigError, match="another stage"):
            train_stage(config, "format", data, folder / "work" / "format", **other)


def test_bad_rows_are_refused_with_their_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "", "answer": "2"}\n')
    config = load_config("demo", [f"data.train.0.path={tmp_path / 'bad.jsonl'}", "validation.max_invalid_fraction=0"])
    with pytest.raises(DataError, match=r"bad\.jsonl:1"):
        load_data(config, tmp_path / "data")


@pytest.mark.long
def test_a_script_measures_pass_rates_and_trains_on_a_band(tmp_path):
    changed = ["difficulty.samples=4", "stages.0.keep_pass_rate=[0.1,0.9]"]
    config = load_config("demo", [*SETTINGS, *changed])
    data = load_data(config, tmp_path / "data")
    difficulty = measure_difficulty(config, data, tmp_path / "difficulty")
    assert {stage.stage for stage in difficulty.stages} == {"format", "correctness"}
    stage = train_stage(config, "format", data, tmp_path / "format", difficulty=difficulty)
    kept = pl.read_parquet(tmp_path / "format" / "train.parquet")
    assert 0 < kept.height < data.train_rows
    assert kept["pass_rate"].is_between(0.1, 0.9).all()
    assert stage.steps == 2


def test_nothing_to_measure_is_refused(tmp_path):
    config = load_config("demo", SETTINGS)
    data = load_data(config, tmp_path / "data")
    with pytest.raises(ConfigError, match="nothing would be sampled"):
        measure_difficulty(config, data, tmp_path / "difficulty")


def test_a_config_in_python_is_the_same_config_with_the_same_keys(tmp_path):
    given = {"load_config": load_config}
    exec(IN_PYTHON, given)
    file = tmp_path / "changed.yaml"
    file.write_text("extends: demo\nname: mine\nrollout: {max_completion_length: 48}\n")
    (tmp_path / "written.yaml").write_text(
        "data: {train: [{path: rows.jsonl}]}\nstages: [{name: format, rewards: [format], max_steps: 20}]\n"
    )
    assert given["changed"] == load_config(file, ["seed=7"])
    assert given["written"] == load_config(tmp_path / "written.yaml")
    written = yaml.safe_dump(given["changed"].model_dump(mode="json"), sort_keys=False)
    assert check_recorded(written, place="config.yaml") == given["changed"]
    keys = {load_data(config, tmp_path / "data").key for config in (given["changed"], load_config(file, ["seed=7"]))}
    assert len(keys) == 1


def test_a_dict_stays_as_it_was_and_its_faults_are_named():
    given = {"extends": "demo", "stages": [{"name": "s", "rewards": ["format"], "max_steps": 5}]}
    assert load_config(given, ["stages.0.max_steps=6"]).stages[0].max_steps == 6
    assert given == {"extends": "demo", "stages": [{"name": "s", "rewards": ["format"], "max_steps": 5}]}
    with pytest.raises(ConfigError, match=r"stages.0.max_step: unknown key; did you mean max_steps\?") as refused:
        load_config({"extends": "demo", "stages": [{"name": "s", "rewards": ["format"], "max_step": 5}]})
    assert refused.value.place == "configuration"


def lines(code):
    """The statements without blank lines, docstrings, and what only the script has."""
    code = re.sub(r'""".*?"""', "", code, flags=re.DOTALL).replace(", *sys.argv[1:]", "").replace("import sys\n", "")
    return [line for line in code.splitlines() if line.strip()]


def test_page_module_and_example_have_the_same_lines():
    block = library.__doc__.partition("    from grpo_tasks")
    module = textwrap.dedent(f"    from grpo_tasks{block[2]}".partition("\n\nEach function")[0])
    assert lines(FIRST_STAGE) == lines(module) == lines(EXAMPLE.read_text())


@pytest.mark.long
def test_the_example_runs(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE, *SETTINGS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Interval(" in done.stdout or "value=" in done.stdout
    assert (tmp_path / "work" / "merged" / "model" / "config.json").exists()

"""`start_from`: a checkpoint of TRL's trainer is where the first stage and every comparison begin; anything else is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from flows.cli.main import app
from flows.frozen_inputs import frozen_inputs
from flows.steps import base_model
from grpo_tasks.running.key import content_key
from schemas.config.load import load_config
from schemas.paths import resolve
from tests.flows.place import SMALL, Place

LORA = {"r": 4, "lora_alpha": 8}
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """What TRL's own trainer leaves after two updates of another task."""
    from accelerate.state import AcceleratorState
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    folder = tmp_path_factory.mktemp("trl")
    rows = [{"prompt": f"What is {n} + 1?", "completion": f"It is {n + 1}."} for n in range(16)]
    settings = SFTConfig(output_dir=str(folder), max_steps=2, save_steps=2, learning_rate=1e-2, report_to="none", use_cpu=True)
    lora = LoraConfig(**LORA, target_modules="all-linear", task_type="CAUSAL_LM")
    SFTTrainer(resolve("embedded:base"), args=settings, train_dataset=Dataset.from_list(rows), peft_config=lora).train()
    # It chooses bfloat16, and accelerate keeps that for the whole process: later tests could train nothing else.
    AcceleratorState._reset_state(reset_partial_state=True)
    return folder / "checkpoint-2"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_run_continues_from_the_weights_of_a_checkpoint_of_trl(checkpoint, tmp_path, prefect_api):
    place = Place(tmp_path, prefect_api)
    stage = SMALL["stages"][0] | {"learning_rate": 1e-9, "max_steps": 1}
    config = SMALL | {"start_from": str(checkpoint), "model": {"lora": LORA}, "stages": [stage]}
    place.write("small.yaml", yaml.safe_dump(config))
    shown = place.grpo("run", "small.yaml")
    assert "only its weights are taken; optimizer, schedule and position of the data begin from zero" in shown
    [final] = place.root.glob("runs/small/train_stage/format-*/final")
    trained, given = load_file(final / WEIGHTS), load_file(checkpoint / WEIGHTS)
    assert sum(float(tensor.norm()) for name, tensor in given.items() if "lora_B" in name) > 0.1, "it had learnt something"
    assert max(float((trained[name] - tensor).abs().max()) for name, tensor in given.items()) < 1e-6
    # The base of all comparisons is what the run started from: the almost unchanged policy gives the same answers.
    results = {
        path.parent.name.split("-")[0]: json.loads(path.read_text())
        for path in place.root.glob("runs/small/evaluate_model/*/result.json")
    }
    assert results["base"]["model"]["adapter"] is not None
    assert results["base"]["metrics"] == results["format"]["metrics"]


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """A folder with the files of a checkpoint, next to a config that starts from it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    save_file({"lora_A.weight": torch.ones(2, 3)}, folder / WEIGHTS)
    (folder / SETTINGS).write_text(json.dumps({"peft_type": "LORA", **LORA, "base_model_name_or_path": "me/mine"}))
    (folder / "trainer_state.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"never read")
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL | {"start_from": folder.name, "model": {"lora": LORA}}))
    return folder


def pickled(folder):
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def complete(folder):
    (folder / SETTINGS).unlink()
    shutil.copy(f"{resolve('embedded:base')}/config.json", folder)


def above(folder):
    inside = folder / "checkpoint-500"
    inside.mkdir()
    (folder / SETTINGS).rename(inside / SETTINGS)


REFUSED = {
    "a pickle": (pickled, "the adapter's weights are a pickle, and pickles are never read"),
    "a complete model": (complete, "it holds a complete model, not an adapter: checkpoint-7"),
    "a complete model, what to do": (complete, "fix: model.path: checkpoint-7, without start_from"),
    "the folder above": (above, "fix: name one of them: checkpoint-7/checkpoint-500"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no such file: checkpoint-7/adapter_model.safetensors"),
    "no settings": (lambda folder: (folder / SETTINGS).unlink(), "no adapter there: checkpoint-7"),
    "half a file": (lambda folder: (folder / SETTINGS).write_text('{"peft_type"'), "the file is damaged"),
    "another kind": (lambda folder: (folder / SETTINGS).write_text('{"peft_type": "IA3"}'), "an adapter of the kind IA3"),
    "another rank": (
        lambda folder: (folder / SETTINGS).write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}'),
        "fix: model.lora: {r: 8, lora_alpha: 16}",
    ),
    "nothing": (shutil.rmtree, "no adapter there: checkpoint-7"),
}


def dry_run(*more):
    outcome = CliRunner().invoke(app, ["run", "small.yaml", "--dry-run", *more], env={"COLUMNS": "200"})
    return outcome.exit_code, " ".join(outcome.output.replace("│", " ").split())


@pytest.mark.parametrize("case", REFUSED)
def test_what_training_cannot_continue_from_is_refused_before_any_work(adapter, case):
    damage, says = REFUSED[case]
    damage(adapter)
    code, shown = dry_run()
    assert code != 0
    assert says in shown
    assert "Traceback" not in shown


def test_without_an_adapter_to_train_the_settings_contradict(adapter):
    assert "fix: model.lora: {}, or a merged model as model.path" in dry_run("--set", "model.lora=null")[1]
    assert "no rows for model.added_tokens" in dry_run("--set", "model.added_tokens=[<search>]")[1]


@pytest.mark.parametrize("given", ["x" * 50_000, "small.yaml", "/", "/dev/zero"])
def test_a_path_without_an_adapter_gets_a_short_message(adapter, given):
    code, shown = dry_run("--set", f"start_from={given}")
    assert code == 1
    assert "no adapter there" in shown
    assert len(shown) < 6_000


def test_a_dry_run_says_what_is_left_out_and_its_base(adapter):
    code, shown = dry_run("--set", "model.path=you/yours")
    assert code == 0, shown
    assert "base: you/yours with the adapter checkpoint-7" in shown
    assert "checkpoint-7: only its weights are taken" in shown
    assert "checkpoint-7 was trained on me/mine, and model.path is you/yours" in shown


def test_the_adapter_is_copied_when_the_run_starts_and_counts_by_content(adapter):
    config = load_config("small.yaml")
    first = base_model(frozen_inputs(config).config)
    assert sorted(path.name for path in first.adapter.iterdir()) == [SETTINGS, WEIGHTS]
    save_file({"lora_A.weight": torch.zeros(2, 3)}, adapter / WEIGHTS)
    second = base_model(frozen_inputs(config).config)
    assert np.all(load_file(first.adapter / WEIGHTS)["lora_A.weight"].numpy() == 1)
    assert content_key("s", (), {"start": first}) != content_key("s", (), {"start": second})
    (adapter / "optimizer.pt").write_bytes(b"another optimizer")
    assert base_model(frozen_inputs(config).config) == second

"""A multimodal checkpoint through the whole chain: some updates of each stage, killed and resumed, published and asked."""

import json
import shutil
import signal
import time

import mlflow
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from schemas.results.model import MergeProof, StageResult
from tests.flows.contents import contents, differences
from tests.flows.place import Place, wait_for_step
from tests.flows.test_real_model import REWARD, SAME, config_of
from tests.policy.test_text_tower import published

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

UPDATES = 4
VISION = "model.visual.blocks.0.attn.proj.weight"


@pytest.fixture(scope="module")
def places(tmp_path_factory, prefect_api):
    """A run of which nothing was disturbed, and one that was killed in its second stage and started again."""
    checkpoint = published("qwen3_5", tmp_path_factory.mktemp("checkpoint"), torch.float32)
    whole, killed = (Place(tmp_path_factory.mktemp(name), prefect_api) for name in ("whole", "killed"))
    for place in (whole, killed):
        shutil.copytree(checkpoint, place.root / "qwen")
        place.write("rewards.py", REWARD)
        lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
        config = config_of("qwen") | {"model": {"path": "qwen", "lora": lora, "merged_dtype": "float32"}}
        config["stages"] = [stage | {"max_steps": UPDATES} for stage in config["stages"]]
        place.write("small.yaml", yaml.safe_dump(config))
    process = killed.start("run", "small.yaml")
    stage_dir = wait_for_step("runs/small/train_stage/correctness-*/metrics.jsonl", killed.root, 1, process)
    while not list(stage_dir.glob("checkpoints/step-*")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for place in (killed, whole):
        place.grpo("run", "small.yaml")
    resumed = StageResult.load(stage_dir / "result.json").resumed
    return whole, killed, resumed


def test_a_killed_run_ends_in_the_same_bytes(places):
    whole, killed, resumed = places
    assert resumed == 1
    found, wanted = ({name: contents(place)[name] for name in SAME} for place in (killed, whole))
    assert not differences(found, wanted, "killed and resumed")
    assert [steps for _, steps in wanted["adapters"].values()] == [UPDATES, UPDATES]
    assert len({sha256 for sha256, _ in wanted["adapters"].values()}) == 2


def test_adapter_and_merged_model_fit_the_published_class(places):
    whole, *_ = places
    [proof] = whole.root.glob("runs/small/merge_adapter/*/result.json")
    merged = proof.parent / "model"
    assert MergeProof.load(proof).model.path == str(merged)
    assert json.loads((merged / "config.json").read_text())["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    model = AutoModelForImageTextToText.from_pretrained(merged)
    given = load_file(whole.root / "qwen" / "model.safetensors")
    assert torch.equal(model.state_dict()[VISION], given[VISION])
    for adapter in whole.root.glob("runs/small/train_stage/*/final/adapter_model.safetensors"):
        assert all("model.language_model.layers." in name for name in load_file(adapter))


def test_the_published_model_answers_through_mlflow_as_the_published_class_does(places):
    whole, *_ = places
    [proof] = whole.root.glob("runs/small/merge_adapter/*/result.json")
    merged = proof.parent / "model"
    chat = [{"role": "user", "content": "What is 15 + 27?"}]
    mlflow.set_tracking_uri(f"sqlite:///{whole.root / 'mlflow.db'}")
    served = mlflow.pyfunc.load_model("models:/small/1", model_config={"device": "cpu", "max_tokens": 12})
    answer = served.predict({"messages": chat, "temperature": 0.0, "max_tokens": 12})["choices"][0]["message"]["content"]
    tokenizer = AutoTokenizer.from_pretrained(merged)
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = AutoModelForImageTextToText.from_pretrained(merged).generate(**prompt, max_new_tokens=12, do_sample=False)
    assert answer == tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)

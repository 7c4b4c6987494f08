"""`grpo export` of a model that was trained in two runs, each from the model before."""

import shutil

import httpx
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_tasks.operating import export
from grpo_tasks.rollout.vllm_server import authorization, serving
from schemas.config.operations import TrackingConfig
from schemas.paths import resolve
from tests.flows.place import SMALL, Place
from tests.rollout.servers import CONFIG, PYTHON, served

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("exported"), pytest.mark.timeout(1800)]
QUESTION = "What is 15 + 27?"


@pytest.fixture(scope="module")
def place(tmp_path_factory, prefect_api):
    place = Place(tmp_path_factory.mktemp("exported"), prefect_api)
    place.write("small.yaml", yaml.safe_dump(SMALL | {"model": {"merged_dtype": "float32"}}))
    place.grpo("run", "small.yaml")
    place.client.set_registered_model_alias("small", "champion", "1")
    place.continued = place.grpo("run", "small.yaml", "--set", "model.path=small@champion", "--set", "name=second")
    place.grpo("run", "small.yaml", "--set", "model.lora=null", "--set", "name=full")
    place.grpo("export", "second/1", "adapter")
    place.grpo("download", "second/1", "merged")
    return place


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


def prompt(place):
    tokenizer = AutoTokenizer.from_pretrained(place.root / "merged")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=True, return_dict=False
    )


def test_a_pipeline_continues_from_a_registered_model_by_one_setting(place):
    assert "second version 1" in place.continued
    assert place.parent("second").info.status == "FINISHED"


def test_peft_loads_the_adapter_over_the_original_base(place):
    base = AutoModelForCausalLM.from_pretrained(resolve("embedded:base"), dtype=torch.float32)
    alone = logits(base, prompt(place))
    ours = logits(PeftModel.from_pretrained(base, place.root / "adapter").eval(), prompt(place))
    wanted = logits(AutoModelForCausalLM.from_pretrained(place.root / "merged", dtype=torch.float32), prompt(place))
    torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-3)
    assert (alone - wanted).abs().max() > 10 * (ours - wanted).abs().max()
    assert not (place.root / ".adapter.part").exists()


def test_a_model_that_was_trained_in_full_is_published_and_no_adapter(place):
    assert place.parent("full").data.metrics["merge/max_logprob_difference"] < 1.0
    said = " ".join(place.grpo("export", "full/1", "refused", expect=1).replace("│", " ").split())
    assert "trained in full" in said
    assert "grpo download full/1 DIR" in said
    assert not (place.root / "refused").exists()


def test_an_interrupted_export_leaves_nothing(place, monkeypatch):
    monkeypatch.chdir(place.root)

    def killed(*_):
        raise KeyboardInterrupt

    # The last act before the adapter appears.
    monkeypatch.setattr(export.shutil, "copy", killed)
    with pytest.raises(KeyboardInterrupt):
        export.export_adapter("second/1", place.root / "broken", TrackingConfig(tracking_uri=f"sqlite:///{place.root}/mlflow.db"))
    assert not [path for path in place.root.iterdir() if path.name.startswith("broken")]


@pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM environment (make vllm)")
def test_vllm_serves_the_adapter_over_the_original_base(place, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-the-tests")
    shutil.copytree(place.root / "adapter", tmp_path / "adapter")
    ids = prompt(place)
    model = AutoModelForCausalLM.from_pretrained(place.root / "merged", dtype=torch.float32)
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, repetition_penalty=1.0)[0, len(ids) :]
    scores = logits(model, [*ids, *wanted.tolist()])[0].log_softmax(-1)
    logps = [scores[len(ids) - 1 + index, token].item() for index, token in enumerate(wanted.tolist())]
    with serving(CONFIG, served(rank=32), tmp_path) as [server]:
        load = {"lora_name": "exported", "lora_path": str(tmp_path / "adapter")}
        httpx.post(f"{server.address}/v1/load_lora_adapter", json=load, headers=authorization()).raise_for_status()
        asked = {"model": "exported", "prompt": ids, "max_tokens": 24, "temperature": 0.0, "logprobs": 1}
        reply = httpx.post(f"{server.address}/v1/completions", json=asked, headers=authorization(), timeout=120).json()
    given = reply["choices"][0]["logprobs"]["token_logprobs"]
    assert given == pytest.approx(logps[: len(given)], abs=1e-3)
    assert len(given) > 1

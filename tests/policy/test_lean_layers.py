"""Layers that keep and compute less against those of peft and transformers, for several architectures with random weights."""

import copy
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_tasks.attention import packed_attention as cpu_kernel
from grpo_tasks.policy.lean_layers import (
    AdaptedLinear,
    AddLowRank,
    GatedDown,
    LeanAdapter,
    LeanMlp,
    LeanNorm,
    PredictingTokens,
    predict_only,
    use_lean_layers,
)
from grpo_tasks.policy.load import checkpoint_layers
from grpo_tasks.policy.logprobs import completion_logprobs
from tests.attention.test_packed_attention import BATCHES, MODELS, make_batch, model_of

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(name, dtype=torch.float32, **settings):
    torch.manual_seed(3)
    targets = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"] if name == "phi3" else ALL
    config = LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 8, "target_modules": targets} | settings)
    model = get_peft_model(model_of(MODELS[name]).to(dtype).requires_grad_(False), config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
    return model.train()


def results(model):
    _, _, batch = make_batch("mixed lengths")
    model.zero_grad()
    logps = completion_logprobs(model, batch, temperature=1.0).logps[batch.completion_mask]
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return logps.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        assert found[1][name].dtype == grad.dtype
        torch.testing.assert_close(found[1][name], grad, rtol=10 * tolerance, atol=tolerance * (1 + grad.abs().max().item()))


def replaced(model):
    kinds = (LeanAdapter, LeanNorm, LeanMlp)
    return [sum(isinstance(module, kind) for module in model.modules()) for kind in kinds]


def left_out(model):
    return [name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, PredictingTokens)]


@pytest.mark.parametrize(
    ("name", "wanted"),
    # Two layers of seven adapted linear layers, two norms (Qwen3 has two more for queries and keys, Gemma3 four more) and an MLP.
    [("qwen2", [14, 5, 2]), ("qwen3", [14, 9, 2]), ("llama", [14, 5, 2]), ("gemma3-window-16", [14, 13, 2]), ("phi3", [8, 5, 0])],
)
def test_lean_layers_give_the_numbers_of_those_they_replace(name, wanted):
    model = adapted(name)
    before = results(model)
    use_lean_layers(model)
    assert replaced(model) == wanted
    assert_same(results(model), before)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"lora_dropout": 0.2},
        {"use_rslora": True},
        {"use_dora": True},
        {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    ],
    ids=str,
)
def test_every_kind_of_adapter_gives_its_numbers(settings):
    model = adapted("qwen2", **settings)
    torch.manual_seed(5)
    before = results(model)
    use_lean_layers(model)
    torch.manual_seed(5)
    assert_same(results(model), before)


def test_full_fine_tuning_gives_the_same_gradients():
    model = model_of(MODELS["gemma3-window-16"]).train()
    before = results(model)
    use_lean_layers(model)
    predict_only(model)
    assert left_out(model) == ["mlp"]
    assert_same(results(model), before)


def test_a_disabled_and_another_adapter_are_honoured():
    model = adapted("qwen2")
    model.add_adapter("other", model.peft_config["default"])
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "other" in key:
                parameter.normal_(std=0.2)
    wanted = {}
    for lean in (False, True):
        if lean:
            use_lean_layers(model)
        model.set_adapter("other")
        other = results(model)
        model.set_adapter("default")
        with model.disable_adapter(), torch.no_grad():
            _, _, batch = make_batch("mixed lengths")
            base = completion_logprobs(model, batch, temperature=1.0).logps
        wanted[lean] = other, base
    assert_same(wanted[True][0], wanted[False][0])
    torch.testing.assert_close(wanted[True][1], wanted[False][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "gemma3-window-16"])
def test_in_bfloat16_they_are_as_near_to_float32_as_those_they_replace(name):
    exact = results(adapted(name))[0]
    model = adapted(name, torch.bfloat16)
    before = (results(model)[0] - exact).abs().mean()
    use_lean_layers(model)
    logps, grads = results(model)
    # peft computes the adapter, here as large as the base, in float32; a server computes it in bfloat16 as well.
    assert (logps - exact).abs().mean() < 1.5 * before
    assert all(grad.dtype == torch.float32 for grad in grads.values())


@pytest.mark.parametrize("name", ["qwen3", "gemma3-window-16"])
def test_a_norm_in_bfloat16_gives_the_numbers_of_the_one_it_replaces(name):
    [norm, *_] = [module for key, module in model_of(MODELS[name]).named_modules() if key.endswith("post_attention_layernorm")]
    torch.manual_seed(0)
    x = torch.randn(50, 64).bfloat16()
    with torch.no_grad():
        # As they are in trained models: small against the 1 that Gemma adds.
        norm.weight.add_(torch.randn(64), alpha=0.05)
        norm.bfloat16()
        exact = copy.deepcopy(norm).float()(x.float())
        before = (norm(x) - exact).abs().mean()
        use_lean_layers(nn.ModuleList([norm]))
        assert isinstance(norm, LeanNorm)
        assert (norm(x) - exact).abs().mean() < 1.01 * before


def test_the_gradients_are_those_of_finite_differences():
    torch.manual_seed(0)
    x, a, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2, 5), (2, 5), (4, 2)))
    y = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *args: AddLowRank.apply(*args, 0.7), (y, x, a, b))
    weight, bias = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    for frozen in (bias, None):

        def adapted_linear(x, a, b, bias=frozen):
            return AdaptedLinear.apply(x, weight, bias, a, b, 0.7)

        assert torch.autograd.gradcheck(adapted_linear, (x, a, b))


LOW_RANK = {
    "linear": lambda x, weight, a, b: AdaptedLinear.apply(x, weight, None, a, b, 2.0),
    "down": lambda x, weight, a, b: GatedDown.apply(x, x, "silu", weight, None, a, b, 2.0),
    "added": lambda x, weight, a, b: AddLowRank.apply(x @ weight.T, x, a, b, 2.0),
}


class Products(TorchDispatchMode):
    """The dtype of every matrix product, by the shape of the result."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            self.dtypes.setdefault(tuple(found.shape), set()).add(found.dtype)
        return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", LOW_RANK)
def test_a_card_sums_gradients_of_low_rank_matrices_in_float32(kind, dtype):
    x, weight = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((1, 50, 24), (36, 24)))
    a, b = (torch.empty(*shape, device="meta", requires_grad=True) for shape in ((4, 24), (36, 4)))
    with Products() as products:
        LOW_RANK[kind](x.requires_grad_(), weight, a, b).sum().backward()
    assert products.dtypes[4, 24] == products.dtypes[36, 4] == {torch.float32}
    # Of the token by token products nothing is summed over the pass.
    assert products.dtypes[50, 4] == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_low_rank_matrices_keep_more_than_16_bits(dtype):
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(*shape).to(dtype) for shape in ((4096, 24), (36, 24), (4096, 36)))
    a, b = torch.randn(4, 24, requires_grad=True), torch.randn(36, 4, requires_grad=True)
    AdaptedLinear.apply(x, weight, None, a, b, 1.0).backward(grad)
    d_inner, inner = grad @ b.to(dtype), x @ a.to(dtype).T
    for found, left, right in ((a.grad, d_inner.T, x), (b.grad, grad.T, inner)):
        exact = left.double() @ right.double()

        def error(of, exact=exact):
            return ((of.double() - exact).norm() / exact.norm()).item()

        # As cuBLAS may cut the sum by default: each part is rounded to 16 bits, and so is their sum.
        parts = [one @ other for one, other in zip(left.chunk(8, dim=1), right.chunk(8), strict=True)]
        # In float32 the order of a sum, which is that of the machine, moves it by some 1e-6.
        assert error(found) < 1e-5
        assert error(functools.reduce(torch.add, parts)) > 100 * error(found)


def test_layers_are_replaced_once_and_stay_what_they_were():
    model = adapted("qwen2")
    names = [type(module).__name__ for module in model.modules()]
    use_lean_layers(model)
    kinds = [type(module) for module in model.modules()]
    use_lean_layers(model)
    assert [type(module) for module in model.modules()] == kinds
    assert [kind.__name__ for kind in kinds] == names
    assert sum(isinstance(module, LoraLinear) for module in model.modules()) == 14


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("qwen2", ["q_proj", "o_proj", "mlp"]),
        ("qwen3", ["q_proj", "o_proj", "mlp"]),
        ("gemma3-window-16", ["q_proj", "o_proj", "mlp"]),
        ("mistral-window-3", ["q_proj", "o_proj", "mlp"]),
        ("phi3", ["o_proj"]),
        ("qwen2moe-window-4", ["q_proj", "o_proj"]),
    ],
)
def test_the_last_layer_gives_the_numbers_of_the_complete_one(name, wanted):
    targets = {} if name != "qwen2moe-window-4" else {"target_modules": ["q_proj", "o_proj"]}
    model = adapted(name, **targets)
    use_lean_layers(model)
    before = results(model)
    predict_only(model)
    assert left_out(model) == wanted
    assert_same(results(model), before)


@pytest.mark.parametrize("name", ["qwen2", "mistral-window-8"])
def test_gradient_checkpointing_changes_no_bit(name):
    model = adapted(name)
    use_lean_layers(model)
    predict_only(model)
    before = results(model)
    checkpoint_layers(model)
    after = results(model)
    assert torch.equal(after[0], before[0])
    assert all(torch.equal(after[1][name], grad) for name, grad in before[1].items())


@pytest.mark.parametrize("kind", BATCHES)
def test_only_tokens_that_predict_something_pass_through_the_last_mlp(kind):
    model = adapted("qwen2")
    use_lean_layers(model)
    predict_only(model)
    lengths = []
    for layer in model.get_base_model().model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].shape[1]))
    _, _, batch = make_batch(kind)
    completion_logprobs(model, batch, temperature=1.0)
    assert lengths == [batch.packed.ids.shape[1], len(set(batch.packed.predictors.tolist()))]


def test_a_pass_that_is_not_packed_computes_every_token():
    model = adapted("qwen2").eval()
    use_lean_layers(model)
    ids = torch.arange(20).view(2, 10)
    before = model(input_ids=ids).logits
    predict_only(model)
    _, _, batch = make_batch("mixed lengths")
    completion_logprobs(model, batch, temperature=1.0)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_on_a_cpu_the_last_layer_asks_with_last_tokens_only(monkeypatch):
    model, (_, _, batch) = model_of(MODELS["qwen2"]), make_batch("equal lengths")
    asked = []
    kernel = cpu_kernel._flash

    def watched(query, *rest, **options):
        asked.append(query.shape[2])
        return kernel(query, *rest, **options)

    monkeypatch.setattr(cpu_kernel, "_flash", watched)
    completion_logprobs(model, batch, temperature=1.0)
    # In each layer the prompts, the own parts, and the own parts of a group beside each other to their prompt.
    assert asked == [12, 5, 20, 1, 5, 20]

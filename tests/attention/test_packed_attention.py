"""Attention over one packed row against every completion alone without padding, for several architectures with random weights."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from grpo_tasks.attention.packed_attention import CpuAttention, Masks
from grpo_tasks.attention.shared_prompt import PackedRow, UnsupportedError
from grpo_tasks.attention.varlen import EFFICIENT, FLASH, Kernel, Sequences, VarlenAttention, varlen_kernel
from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.logprobs import completion_logprobs
from tests.attention.reference_kernel import REFERENCE, masked_way, varlen_way

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
MODELS = {
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "llama": LlamaConfig(**SMALL),
    "phi3": Phi3Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "gemma3-window-16": Gemma3TextConfig(
        **SMALL, head_dim=32, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
    ),
    # What stands between the last hidden state and the logits is the model's own: a scale, a cap, a scale of the hidden states.
    "granite": GraniteConfig(**SMALL, logits_scaling=4.0),
    "cohere2": Cohere2Config(**SMALL, logit_scale=0.25, sliding_window=8),
    "gemma3-cap": Gemma3TextConfig(**SMALL, head_dim=32, sliding_window=16, final_logit_softcapping=3.0),
    "mistral-window-8": MistralConfig(**SMALL, sliding_window=8),
    "mistral-window-3": MistralConfig(**SMALL, sliding_window=3),
    # The window of these is in their mask alone.
    "qwen2moe-window-4": Qwen2MoeConfig(**SMALL | EXPERTS, use_sliding_window=True, sliding_window=4),
    "phimoe-window-4": PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=4),
}
MIXED = ((13, 9, 21), (5, 9, 1, 7, 12, 3), [0, 2, 0, 1, 2, 2])
BATCHES = {
    "mixed lengths": MIXED,
    "equal lengths": ((12, 12), (6, 6, 6, 6), [0, 0, 1, 1]),
    "single tokens": ((4, 1), (1, 1, 1), [0, 1, 1]),
    "a prompt of one token": ((1, 6), (4, 2, 5), [0, 0, 1]),
    "groups of different sizes": ((6, 6, 6), (4, 4, 4, 4), [1, 1, 1, 2]),
    "late branches": ((9, 4), (14, 11, 10, 5, 13, 12, 12), [0, 0, 0, 1, 1, 1, 1]),
}
LATE = "late branches"
SAME_START = {1: (0, 9), 2: (0, 4), 3: (4, 5), 5: (4, 11), 6: (4, 12)}
"""How the completions of the late branches begin: like which other one, for how many tokens."""


def model_of(config):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    # As large as in a trained model, where a wrong mask shows: at their initial size all attention is nearly uniform.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name and parameter.ndim == 2:
                parameter.mul_(6.0)
    return model


def make_batch(kind):
    prompts, completions, prompt_of = BATCHES[kind]
    generator = torch.Generator().manual_seed(0)

    def ids(length):
        return torch.randint(1, 300, (length,), generator=generator).tolist()

    prompts, completions = [ids(length) for length in prompts], [ids(length) for length in completions]
    if kind == LATE:
        for index, (other, length) in SAME_START.items():
            completions[index][:length] = completions[other][:length]
    batch = token_batch(prompts, completions, prompt_of, device=torch.device("cpu"), share_starts=kind == LATE)
    return prompts, completions, batch


def one_by_one(model, prompts, completions, prompt_of):
    """The log-probabilities of every completion, each alone."""
    found = []
    for completion, prompt in zip(completions, prompt_of, strict=True):
        ids = torch.tensor([prompts[prompt] + completion])
        logp = model(input_ids=ids, use_cache=False).logits[0, len(prompts[prompt]) - 1 : -1].log_softmax(-1)
        found.append(logp.gather(-1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(found)


def gradients(model, logps):
    model.zero_grad()
    (logps * torch.linspace(-1, 1, len(logps))).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_same(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-5 * wanted[1].abs().max().item())


def results(model, batch, layout):
    logps = completion_logprobs(model, batch, temperature=1.0, layout=layout).logps[batch.completion_mask]
    return logps.detach(), gradients(model, logps)


def wanted_of(model, kind):
    prompts, completions, batch = make_batch(kind)
    logps = one_by_one(model, prompts, completions, BATCHES[kind][2])
    return batch, (logps.detach(), gradients(model, logps))


@pytest.mark.parametrize("layout", ["packed", "plain"])
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_scores_as_one_completion_at_a_time(name, layout):
    model = model_of(MODELS[name])
    batch, wanted = wanted_of(model, "mixed lengths")
    assert_same(results(model, batch, layout), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_completions_that_branch_late_are_computed_once_up_to_there(name):
    model = model_of(MODELS[name])
    batch, wanted = wanted_of(model, LATE)
    prompts, completions, prompt_of = BATCHES[LATE]
    apart = sum(prompts) + sum(completions) - len(prompt_of)
    # Of the first group, 4 tokens are saved twice. The second one shares 11, and two completions have nothing else to compute.
    assert apart - batch.packed.ids.shape[1] == 2 * 4 + 4 + 2 * 11
    assert_same(results(model, batch, "packed"), wanted)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", ["qwen2", "mistral-window-8", "mistral-window-3"])
def test_every_shape_of_a_batch_scores_as_one_completion_at_a_time(name, kind):
    model = model_of(MODELS[name])
    batch, wanted = wanted_of(model, kind)
    for layout in ("packed", "plain"):
        assert_same(results(model, batch, layout), wanted)


@pytest.mark.parametrize(
    ("name", "way", "kind"),
    [
        *((name, way, "mixed lengths") for name in ("gemma3-window-16", "mistral-window-3") for way in (masked_way, varlen_way)),
        ("qwen2", masked_way, "mixed lengths"),
        *(("qwen2", varlen_way, kind) for kind in BATCHES),
    ],
)
def test_the_way_of_other_devices_gives_the_same(name, way, kind, monkeypatch):
    model = model_of(MODELS[name])
    batch, wanted = wanted_of(model, kind)
    way(monkeypatch)
    assert_same(results(model, batch, "packed"), wanted)


@pytest.mark.parametrize("way", [None, masked_way, varlen_way])
@pytest.mark.parametrize("name", ["qwen3", "mistral-window-8"])
def test_float32_weights_under_autocast_give_nearly_what_float32_gives(name, way, monkeypatch):
    model = model_of(MODELS[name])
    batch, exact = wanted_of(model, "mixed lengths")
    if way is not None:
        way(monkeypatch)
    found = {}
    for layout in ("plain", "packed"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found[layout] = results(model, batch, layout)
    off = (found["plain"][0] - exact[0]).abs().mean()
    assert (found["packed"][0] - exact[0]).abs().mean() < 2 * off
    assert torch.nn.functional.cosine_similarity(found["packed"][1], exact[1], dim=0) > 0.99


@pytest.mark.parametrize(
    ("capability", "dtype", "window", "wanted"),
    [
        ((9, 0), torch.bfloat16, None, FLASH),
        ((8, 0), torch.float16, 5, FLASH),
        ((9, 0), torch.float32, None, EFFICIENT),
        ((9, 0), torch.float32, 5, None),
        ((7, 5), torch.float16, None, EFFICIENT),
        ((7, 5), torch.float16, 5, None),
        ((7, 0), torch.float32, None, EFFICIENT),
        ((7, 5), torch.bfloat16, None, None),
    ],
)
def test_the_kernel_is_one_that_the_card_has(capability, dtype, window, wanted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        like = torch.empty(1, 2, 3, 8, dtype=dtype, device="cuda")
    assert varlen_kernel(like, window) is wanted


@pytest.mark.parametrize("wish", [True, False])
def test_deterministic_kernels_are_insisted_on_where_they_are_wished_for(wish):
    def backward(*given):
        found.append((torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()))
        return REFERENCE.backward(*given)

    _, _, batch = make_batch("mixed lengths")
    row, length, found = row_of(batch), batch.packed.ids.shape[1], []
    inputs = [torch.randn(1, heads, length, 16, requires_grad=True) for heads in (4, 2, 2)]
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(wish, warn_only=True)
    try:
        kernel = Kernel(REFERENCE.forward, backward)
        VarlenAttention.apply(*inputs, Sequences.of(row), kernel, 1.0, None).sum().backward()
        # With warn_only the kernels of CUDA warn, and add up in any order.
        assert found == [(wish, False) if wish else (False, torch.is_deterministic_algorithms_warn_only_enabled())]
        assert torch.are_deterministic_algorithms_enabled() == wish
        assert torch.is_deterministic_algorithms_warn_only_enabled() or not wish
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_only_real_tokens_pass_through_the_model(monkeypatch):
    _, _, batch = make_batch("mixed lengths")
    prompts, completions, _ = MIXED
    # The last token of a completion predicts nothing.
    assert batch.packed.ids.shape == (1, sum(prompts) + sum(completions) - len(completions))
    saved = []
    model = model_of(MODELS["qwen2"])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda tensor: tensor):
        completion_logprobs(model, batch, temperature=1.0, layout="packed")
    tokens = batch.packed.ids.shape[1]
    # Nothing that the backward pass keeps of a layer has more tokens than the row.
    assert max(shape[2] for shape in saved if len(shape) == 4) == tokens


def test_soft_caps_are_refused_by_name():
    model = model_of(Gemma2Config(**SMALL, head_dim=32))
    _, _, batch = make_batch("mixed lengths")
    with pytest.raises(UnsupportedError, match="softcap"):
        completion_logprobs(model, batch, temperature=1.0, layout="packed")


def row_of(batch, device="cpu"):
    packed = batch.packed
    return PackedRow(packed.stem_lengths, packed.own_lengths, packed.stem_of, torch.device(device))


def test_the_longest_sequences_of_varlen_attention_are_named():
    prompts, _, batch = make_batch("mixed lengths")
    row = row_of(batch)
    found = Sequences.of(row)
    longest = max(len(prompts[prompt]) + length for prompt, length in zip(row.prompts_of, row.own_lengths, strict=True))
    assert (found.max_query, found.max_key) == (max(map(len, prompts)), longest)


@pytest.mark.parametrize(
    ("kernel", "dtype", "window"), [(FLASH, torch.bfloat16, None), (FLASH, torch.float16, 5), (EFFICIENT, torch.float32, None)]
)
def test_torch_knows_the_kernels_of_cuda_by_these_arguments(kernel, dtype, window):
    _, _, batch = make_batch("mixed lengths")
    row = row_of(batch, "meta")
    length = batch.packed.ids.shape[1]
    q, k, v = (torch.empty(1, heads, length, 16, dtype=dtype, device="meta", requires_grad=True) for heads in (4, 2, 2))
    out = VarlenAttention.apply(q, k, v, Sequences.of(row), kernel, 0.25, window)
    assert out.shape == q.shape
    if kernel is EFFICIENT:
        return  # torch's own shape function for this backward pass does not accept its arguments
    out.backward(torch.empty_like(out))
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]


def test_gradients_of_short_rows_in_bfloat16_are_rounded_once():
    torch.manual_seed(0)
    row = PackedRow([64] * 4, [], [], torch.device("cpu"))
    given = [torch.randn(1, 4, 256, 32).bfloat16().requires_grad_() for _ in range(3)]
    slope = torch.randn(1, 4, 256, 32).bfloat16()
    found = CpuAttention.apply(*given, row, row.prompts, Masks.of(row, None, given[0]), 32**-0.5)
    # Each of the four prompts alone, in float64.
    wide = [x.detach().double().requires_grad_() for x in given]
    query, key, value = (x[0].unflatten(1, (4, 64)).transpose(0, 1) for x in wide)
    truth = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=32**-0.5)
    truth = truth.transpose(0, 1).flatten(1, 2)[None]
    gradients = torch.autograd.grad(found, given, slope), torch.autograd.grad(truth, wide, slope.double())
    for ours, exact in zip(*gradients, strict=True):
        # A single rounding to 8 bits is off by 0.0016 in the mean square, the result of the forward pass by as much; the kernel's
        # own products in bfloat16 make 0.0027 to 0.0031 of it.
        assert (ours.double() - exact).norm() / exact.norm() < 0.0024

import gc
import weakref

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_tasks.attention.packed_attention import PackedAttention
from grpo_tasks.planning.live_memory import LiveMemory
from grpo_tasks.policy import logprobs
from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.load import checkpoint_layers, compile_layers, new_policy
from grpo_tasks.policy.logprobs import chunk_rows, completion_logprobs, score_tokens
from schemas.config.model import ModelConfig
from tests.attention.test_packed_attention import MODELS, model_of

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "dot", "vdot", "linalg_vecdot", "matmul")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}


@pytest.fixture
def batch(prompts):
    torch.manual_seed(0)
    completions = [torch.randint(0, 300, (length,)).tolist() for length in (5, 9, 1, 7, 3, 9, 2, 4)]
    return token_batch(prompts, completions, [0, 0, 1, 1, 2, 2, 3, 3], device=torch.device("cpu"))


def one_by_one(model, batch, temperature):
    """Every completion alone, no padding, no cache: the independent reference."""
    found = []
    for row in range(len(batch.completion_ids)):
        prompt_row = batch.prompt_of[row]
        prompt = batch.prompt_ids[prompt_row][batch.prompt_mask[prompt_row]]
        completion = batch.completion_ids[row][batch.completion_mask[row]]
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0] / temperature
        logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        found.append((logp.gather(-1, completion[:, None])[:, 0], -(logp.exp() * logp).sum(-1)))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_and_gradients_equal_one_completion_at_a_time(policy, batch, temperature, layout, chunked, monkeypatch):
    if chunked:
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 7 * policy.config.vocab_size)
    logps, entropies = one_by_one(policy, batch, temperature)
    logps.square().sum().backward()
    wanted = gradients(policy)
    policy.zero_grad()
    scores = completion_logprobs(policy, batch, temperature=temperature, layout=layout)
    scores.logps.square().sum().backward()
    torch.testing.assert_close(scores.logps[batch.completion_mask], logps, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropies[batch.completion_mask], entropies, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(policy), wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())


def test_padding_scores_exactly_zero(policy, batch):
    scores = completion_logprobs(policy, batch, temperature=1.0)
    assert (scores.logps[~batch.completion_mask] == 0).all()
    assert not scores.entropies.requires_grad


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler reads it
@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_compiled_layers_score_the_same_with_the_same_gradients(policy, batch, layout):
    torch._dynamo.reset()
    # One layer: the compiler takes as long for each kind of layer that it meets.
    del policy.get_base_model().model.layers[1:]
    wanted = completion_logprobs(policy, batch, temperature=1.0, layout=layout)
    wanted.logps.square().sum().backward()
    gradient = gradients(policy)
    policy.zero_grad()
    compile_layers(policy)
    found = completion_logprobs(policy, batch, temperature=1.0, layout=layout)
    found.logps.square().sum().backward()
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    torch.testing.assert_close(found.logps, wanted.logps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients(policy), gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler reads it
def test_many_layers_are_compiled_within_the_compilers_limit(monkeypatch, batch):
    torch._dynamo.reset()
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compile_module(module, backend="eager", **options))
    config = Qwen2Config(**SMALL, num_hidden_layers=torch._dynamo.config.recompile_limit + 2)
    policy = new_policy(AutoModelForCausalLM.from_config(config).requires_grad_(False), ModelConfig()).train()
    compile_layers(policy)
    # At the limit the compiler only warns, and leaves the code to Python.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        completion_logprobs(policy, batch, temperature=1.0)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0


@pytest.mark.parametrize(("vocabulary", "rows"), [(151_936, 1024), (262_144, 512), (32_000, 2048), (10**9, 1)])
def test_a_chunk_of_the_head_fills_a_card(vocabulary, rows):
    assert chunk_rows(vocabulary, torch.device("cuda")) == rows


def test_a_frozen_head_multiplies_matrices_by_its_weights_only():
    head = torch.nn.Linear(64, 40_000, bias=False, device="meta", dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.empty(3000, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with LiveMemory() as memory:
        logps, _ = score_tokens(head, hidden, torch.zeros(3000, dtype=torch.long, device="meta"), temperature=1.0)
        logps.sum().backward()
    # Two chunks, there and back. An entropy as a product of a row and a column is one tile of a hundred thousand steps.
    assert {name: times for name, times in memory.operations.items() if name in PRODUCTS} == {"mm": 4}


@pytest.mark.parametrize("temperature", [1.0, 0.9])
def test_two_float32_tensors_of_a_chunk_exist_at_once(temperature):
    head = torch.nn.Linear(8, 10_000, bias=False, device="meta", dtype=torch.bfloat16).requires_grad_(False)
    hidden = torch.empty(90, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with LiveMemory() as memory:
        score_tokens(head, hidden, torch.zeros(90, dtype=torch.long, device="meta"), temperature, rows=30)
    assert memory.peak < 1.01 * 2 * 4 * 30 * 10_000


class Capped(torch.nn.Linear):
    def forward(self, hidden):
        return 3.0 * torch.tanh(super().forward(hidden) / 3.0)


@pytest.mark.parametrize("kind", [torch.nn.Linear, Capped])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_frozen_head_scores_the_same_and_is_computed_once(temperature, kind):
    torch.manual_seed(0)
    head, hidden, targets = (
        kind(16, 50, bias=False).double(),
        torch.randn(11, 16).double(),
        torch.randint(0, 50, (11,)),
    )
    factor, found = torch.randn(11), {}
    calls = []
    head.register_forward_hook(lambda *_: calls.append(1))
    for trained in (True, False):
        head.requires_grad_(trained)
        given = hidden.clone().requires_grad_()
        calls.clear()
        logps, entropies = score_tokens(head, given, targets, temperature=temperature, rows=3)
        (logps * factor).sum().backward()
        found[trained] = logps.detach(), entropies.detach(), given.grad
        if not trained:
            assert len(calls) == 4
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    head.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(score_tokens(head, hidden, targets, temperature=temperature, rows=3)[0], logps)


@pytest.mark.parametrize("rows", [3, 11])
@pytest.mark.parametrize("entropy_gradients", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_first_ranks_are_counted_next_to_gradients_in_any_chunks(trained, entropy_gradients, rows):
    """A vocabulary of a real model makes several chunks, which the backward pass computes a second time."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, 50).requires_grad_(trained), torch.randn(11, 16)
    targets = head(hidden).argmax(-1) + torch.tensor([0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0])
    targets.clamp_(max=49)
    ours, plain, hits = hidden.clone().requires_grad_(), hidden.clone().requires_grad_(), torch.full((11,), 7.0)
    given = {"temperature": 1.0, "entropy_gradients": entropy_gradients, "rows": rows}
    logps, _ = score_tokens(head, ours, targets, hits=hits, **given)
    logps.sum().backward()
    (-functional.cross_entropy(head(plain), targets, reduction="sum")).backward()
    torch.testing.assert_close(ours.grad, plain.grad)
    assert torch.equal(hits, (head(hidden).argmax(-1) == targets).float())
    assert 0 < hits.sum() < 11


@pytest.mark.parametrize("layout", ["packed", "plain"])
def test_autocast_does_not_round_a_frozen_models_scores(batch, layout):
    """The reference of full fine-tuning in 16 bits is scored so on a card."""
    policy = model_of(MODELS["qwen2"]).requires_grad_(False)
    exact = completion_logprobs(policy, batch, temperature=1.0, layout=layout)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found = completion_logprobs(policy, batch, temperature=1.0, layout=layout)
    for name in ("logps", "entropies"):
        scores = getattr(found, name)[batch.completion_mask]
        assert (scores.bfloat16() != scores).any()
        torch.testing.assert_close(scores, getattr(exact, name)[batch.completion_mask], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_packed_row_goes_with_its_backward_pass(policy, prompts, checkpointed, monkeypatch):
    left, made = [], PackedAttention.__init__

    def record(attention, *given):
        made(attention, *given)
        left.append(weakref.ref(attention))

    monkeypatch.setattr(PackedAttention, "__init__", record)
    if checkpointed:
        checkpoint_layers(policy)
    policy.train()
    gc.disable()  # what lies in a cycle would stay on a card until Python looks for cycles
    try:
        batch = token_batch(prompts, [[7, 8, 9]] * 4, range(4), device=torch.device("cpu"))
        left += [weakref.ref(tensor) for tensor in (batch.completion_ids, batch.packed.ids)]
        completion_logprobs(policy, batch, temperature=1.0).logps.sum().backward()
        del batch
        assert [one() for one in left] == [None] * 3
    finally:
        gc.enable()

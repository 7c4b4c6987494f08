"""The last layer that leaves out what nothing reads, against the complete one, for several architectures with random weights."""

import pytest
import torch

from grpo_tasks.attention import packed_attention as cpu_kernel
from grpo_tasks.policy.last_layer import PredictingTokens, predict_only
from grpo_tasks.policy.lean_layers import use_lean_layers
from grpo_tasks.policy.load import checkpoint_layers
from grpo_tasks.policy.logprobs import completion_logprobs
from tests.attention.test_packed_attention import BATCHES, MODELS, make_batch, model_of
from tests.policy.test_lean_layers import adapted, assert_same, results


def left_out(model):
    return [name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, PredictingTokens)]


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


def test_full_fine_tuning_gives_the_numbers_of_the_complete_layer():
    model = model_of(MODELS["qwen3"]).train()
    before = results(model)
    use_lean_layers(model)
    predict_only(model)
    assert left_out(model) == ["mlp"]
    assert_same(results(model), before)


def test_gradient_checkpointing_leaves_out_the_same():
    model = adapted("qwen2")
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

"""Passes of the model on a GPU against the same passes on a CPU."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.lean_layers import predict_only, use_lean_layers
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.policy.sharded import every_process, gather_shards, shard
from tests.attention.reference_kernel import masked_way
from tests.attention.test_packed_attention import BATCHES, MODELS, model_of
from tests.gpu.conftest import on_device
from tests.policy.test_recurrent_layers import hybrid
from tests.ports import free_ports

ARCHITECTURES = ["qwen2", "qwen3", "llama", "gemma3-window-16"]
RECURRENT = ["qwen3_5_text", "bamba"]
"""Of the zoo: Gated DeltaNet and Mamba 2, by the kernels that are installed."""


def policy_of(name):
    base = hybrid(name) if name in RECURRENT else model_of(MODELS[name])
    torch.manual_seed(3)
    policy = get_peft_model(base.requires_grad_(False), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    with torch.no_grad():
        for key, parameter in policy.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
    use_lean_layers(policy)
    predict_only(policy)
    return policy.train()


def batch_on(device, kind="mixed lengths"):
    prompts, completions, prompt_of = BATCHES[kind]
    generator = torch.Generator().manual_seed(0)

    def ids(length):
        return torch.randint(1, 300, (length,), generator=generator).tolist()

    return token_batch([ids(length) for length in prompts], [ids(length) for length in completions], prompt_of, device=device)


def results(policy, batch, layout="packed"):
    policy.zero_grad()
    logps = completion_logprobs(policy, batch, temperature=0.9, layout=layout).logps
    (logps * torch.linspace(-1, 1, logps.shape[1], device=logps.device)).sum().backward()
    gradient = [gather_shards(parameter.grad).cpu().flatten() for parameter in policy.parameters() if parameter.grad is not None]
    return logps.detach().cpu(), torch.cat(gradient)


def assert_same(found, wanted, tolerance):
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], wanted[1], rtol=10 * tolerance, atol=tolerance * wanted[1].abs().max().item())


@pytest.mark.parametrize("layout", ["packed", "plain"])
@pytest.mark.parametrize("name", ARCHITECTURES + RECURRENT)
def test_float32_scores_and_gradients_are_those_of_a_cpu(name, layout, device):
    policy = policy_of(name)
    wanted = results(policy, batch_on(torch.device("cpu")), layout)
    assert_same(results(on_device(copy.deepcopy(policy).to(device)), batch_on(device), layout), wanted, 1e-4)


@pytest.mark.parametrize("kind", BATCHES)
def test_every_shape_of_a_batch_gives_the_numbers_of_a_cpu(kind, device):
    policy = policy_of("qwen2")
    wanted = results(policy, batch_on(torch.device("cpu"), kind))
    assert_same(results(on_device(copy.deepcopy(policy).to(device)), batch_on(device, kind)), wanted, 1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_way_with_a_mask_gives_the_numbers_of_a_cpu(name, device, monkeypatch):
    policy = policy_of(name)
    wanted = results(policy, batch_on(torch.device("cpu")))
    masked_way(monkeypatch)
    assert_same(results(on_device(copy.deepcopy(policy).to(device)), batch_on(device)), wanted, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES + RECURRENT)
def test_16_bit_scores_are_near_those_of_float32(name, dtype, device):
    policy = policy_of(name)
    exact = results(policy, batch_on(torch.device("cpu")))
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    on_device(policy.to(device))
    packed, plain = (results(policy, batch_on(device), layout) for layout in ("packed", "plain"))
    off = (plain[0] - exact[0]).abs().mean()
    assert (packed[0] - exact[0]).abs().mean() < 2 * off + 1e-3
    assert torch.nn.functional.cosine_similarity(packed[1], exact[1], dim=0) > 0.99


def test_gradient_checkpointing_changes_no_bit(device):
    policy = on_device(policy_of("qwen2").to(device))
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        wanted = results(policy, batch_on(device))
        policy.gradient_checkpointing_enable({"use_reentrant": False})
        policy.enable_input_require_grads()
        found = results(policy, batch_on(device))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_one_rank_with_sharded_weights_gives_the_same_numbers(device, monkeypatch):
    wanted = results(on_device(policy_of("qwen2").to(device)), batch_on(device))
    [port] = free_ports(1)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 1, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        policy = on_device(policy_of("qwen2").to(device))
        shard(policy, every_process(device))
        assert_same(results(policy, batch_on(device)), wanted, 1e-4)
    finally:
        torch.distributed.destroy_process_group()

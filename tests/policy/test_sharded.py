"""Two processes that hold half of the weights each, compared with one process that holds all of them."""

from functools import partial

import pytest
import torch

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.folded_adapter import FoldedPolicy
from grpo_tasks.policy.load import trainable_policy, trained_weights
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.policy.sharded import every_process, gather_shards, sampling_copy, shard, shard_like
from schemas.config.model import ModelConfig
from schemas.results.model import ModelRef
from tests.forked import in_processes
from tests.zoo import build as zoo

CPU = torch.device("cpu")


def policy_of(lora, path="embedded:base"):
    policy = trainable_policy(ModelRef(path=path), ModelConfig(path=path, lora=lora), device=CPU, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return policy


def compare(path, layout):
    """What each of the two does."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for lora in ({}, None):
        alone, half = policy_of(lora, path), policy_of(lora, path)
        shard(half, every_process(CPU))
        held = sum(parameter.to_local().numel() for parameter in half.parameters())
        assert held <= 0.51 * sum(parameter.numel() for parameter in alone.parameters()), held

        # Each process its own completion; the gradients are the sum over both.
        batches = [token_batch([[5, 6, 7]], [[8 + index, 9, 10]], [0], device=CPU) for index in range(2)]
        for batch in batches:
            completion_logprobs(alone, batch, temperature=1.0).logps.sum().backward()
        completion_logprobs(half, batches[rank], temperature=1.0, layout=layout).logps.sum().backward()
        for one, other in zip(alone.parameters(), half.parameters(), strict=True):
            if one.requires_grad:
                torch.testing.assert_close(gather_shards(other.grad), one.grad, rtol=1e-3, atol=1e-4)

        copy = sampling_copy(half)
        ids = torch.arange(3, 30)[None]
        torch.testing.assert_close(copy.model(ids).logits, FoldedPolicy(alone).model(ids).logits, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            for one, other in zip(alone.parameters(), half.parameters(), strict=True):
                if one.requires_grad:
                    one.add_(0.01)
                    other.add_(shard_like(torch.full(one.shape, 0.01), other))
        copy.sync()
        torch.testing.assert_close(copy.model(ids).logits, FoldedPolicy(alone).model(ids).logits, rtol=1e-4, atol=1e-4)
        weights = trained_weights(half)
        for name, one in alone.named_parameters():
            if one.requires_grad:
                torch.testing.assert_close(weights[name], one.detach())


@pytest.fixture
def only_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("only_process")
def test_the_copy_to_sample_from_is_made_without_drawing_weights():
    policy = policy_of({})
    wanted = FoldedPolicy(policy).model(torch.arange(3, 30)[None]).logits
    shard(policy, every_process(CPU))
    state = torch.get_rng_state()
    copy = sampling_copy(policy).model
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(copy(torch.arange(3, 30)[None]).logits, wanted, rtol=1e-4, atol=1e-4)
    # Tied weights are there once.
    assert copy.get_output_embeddings().weight is copy.get_input_embeddings().weight
    assert not any(tensor.is_meta for tensor in (*copy.parameters(), *copy.buffers()))


@pytest.mark.long
@pytest.mark.parametrize(("name", "layout"), [(None, "plain"), ("qwen3_5_text", "packed"), ("bamba", "packed")])
def test_halves_together_are_the_whole(name, layout, tmp_path):
    if name is not None:
        zoo.save(name, tmp_path)
    in_processes(partial(compare, str(tmp_path) if name else "embedded:base", layout), 2)

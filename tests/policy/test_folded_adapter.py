import copy

import torch

from grpo_tasks.policy.folded_adapter import FoldedPolicy


def base_weights(policy):
    return {name: p.detach().clone() for name, p in policy.named_parameters() if "lora_" not in name}


def test_the_folded_copy_answers_like_the_policy_with_its_adapter_on(policy):
    ids = torch.randint(0, 300, (3, 20))
    folded = FoldedPolicy(policy)
    torch.testing.assert_close(folded.model(ids).logits, policy.eval()(ids).logits, rtol=1e-4, atol=1e-4)


def test_two_hundred_syncs_leave_the_base_byte_identical(policy):
    before = base_weights(policy)
    folded = FoldedPolicy(policy)
    torch.manual_seed(0)
    for _ in range(200):
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        folded.sync()
    after = base_weights(policy)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    ids = torch.randint(0, 300, (2, 8))
    torch.testing.assert_close(folded.model(ids).logits, policy.eval()(ids).logits, rtol=1e-3, atol=1e-3)


def test_weights_without_an_adapter_are_shared_not_copied(policy):
    folded = FoldedPolicy(policy)
    embedding = policy.get_base_model().get_input_embeddings().weight
    assert folded.model.get_input_embeddings().weight.data_ptr() == embedding.data_ptr()


def test_a_policy_that_has_not_been_synced_stays_what_it_was(policy):
    folded = FoldedPolicy(policy)
    ids = torch.randint(0, 300, (1, 8))
    before = copy.deepcopy(folded.model(ids).logits)
    with torch.no_grad():
        next(p for name, p in policy.named_parameters() if "lora_B" in name).add_(1.0)
    assert torch.equal(folded.model(ids).logits, before)

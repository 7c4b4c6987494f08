"""Whether a copy of the policy follows it, by calibration weights; and what the comparison of shifts can and cannot tell."""

import math

import pytest
import torch
from safetensors.torch import load_file

from grpo_tasks.policy.folded_adapter import FoldedPolicy
from grpo_tasks.policy.load import trainable_policy
from grpo_tasks.policy.text_tower import rename_keys
from grpo_tasks.rollout import calibration, local
from grpo_tasks.rollout.calibration import PROBE_IDS, calibrated, shift_fault, without_match
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ModelError
from schemas.results.model import ModelRef
from tests.rollout.servers import moved

ONE_TOKEN = Sampling.of(RolloutConfig(max_completion_length=1), temperature=0.0)


def new_policy(base_ref, dtype="float32", seed=1, **settings):
    return trainable_policy(base_ref, ModelConfig(dtype=dtype, **settings), device=torch.device("cpu"), seed=seed)


def halting(policy):
    """A copy in which one layer of 21 does not follow."""
    copy = FoldedPolicy(policy)
    copy._pairs = copy._pairs[1:]
    return copy


def stuck(policy):
    copy = FoldedPolicy(policy)
    copy.sync = lambda: None
    return copy


def of_another_stage(policy):
    dtype = str(policy.dtype).removeprefix("torch.")
    return FoldedPolicy(moved(new_policy(ModelRef(path="embedded:base"), dtype, seed=2), 0.05))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::schemas.errors.Notice")
@pytest.mark.parametrize(("dtype", "planted"), [
    ("float32", stuck), ("bfloat16", stuck), ("float16", stuck), ("float32", of_another_stage), ("bfloat16", of_another_stage),
    ("float32", halting),
])  # fmt: skip
def test_the_local_engine_refuses_a_copy_that_lags(base_ref, tokenizer, monkeypatch, dtype, planted):
    policy, requests = new_policy(base_ref, dtype), [Request([5, 6, 7], 0)]
    LocalEngine(policy, tokenizer).generate(requests, ONE_TOKEN)
    monkeypatch.setattr(local, "sampling_copy", planted)
    with pytest.raises(ModelError, match="cannot sample from Qwen2ForCausalLM: off by"):
        LocalEngine(policy, tokenizer).generate(requests, ONE_TOKEN)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_calibration_weights_move_a_new_policy_and_leave_it(base_ref, dtype):
    policy, drawn = new_policy(base_ref, dtype), torch.random.get_rng_state()
    before, copy = [parameter.detach().clone() for parameter in policy.parameters()], FoldedPolicy(policy)
    with calibrated(policy, PROBE_IDS, dtype) as wanted:
        assert 1.0 <= wanted.shift.abs().mean() < 4.0
        copy.sync()
        found = calibration.probe_logps(copy.model, PROBE_IDS) - wanted.base
    noise, share = calibration.LEAST_NOISE[dtype], calibration.CALIBRATION_SHARE[dtype]
    assert shift_fault(found, wanted.shift, noise=noise, share=share) is None
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(was, now) for was, now in zip(before, policy.parameters(), strict=True))
    assert policy.training == new_policy(base_ref, dtype).training


def test_all_weights_are_calibrated_where_all_are_trained(base_ref):
    policy = new_policy(base_ref, lora=None)
    before = {name: values.detach().clone() for name, values in policy.named_parameters()}
    with calibrated(policy, PROBE_IDS, "float32") as found:
        assert 1.0 <= found.shift.abs().mean() < 4.0
        moved_names = {name for name, values in policy.named_parameters() if not torch.equal(values, before[name])}
    assert moved_names == {name for name, values in before.items() if values.ndim > 1}
    assert all(torch.equal(values, before[name]) for name, values in policy.named_parameters())


def test_an_adapter_outside_the_forward_pass_of_text_is_refused(policy):
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("lora_A" in name)
    match = "no weights of the adapter change what the model says"
    with pytest.raises(ModelError, match=match), calibrated(policy, PROBE_IDS, "float32"):
        pass


def test_names_are_exchanged_at_their_beginning_only(policy, tmp_path):
    policy.save_pretrained(str(tmp_path / "adapter"))
    rename_keys(tmp_path / "adapter", "language_model.model.")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    assert "base_model.model.language_model.model.layers.0.mlp.down_proj.lora_A.weight" in load_file(file)
    rename_keys(tmp_path / "adapter", "model.")
    wanted = {name for name in policy.state_dict() if "lora_" in name}
    assert {name.replace(".weight", ".default.weight") for name in load_file(file)} == wanted
    assert "meta-llama/x, is not on this machine" in without_match(tmp_path / "adapter", "meta-llama/x")


@pytest.mark.slow
def test_noise_raises_no_alarm_and_hides_no_bad_sampler():
    """Both sides round: sampler and trainer have noise of their own, the trainer's in the shift that is wanted too."""
    generator, noise = torch.Generator().manual_seed(5), 0.05
    alarms = found = 0
    for size in [0.0, *(noise * 2.0**power for power in range(-6, 7))]:
        for _ in range(1000):
            true = size * torch.randn(126, generator=generator)
            sampler, trainer = (noise / math.sqrt(2) * torch.randn(126, generator=generator) for _ in range(2))
            alarms += shift_fault(true + sampler, true + trainer, noise=noise, share=0.5) is not None
            if size >= 2 * noise:
                found += shift_fault(0 * true, true + trainer, noise=noise, share=0.5) is not None
    assert (alarms, found) == (0, 6000)
    assert shift_fault(torch.full((126,), math.nan), torch.ones(126), noise=noise, share=0.5)

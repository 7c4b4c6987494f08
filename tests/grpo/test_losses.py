"""Loss and gradients against TRL's own `_compute_loss`, fed the same tensors."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from grpo_tasks.grpo.losses import LossInputs, k3, policy_loss, token_weights
from schemas.config import StageConfig

MAX_LENGTH = 9


def stage(**settings):
    return StageConfig(name="s", rewards=["format"], num_generations=2, per_device_train_batch_size=6, **settings)


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([7, 3, 1, 5, 7, 2])
    mask = torch.arange(7)[None] < lengths[:, None]
    logps = -normal(6, 7).abs()
    return SimpleNamespace(
        mask=mask,
        logps=logps,
        old=logps + 0.5 * normal(6, 7),
        ref=logps + 0.3 * normal(6, 7),
        advantages=normal(6),
    )


def ours(batch, settings, on_policy):
    logps = batch.logps.clone().requires_grad_()
    inputs = LossInputs(
        logps=logps,
        old_logps=logps.detach() if on_policy else batch.old,
        ref_logps=batch.ref if settings.beta else None,
        advantages=batch.advantages,
        mask=batch.mask,
        weights=token_weights(batch.mask, settings, max_completion_length=MAX_LENGTH, microbatch_size=6).double(),
    )
    out = policy_loss(inputs, settings)
    out.loss.backward()
    return out, logps.grad


def theirs(batch, settings, on_policy):
    from trl import GRPOTrainer

    trainer = GRPOTrainer.__new__(GRPOTrainer)
    logps = batch.logps.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, torch.zeros_like(logps), None)
    identity = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x, sync_gradients=True)
    for name, value in {
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": settings.importance_sampling_level,
        "beta": settings.beta,
        "args": SimpleNamespace(
            delta=settings.delta,
            use_bias_correction_kl=settings.use_bias_correction_kl,
            sapo_temperature_pos=settings.sapo_temperature_pos,
            sapo_temperature_neg=settings.sapo_temperature_neg,
            steps_per_generation=1,
        ),
        "loss_type": settings.loss_type,
        "epsilon_low": settings.epsilon,
        "epsilon_high": settings.epsilon_high or settings.epsilon,
        "use_vllm": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_LENGTH,
        "accelerator": identity,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
    }.items():
        setattr(trainer, name, value)
    mask = batch.mask.long()
    inputs = {
        "prompt_ids": torch.zeros(6, 1, dtype=torch.long),
        "prompt_mask": torch.ones(6, 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": batch.advantages,
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": batch.ref,
    }
    if not on_policy:
        inputs["old_per_token_logps"] = batch.old
    loss = trainer._compute_loss(SimpleNamespace(training=True), inputs)
    loss.backward()
    return loss, logps.grad, trainer._metrics["train"]


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("clip", [{}, {"epsilon_high": 0.28}, {"delta": 1.5}])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_loss_and_gradient_equal_trl(loss_type, clip, level, beta, on_policy):
    settings = stage(loss_type=loss_type, importance_sampling_level=level, beta=beta, **clip)
    batch = tensors(seed=3)
    out, gradient = ours(batch, settings, on_policy)
    loss, wanted, metrics = theirs(batch, settings, on_policy)
    torch.testing.assert_close(out.loss, loss, rtol=1e-6, atol=1e-12, check_dtype=False)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-12)
    if beta:
        assert (out.kl_sum / batch.mask.sum()).item() == pytest.approx(metrics["kl"][0], rel=1e-6)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "cispo", "epsilon_high": 1.1},
        {"loss_type": "sapo"},
        {"loss_type": "sapo", "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 2.0},
        {"loss_type": "sapo", "importance_sampling_level": "sequence"},
        {"loss_type": "dapo", "use_bias_correction_kl": True},
        {"loss_type": "grpo", "use_bias_correction_kl": True, "importance_sampling_level": "sequence"},
    ],
    ids=str,
)
def test_cispo_sapo_and_the_corrected_kl_equal_trl(settings, beta, on_policy):
    chosen, batch = stage(beta=beta, **settings), tensors(seed=4)
    out, gradient = ours(batch, chosen, on_policy)
    loss, wanted, _ = theirs(batch, chosen, on_policy)
    torch.testing.assert_close(out.loss, loss, rtol=1e-6, atol=1e-12, check_dtype=False)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_gradient_accumulation_is_exact_however_the_update_is_cut(loss_type):
    settings = stage(loss_type=loss_type)
    batch = tensors(seed=5)
    weights = token_weights(batch.mask, settings, max_completion_length=MAX_LENGTH, microbatch_size=6)
    whole, gradient = ours(batch, settings, on_policy=False)
    total, parts = 0.0, []
    for rows in ([0], [1, 2, 3], [4, 5]):
        logps = batch.logps[rows].clone().requires_grad_()
        inputs = LossInputs(logps, batch.old[rows], None, batch.advantages[rows], batch.mask[rows], weights[rows].double())
        out = policy_loss(inputs, settings)
        out.loss.backward()
        total += out.loss.item()
        parts.append(logps.grad)
    assert total == pytest.approx(whole.loss.item(), rel=1e-9)
    torch.testing.assert_close(torch.cat(parts), gradient)


def test_k3_is_never_negative_and_zero_only_for_equal_policies():
    x = torch.linspace(-3, 3, 101, dtype=torch.float64)
    assert (k3(x) >= -1e-12).all()
    assert k3(torch.zeros(1)).item() == 0


def test_on_policy_gradient_is_that_of_advantage_times_logp():
    settings = stage(loss_type="dr_grpo")
    batch = tensors(seed=7)
    _, gradient = ours(batch, settings, on_policy=True)
    wanted = -(batch.advantages[:, None] * batch.mask) / (6 * MAX_LENGTH)
    torch.testing.assert_close(gradient, wanted)

"""Loss and gradients against TRL's own `_compute_loss`, fed the same tensors."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from grpo_tasks.grpo.losses import (
    LossInputs,
    entropy_threshold,
    k3,
    mean_weights,
    off_policy_mask,
    policy_loss,
    sampling_correction,
    token_weights,
)
from grpo_tasks.grpo.measure import UpdateFigures
from grpo_tasks.grpo.ranks import Ranks
from schemas.config.stage import StageConfig

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
        entropies=normal(6, 7).abs(),
        sampler=logps + 0.4 * normal(6, 7),
        correction=None,
    )


def ours(batch, settings, on_policy):
    logps = batch.logps.clone().requires_grad_()
    entropies = batch.entropies.clone().requires_grad_()
    old = logps.detach() if on_policy else batch.old
    inputs = LossInputs(
        logps=logps,
        old_logps=old,
        ref_logps=batch.ref if settings.beta else None,
        advantages=batch.advantages[:, None],
        mask=batch.mask,
        weights=token_weights(batch.mask, settings, max_completion_length=MAX_LENGTH, microbatch_size=6).double(),
        keep=entropies.detach() >= entropy_threshold(entropies[batch.mask].detach(), settings)
        if settings.top_entropy_quantile < 1
        else None,
        correction=sampling_correction(old, batch.sampler, batch.mask, settings),
        on_policy=off_policy_mask(logps, batch.sampler, batch.advantages[:, None], batch.mask, settings),
        entropies=entropies if settings.entropy_coef else None,
        entropy_weights=mean_weights(batch.mask).double(),
    )
    out = policy_loss(inputs, settings)
    out.loss.backward()
    return out, logps.grad, entropies.grad


def theirs(batch, settings, on_policy):
    from trl import GRPOTrainer

    trainer = GRPOTrainer.__new__(GRPOTrainer)
    logps, entropies = batch.logps.clone().requires_grad_(), batch.entropies.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, entropies, None)
    identity = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        reduce=lambda x, **_: x,
        sync_gradients=True,
        pad_across_processes=lambda x, **_: x,
    )
    for name, value in {
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "top_entropy_quantile": settings.top_entropy_quantile,
        "off_policy_mask_threshold": settings.off_policy_mask_threshold,
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
        "use_vllm": batch.correction is not None,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": MAX_LENGTH,
        "accelerator": identity,
        "_entropy_bonus_enabled": settings.entropy_coef > 0,
        "use_adaptive_entropy": False,
        "entropy_coef": settings.entropy_coef,
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
        "importance_sampling_ratio": batch.correction,
        "sampling_per_token_logps": batch.sampler,
    }
    if not on_policy:
        inputs["old_per_token_logps"] = batch.old
    loss = trainer._compute_loss(SimpleNamespace(training=True), inputs)
    loss.backward()
    return loss, logps.grad, entropies.grad, trainer._metrics["train"]


def assert_equals_trl(batch, settings, on_policy):
    out, gradient, entropy_gradient = ours(batch, settings, on_policy)
    loss, wanted, wanted_entropy, metrics = theirs(batch, settings, on_policy)
    torch.testing.assert_close(out.loss, loss, rtol=1e-6, atol=1e-12, check_dtype=False)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-12)
    if settings.entropy_coef:
        torch.testing.assert_close(entropy_gradient, wanted_entropy, rtol=1e-6, atol=1e-12)
    if settings.beta and not settings.use_bias_correction_kl:
        assert (out.kl_sum / batch.mask.sum()).item() == pytest.approx(metrics["kl"][0], rel=1e-6)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("clip", [{}, {"epsilon_high": 0.28}, {"delta": 1.5}])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_loss_and_gradient_equal_trl(loss_type, clip, level, beta, on_policy):
    settings = stage(loss_type=loss_type, importance_sampling_level=level, beta=beta, **clip)
    assert_equals_trl(tensors(seed=3), settings, on_policy)


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
        *(
            {"loss_type": loss_type} | entropy
            for loss_type in ("grpo", "dapo", "dr_grpo")
            for entropy in ({"entropy_coef": 0.01}, {"top_entropy_quantile": 0.3}, {"top_entropy_quantile": 0.0})
        ),
    ],
    ids=str,
)
def test_other_losses_kl_correction_and_entropy_terms_equal_trl(settings, beta, on_policy):
    assert_equals_trl(tensors(seed=4), stage(beta=beta, **settings), on_policy)


@pytest.mark.parametrize("bounds", [{}, {"importance_sampling_clip_max": 1.2, "importance_sampling_clip_min": 0.8}], ids=str)
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_correction_for_the_sampler_equals_trl(mode, bounds):
    """TRL computes it inside its rollout; the lines below are those (grpo_trainer.py, v1.16), on our tensors."""
    chosen, batch = stage(importance_sampling_correction=mode, beta=0.04, **bounds), tensors(seed=9)
    difference = (batch.old - batch.sampler) * batch.mask
    ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    low, high = chosen.importance_sampling_clip_min, chosen.importance_sampling_clip_max
    if mode.endswith("truncate"):
        batch.correction = ratio.clamp(min=low, max=high)
    else:
        batch.correction = ratio.masked_fill((ratio < (low or 0)) | (ratio > high), 0.0)
    assert_equals_trl(batch, chosen, on_policy=False)


@pytest.mark.parametrize("threshold", [0.05, 0.2])
@pytest.mark.parametrize(
    "settings", [{"loss_type": "dapo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}], ids=str
)
def test_the_off_policy_sequence_mask_equals_trl(settings, threshold):
    chosen, batch = stage(off_policy_mask_threshold=threshold, beta=0.04, **settings), tensors(seed=12)
    kept = off_policy_mask(batch.logps, batch.sampler, batch.advantages[:, None], batch.mask, chosen)
    assert 0 < (~kept).sum() < (batch.advantages < 0).sum()
    assert_equals_trl(batch, chosen, on_policy=False)


@pytest.mark.parametrize("mode", ["geometric_truncate", "geometric_mask"])
def test_the_geometric_correction_is_one_number_whatever_the_length(mode):
    bounds = {"importance_sampling_clip_max": 1.1, "importance_sampling_clip_min": 0.8}
    batch, found = tensors(seed=13), stage(importance_sampling_correction=mode, **bounds)
    ratios = sampling_correction(batch.old, batch.sampler, batch.mask, found)
    for row, ratio in enumerate(ratios.flatten().tolist()):
        tokens = int(batch.mask[row].sum())
        product = math.prod(math.exp(batch.old[row, at] - batch.sampler[row, at]) for at in range(tokens))
        wanted = product ** (1 / tokens)
        if not 0.8 <= wanted <= 1.1:
            wanted = min(max(wanted, 0.8), 1.1) if mode == "geometric_truncate" else 0.0
        assert ratio == pytest.approx(wanted)
    assert len(set(ratios.flatten().tolist())) > 2


def test_figures_of_the_sampler_are_those_of_the_trained_tokens():
    batch = tensors(seed=12)
    chosen = stage(importance_sampling_correction="token_mask", importance_sampling_clip_max=1.3, off_policy_mask_threshold=0.05)
    figures = UpdateFigures()
    for rows in ([0, 1], [2, 3, 4, 5]):
        old, sampler, mask = batch.old[rows].float(), batch.sampler[rows].float(), batch.mask[rows]
        advantages, logps = batch.advantages[rows][:, None].float(), batch.logps[rows].float()
        inputs = LossInputs(
            logps=logps, old_logps=old, ref_logps=None, advantages=advantages, mask=mask, weights=mask.float(),
            correction=sampling_correction(old, sampler, mask, chosen),
            on_policy=off_policy_mask(logps, sampler, advantages, mask, chosen),
        )  # fmt: skip
        figures.add(inputs, policy_loss(inputs, chosen), torch.zeros_like(old), sampler, None)
    found = figures.over(Ranks(Accelerator(cpu=True))).means()
    differences = [batch.old[row][batch.mask[row]] - batch.sampler[row][batch.mask[row]] for row in range(6)]
    together = torch.cat(differences)
    weights = torch.where(together.exp() > 1.3, 0.0, together.exp())
    fallen = [(batch.sampler[row] - batch.logps[row])[batch.mask[row]].mean().item() for row in range(6)]
    left_out = [advantage < 0 and fall > 0.05 for advantage, fall in zip(batch.advantages.tolist(), fallen, strict=True)]
    assert found["sampling/kl"] == pytest.approx((together.exp() - together - 1).mean().item(), rel=1e-5)
    assert found["sampling/sampling_logp_difference/worst_sequence"] == pytest.approx(
        max(abs(one.mean().item()) for one in differences), rel=1e-5
    )
    # Kish's effective sample size, as a share of the tokens.
    wanted = weights.sum().item() ** 2 / weights.square().sum().item() / len(weights)
    assert found["sampling/effective_sample_size"] == pytest.approx(wanted, rel=1e-5)
    assert 0.3 < wanted < 0.95
    assert found["sampling/off_policy_masked"] == sum(left_out) / 6 > 0


def test_one_advantage_per_token_weighs_each_token_with_its_own():
    chosen, batch = stage(loss_type="dr_grpo"), tensors(seed=10)
    each = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logps = batch.logps.clone().requires_grad_()
    weights = token_weights(batch.mask, chosen, max_completion_length=MAX_LENGTH, microbatch_size=6).double()
    policy_loss(LossInputs(logps, logps.detach(), None, each, batch.mask, weights), chosen).loss.backward()
    torch.testing.assert_close(logps.grad, -each * batch.mask / (6 * MAX_LENGTH))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_gradient_accumulation_is_exact_however_the_update_is_split(loss_type):
    settings = stage(loss_type=loss_type)
    batch = tensors(seed=5)
    weights = token_weights(batch.mask, settings, max_completion_length=MAX_LENGTH, microbatch_size=6)
    complete, gradient, _ = ours(batch, settings, on_policy=False)
    total, gradients = 0.0, []
    for rows in ([0], [1, 2, 3], [4, 5]):
        logps = batch.logps[rows].clone().requires_grad_()
        inputs = LossInputs(
            logps, batch.old[rows], None, batch.advantages[rows][:, None], batch.mask[rows], weights[rows].double()
        )
        out = policy_loss(inputs, settings)
        out.loss.backward()
        total += out.loss.item()
        gradients.append(logps.grad)
    assert total == pytest.approx(complete.loss.item(), rel=1e-9)
    torch.testing.assert_close(torch.cat(gradients), gradient)


def test_k3_is_never_negative_and_zero_only_for_equal_policies():
    x = torch.linspace(-3, 3, 101, dtype=torch.float64)
    assert (k3(x) >= -1e-12).all()
    assert k3(torch.zeros(1)).item() == 0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bnpo_is_the_mean_over_microbatches_of_the_mean_over_tokens(size):
    settings, batch = stage(loss_type="bnpo"), tensors(seed=11)
    weights = token_weights(batch.mask, settings, max_completion_length=MAX_LENGTH, microbatch_size=size)
    values = torch.randn(6, 7, generator=torch.Generator().manual_seed(2))
    means = [
        values[start : start + size][batch.mask[start : start + size]].mean().item() for start in range(0, len(values), size)
    ]
    assert (weights * values).sum().item() == pytest.approx(sum(means) / len(means), rel=1e-5)
    assert weights.sum().item() == pytest.approx(1.0)


def clipped(ratios, advantages, **settings):
    """Tokens counted as clipped below and above, for one token per completion."""
    old = torch.zeros(len(ratios), 1)
    logps, ones = torch.tensor(ratios)[:, None].log(), torch.ones_like(old)
    inputs = LossInputs(logps, old, None, torch.tensor(advantages)[:, None], ones.bool(), ones)
    out = policy_loss(inputs, stage(**settings))
    return out.clipped_low.item(), out.clipped_high.item()


RATIOS, SIGNS = [0.001, 0.7, 1.5, 1000.0] * 2, [-1.0] * 4 + [1.0] * 4


def test_a_token_is_clipped_only_where_its_gradient_is_cut():
    assert clipped(RATIOS, SIGNS, loss_type="grpo") == (2, 2)
    assert clipped(RATIOS, SIGNS, loss_type="grpo", epsilon=0.4) == (1, 2)
    assert clipped(RATIOS, SIGNS, loss_type="grpo", epsilon_high=0.6) == (2, 1)


def test_sapo_never_clips_and_cispo_clips_above_only():
    assert clipped(RATIOS, SIGNS, loss_type="sapo") == (0, 0)
    assert clipped(RATIOS, SIGNS, loss_type="sapo", epsilon_high=0.1) == (0, 0)
    assert clipped(RATIOS, SIGNS, loss_type="cispo", epsilon_high=5.0) == (0, 1)

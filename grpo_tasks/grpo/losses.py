"""The loss of an update, as a sum over tokens of (weight x per-token loss).

    ratio  = exp(logp - old_logp)                                  per token, or one per sequence (GSPO)
    policy = -min(ratio A, clip(ratio, 1 - eps, 1 + eps_high) A)   arXiv:2402.03300 eq. 3; PPO's clip
           | -min(ratio, eps_high).detach() A logp                 cispo, arXiv:2506.13585 eq. 4
           | -4/t sigmoid(t (ratio - 1)) A,  t by the sign of A    sapo, arXiv:2511.20347 eq. 5
    kl     = exp(ref - logp) - (ref - logp) - 1                    k3 estimator, joschu.net/blog/kl-approx.html
    loss   = sum_t weight_t (keep_t correction_t policy_t + beta kl_t) - entropy_coef mean_t entropy_t

`keep` is 1, or 1 for the tokens of highest entropy and 0 for the others (arXiv:2506.01939); `correction` makes up for a sampler
whose probabilities are not quite the trainer's. The weights hold the whole difference between the loss types. They are set for
the whole update before it is cut into micro-batches, so gradient accumulation is exact and skipping a dead group changes nothing.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from schemas.config.stage import StageConfig


@dataclass(frozen=True, slots=True)
class LossInputs:
    """N completions, padded to T tokens."""

    logps: Float[Tensor, "N T"]
    """log-probabilities under the policy, with gradients."""
    old_logps: Float[Tensor, "N T"]
    """Under the policy that sampled; equal to `logps.detach()` when on-policy."""
    ref_logps: Float[Tensor, "N T"] | None
    """Under the reference policy; None when beta is 0."""
    advantages: Float[Tensor, "N _"]
    """One per completion [N, 1], or one per token [N, T]."""
    mask: Bool[Tensor, "N T"]
    """Tokens that count."""
    weights: Float[Tensor, "N T"]
    """From `token_weights`."""
    keep: Bool[Tensor, "N T"] | None = None
    """Tokens whose policy term counts; None: all."""
    correction: Float[Tensor, "N _"] | None = None
    """From `sampling_correction`."""
    entropies: Float[Tensor, "N T"] | None = None
    """Entropy (nats) of each token's distribution, with gradients; needed for the entropy bonus only."""
    entropy_weights: Float[Tensor, "N T"] | None = None
    """Weight of each token in the mean of the entropy bonus."""


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The loss and what is watched beside it; sums over tokens, so that micro-batches add up."""

    loss: Float[Tensor, ""]
    kl_sum: Float[Tensor, ""]
    clipped_low: Float[Tensor, ""]
    """Tokens (sequences for GSPO, times their length) clipped from below."""
    clipped_high: Float[Tensor, ""]


def policy_loss(inputs: LossInputs, stage: StageConfig) -> LossOutputs:
    """Clipped policy loss plus beta times the KL towards the reference."""
    ratio = importance_ratio(inputs, level=stage.importance_sampling_level)
    advantages = inputs.advantages
    low, high = clip_bounds(stage)
    if stage.loss_type == "cispo":
        per_token = -ratio.clamp(max=high).detach() * advantages * inputs.logps
    elif stage.loss_type == "sapo":
        sharpness = torch.where(advantages > 0, stage.sapo_temperature_pos, stage.sapo_temperature_neg)
        per_token = -torch.sigmoid(sharpness * (ratio - 1)) * 4 / sharpness * advantages
    else:
        bounded = ratio.clamp(max=stage.delta) if stage.delta is not None else ratio
        per_token = -torch.min(bounded * advantages, ratio.clamp(low, high) * advantages)
    if inputs.keep is not None:
        per_token = per_token * inputs.keep
    if inputs.correction is not None:
        per_token = per_token * inputs.correction
    kl = torch.zeros_like(inputs.logps)
    if inputs.ref_logps is not None:
        kl = k3(inputs.ref_logps - inputs.logps)
        if stage.use_bias_correction_kl:
            kl = kl * ratio
        per_token = per_token + stage.beta * kl
    loss = (per_token * inputs.weights).sum()
    if inputs.entropies is not None and inputs.entropy_weights is not None:
        loss = loss - stage.entropy_coef * (inputs.entropies * inputs.entropy_weights).sum()
    mask = inputs.mask.float()
    return LossOutputs(
        loss=loss,
        kl_sum=(kl * mask).sum().detach(),
        clipped_low=((ratio < low) & (advantages < 0)).mul(mask).sum().detach(),
        clipped_high=((ratio > high) & (advantages > 0)).mul(mask).sum().detach(),
    )


def clip_bounds(stage: StageConfig) -> tuple[float, float]:
    """Ratios outside of which a token is clipped; sapo damps and clips nothing, cispo caps from above only."""
    if stage.loss_type == "sapo":
        return -math.inf, math.inf
    if stage.loss_type == "cispo":
        return -math.inf, stage.epsilon_high or math.inf
    return 1 - stage.epsilon, 1 + (stage.epsilon_high or stage.epsilon)


def importance_ratio(inputs: LossInputs, *, level: str) -> Float[Tensor, "N _"]:
    """pi / pi_old per token [N, T], or per sequence [N, 1] as the geometric mean over its tokens (arXiv:2507.18071 eq. 7)."""
    log_ratio = inputs.logps - inputs.old_logps
    if level == "token":
        return log_ratio.exp()
    lengths = inputs.mask.sum(-1, keepdim=True).clamp(min=1)
    return ((log_ratio * inputs.mask).sum(-1, keepdim=True) / lengths).exp()


def sampling_correction(
    old_logps: Float[Tensor, "N T"], sampler_logps: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], stage: StageConfig
) -> Float[Tensor, "N _"] | None:
    """pi_old / pi_sampler per token or per sequence, truncated to the bounds or set to 0 outside of them; None: no correction.

    A sampler with other kernels or another precision draws from a slightly different policy; this is the importance weight that
    makes up for it (fengyao.notion.site/off-policy-rl), with TRL's four modes.
    """
    if stage.importance_sampling_correction == "none":
        return None
    level, _, kind = stage.importance_sampling_correction.partition("_")
    difference = (old_logps - sampler_logps).detach() * mask
    ratio = (difference if level == "token" else difference.sum(-1, keepdim=True)).exp()
    low = stage.importance_sampling_clip_min if stage.importance_sampling_clip_min is not None else 0.0
    high = stage.importance_sampling_clip_max if stage.importance_sampling_clip_max is not None else math.inf
    if kind == "truncate":
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def entropy_threshold(entropies: Float[Tensor, " M"], stage: StageConfig) -> Float[Tensor, ""]:
    """The entropy (nats) that the share `top_entropy_quantile` of an update's M tokens reaches."""
    # torch.quantile refuses more than 2^24 values; a sort does not.
    ordered = entropies.float().sort().values
    place = (1 - stage.top_entropy_quantile) * (len(ordered) - 1)
    low = int(place)
    return torch.lerp(ordered[low], ordered[min(low + 1, len(ordered) - 1)], place - low)


def k3(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """exp(x) - x - 1 of x = log(ref / policy): unbiased for KL(policy || ref) and never negative."""
    return log_ratio.exp() - log_ratio - 1


def token_weights(
    mask: Bool[Tensor, "N T"], stage: StageConfig, *, max_completion_length: int, microbatch_size: int
) -> Float[Tensor, "N T"]:
    """Weight of each token in the loss of the update.

        grpo, sapo   1 / (N |o_i|)                          mean over sequences of the mean over tokens
        dapo, cispo  1 / sum |o_i|                          mean over all tokens of the update (arXiv:2503.14476)
        bnpo         1 / (M sum of |o_i| in the micro-batch) mean over micro-batches of the mean over tokens
        dr_grpo      1 / (N max_completion_length)          no length in the denominator (arXiv:2503.20783)

    Args:
        mask: tokens that count, of all N completions of the update.
        stage: for `loss_type`.
        max_completion_length: the configured limit, in tokens.
        microbatch_size: completions per micro-batch (`per_device_train_batch_size`).
    """
    tokens, num = mask.float(), mask.shape[0]
    if stage.loss_type in ("grpo", "sapo"):
        return tokens / tokens.sum(-1, keepdim=True).clamp(min=1.0) / num
    if stage.loss_type in ("dapo", "cispo"):
        return mean_weights(mask)
    if stage.loss_type == "bnpo":
        parts = tokens.split(microbatch_size)
        return torch.cat([part / part.sum().clamp(min=1.0) for part in parts]) / len(parts)
    return tokens / (num * max_completion_length)


def mean_weights(mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """Weights of a plain mean over all tokens of the update."""
    return mask.float() / mask.sum().clamp(min=1)

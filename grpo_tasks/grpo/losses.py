"""The loss of one update: a weighted sum over tokens. The page to read next to the papers.

    ratio_t  = pi(o_t) / pi_old(o_t) = exp(logp_t - old_logp_t)          per token, or one per sequence (GSPO)

    policy_t = -min(ratio A, clip(ratio, 1 - eps, 1 + eps_high) A)       GRPO, arXiv:2402.03300 eq. 3 (PPO's clip)
             | -min(ratio, eps_high).detach() A logp                     CISPO, arXiv:2506.13585 eq. 4
             | -(4 / tau) sigmoid(tau (ratio - 1)) A                     SAPO, arXiv:2511.20347 eq. 5; tau by the sign of A

    kl_t     = exp(ref - logp) - (ref - logp) - 1                        arXiv:2402.03300 eq. 4: Schulman's k3 estimator

    loss     = sum_t weight_t (keep_t on_policy correction_t policy_t + beta kl_t)  -  entropy_coef mean_t entropy_t

`weight_t` carries the entire difference between the averages of GRPO, BNPO, Dr. GRPO and DAPO. The weights are computed for the
complete update before it is split into microbatches: gradient accumulation is exact, and leaving out a dead group changes
nothing, because its advantages are 0.

Shapes: N completions of a microbatch, padded to T tokens. [N, 1] broadcasts over the tokens of a completion.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from schemas.config.stage import StageConfig


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the loss of a microbatch is computed from."""

    logps: Float[Tensor, "N T"]
    """log-probabilities (nats) under the policy that is trained; the only input that always carries gradients."""
    old_logps: Float[Tensor, "N T"]
    """Under the policy at the time of sampling; `logps.detach()` when the update is on-policy."""
    ref_logps: Float[Tensor, "N T"] | None
    """Under the reference policy; None when beta is 0."""
    advantages: Float[Tensor, "N _"]
    mask: Bool[Tensor, "N T"]
    """False on padding, and on tokens that the policy did not write."""
    weights: Float[Tensor, "N T"]
    """From `token_weights`; 0 on padding."""
    keep: Bool[Tensor, "N T"] | None = None
    """Tokens whose policy term counts, those of high entropy; None: all."""
    correction: Float[Tensor, "N _"] | None = None
    """From `sampling_correction`."""
    on_policy: Bool[Tensor, "N _"] | None = None
    """From `off_policy_mask`."""
    entropies: Float[Tensor, "N T"] | None = None
    """Entropy (nats) of each token's distribution, with gradients; for the entropy bonus only."""
    entropy_weights: Float[Tensor, "N T"] | None = None
    """Weight of each token in the mean of the entropy bonus."""


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The loss, with gradients, and sums over tokens, so that microbatches can be added."""

    loss: Float[Tensor, ""]
    kl_sum: Float[Tensor, ""]
    """Of the k3 estimates (nats); 0 when beta is 0."""
    clipped_low: Float[Tensor, ""]
    """Tokens whose ratio is below the clip range while that matters, for a sequence ratio all tokens of the sequence."""
    clipped_high: Float[Tensor, ""]


def policy_loss(inputs: LossInputs, stage: StageConfig) -> LossOutputs:
    """The loss of a microbatch; the losses of an update's microbatches add up to the loss of the update."""
    ratio = importance_ratio(inputs, level=stage.importance_sampling_level)  # [N, T], or [N, 1] for GSPO
    # [N, T]: advantages and a sequence ratio broadcast over the tokens of their completion. Where both are [N, 1] the policy
    # term stays [N, 1] and is broadcast by the weights below.
    per_token = LOSSES[stage.loss_type].term(ratio, inputs, stage)
    if inputs.keep is not None:
        # arXiv:2506.01939: only the tokens at which the policy really decides something carry the gradient.
        per_token = per_token * inputs.keep
    if inputs.on_policy is not None:
        per_token = per_token * inputs.on_policy
    if inputs.correction is not None:
        per_token = per_token * inputs.correction
    kl = torch.zeros_like(inputs.logps)
    if inputs.ref_logps is not None:
        # The mask keeps tokens that nobody sampled from overflowing; a weight of 0 would not turn infinity into 0.
        kl = k3((inputs.ref_logps - inputs.logps) * inputs.mask)
        if stage.use_bias_correction_kl:
            # The tokens come from pi_old, the KL is an expectation under pi: the ratio is the importance weight between the
            # two (arXiv:2512.02556, "unbiased KL estimate").
            kl = kl * ratio
        # After keep and correction: the KL applies to every token, whatever its policy term.
        per_token = per_token + stage.beta * kl
    loss = (per_token * inputs.weights).sum()  # [N, T] -> []
    if inputs.entropies is not None and inputs.entropy_weights is not None:
        loss = loss - stage.entropy_coef * (inputs.entropies * inputs.entropy_weights).sum()
    mask = inputs.mask.float()
    low, high = LOSSES[stage.loss_type].bounds(stage)
    return LossOutputs(
        loss=loss,
        kl_sum=(kl * mask).sum().detach(),
        # The clip acts on one side per sign: a worse completion (A < 0) is not pushed below `low`, a better one not above `high`.
        clipped_low=((ratio < low) & (inputs.advantages < 0)).mul(mask).sum().detach(),
        clipped_high=((ratio > high) & (inputs.advantages > 0)).mul(mask).sum().detach(),
    )


def clipped(ratio: Float[Tensor, "N _"], inputs: LossInputs, stage: StageConfig) -> Float[Tensor, "N _"]:
    """PPO's term; [N, 1] when ratio and advantages are both per sequence."""
    # The min leaves the ratio unbounded for A < 0; `delta` bounds it there too (two-sided clip, arXiv:2505.07291). A separate
    # `epsilon_high` lets improbable tokens gain more than they may lose (clip-higher, arXiv:2503.14476, 3.1).
    bounded = ratio.clamp(max=stage.delta) if stage.delta is not None else ratio
    return -torch.min(bounded * inputs.advantages, ratio.clamp(*clip_range(stage)) * inputs.advantages)


def capped(ratio: Float[Tensor, "N _"], inputs: LossInputs, stage: StageConfig) -> Float[Tensor, "N _"]:
    """CISPO's term: the ratio, cut off above, is a constant weight of a REINFORCE term."""
    # A token beyond the cap keeps its gradient, where PPO's min would drop it: rare tokens that start a new line of thought are
    # the ones that PPO clips first (arXiv:2506.13585, 3.1).
    return -ratio.clamp(max=stage.epsilon_high).detach() * inputs.advantages * inputs.logps


def gated(ratio: Float[Tensor, "N _"], inputs: LossInputs, stage: StageConfig) -> Float[Tensor, "N _"]:
    """SAPO's term: a smooth gate instead of a clip."""
    # Its slope at ratio 1 is 1 (hence 4 / tau), and it decays to 0 on both sides. tau is larger for negative advantages, whose
    # gradient raises all the other tokens of the vocabulary and is the less stable one.
    tau = torch.where(inputs.advantages > 0, stage.sapo_temperature_pos, stage.sapo_temperature_neg)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * inputs.advantages


def clip_range(stage: StageConfig) -> tuple[float, float]:
    """Ratios between which PPO's term has a gradient on both sides."""
    return 1 - stage.epsilon, 1 + (stage.epsilon_high or stage.epsilon)


def importance_ratio(inputs: LossInputs, *, level: str) -> Float[Tensor, "N _"]:
    """pi / pi_old per token [N, T], or per sequence [N, 1]."""
    log_ratio = (inputs.logps - inputs.old_logps) * inputs.mask  # [N, T]
    if level == "token":
        return log_ratio.exp()
    # GSPO (arXiv:2507.18071 eq. 7): the geometric mean over the tokens. Without the division by the length the ratio of a long
    # completion would leave any clip range after the smallest step.
    lengths = inputs.mask.sum(-1, keepdim=True).clamp(min=1)  # [N, 1]; 1 for a completion that is masked entirely
    return (log_ratio.sum(-1, keepdim=True) / lengths).exp()


def sampling_correction(
    old_logps: Float[Tensor, "N T"], sampler_logps: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], stage: StageConfig
) -> Float[Tensor, "N _"] | None:
    """pi_old / pi_sampler per token [N, T] or per sequence [N, 1], truncated or masked; None: no correction.

    The importance weight of a sampler with other kernels or another precision (fengyao.notion.site/off-policy-rl), with TRL's
    four modes. The geometric mean is verl's third level: it compares completions of all lengths by one bound.
    """
    # auto: nobody has said that there are servers (StageSpec.with_correction).
    if stage.importance_sampling_correction in ("none", "auto"):
        return None
    level, _, kind = stage.importance_sampling_correction.partition("_")
    difference = (old_logps - sampler_logps).detach() * mask
    if level != "token":
        # The probability of a sequence is a product, so its ratio sums all tokens; GSPO divides by the length, as done below.
        difference = difference.sum(-1, keepdim=True)
    if level == "geometric":
        difference = difference / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = difference.exp()
    low = stage.importance_sampling_clip_min if stage.importance_sampling_clip_min is not None else 0.0
    high = stage.importance_sampling_clip_max if stage.importance_sampling_clip_max is not None else math.inf
    if kind == "truncate":
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def off_policy_mask(
    logps: Float[Tensor, "N T"],
    sampler_logps: Float[Tensor, "N T"],
    advantages: Float[Tensor, "N _"],
    mask: Bool[Tensor, "N T"],
    stage: StageConfig,
) -> Bool[Tensor, "N _"] | None:
    """True where the policy term counts; None: everywhere (DeepSeek-V3.2, arXiv:2512.02556 eq. 9)."""
    if stage.off_policy_mask_threshold is None:
        return None
    # A bad completion that the policy would hardly say any more teaches it nothing, and its unbounded gradient does harm. The
    # mean of log pi_sampler - log pi over its tokens estimates how far the policy has moved away.
    fallen = ((sampler_logps - logps.detach()) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)  # [N, 1]
    return (advantages >= 0) | (fallen <= stage.off_policy_mask_threshold)


def entropy_threshold(entropies: Float[Tensor, " M"], stage: StageConfig) -> Float[Tensor, ""]:
    """The entropy (nats) that the share `top_entropy_quantile` of an update's M tokens reaches."""
    # torch.quantile refuses more than 2^24 values, fewer than a large update has tokens; a sort does not.
    ordered = entropies.float().sort().values
    position = (1 - stage.top_entropy_quantile) * (len(ordered) - 1)
    low = int(position)
    # Between two values, as torch.quantile and TRL interpolate.
    return torch.lerp(ordered[low], ordered[min(low + 1, len(ordered) - 1)], position - low)


def k3(log_ratio: Float[Tensor, "*B"]) -> Float[Tensor, "*B"]:
    """exp(x) - x - 1 for x = log(ref / policy): an unbiased estimate of KL(policy || ref) that is never negative.

    joschu.net/blog/kl-approx.html. The plain estimate -x is unbiased too, but often negative; exp(x) - 1 has the mean 0 under
    the policy and cancels most of that noise.
    """
    return log_ratio.exp() - log_ratio - 1


def token_weights(
    mask: Bool[Tensor, "N T"], stage: StageConfig, *, max_completion_length: int, microbatch_size: int
) -> Float[Tensor, "N T"]:
    """Weight of each token in the loss, by the average of `loss_type`; `mask` is that of the complete update."""
    return LOSSES[stage.loss_type].weights(mask, max_completion_length, microbatch_size)


def mean_weights(mask: Bool[Tensor, "N T"], *_: int) -> Float[Tensor, "N T"]:
    """1 / sum_i |o_i|: a mean over all tokens of the update (DAPO, arXiv:2503.14476, 3.3)."""
    return mask.float() / mask.sum().clamp(min=1)


def completion_weights(mask: Bool[Tensor, "N T"], *_: int) -> Float[Tensor, "N T"]:
    """1 / (N |o_i|): a mean over completions of the mean over their tokens (arXiv:2402.03300 eq. 3)."""
    # Each token of a long completion counts less: a long wrong answer is punished less per token than a short one.
    # clamp: a completion that is masked entirely has no tokens, and 0 / 0 would be NaN.
    return mask.float() / mask.float().sum(-1, keepdim=True).clamp(min=1.0) / mask.shape[0]


def microbatch_weights(mask: Bool[Tensor, "N T"], _: int, microbatch_size: int) -> Float[Tensor, "N T"]:
    """1 / (M sum of |o_i| in the microbatch): a mean over M microbatches of the mean over their tokens."""
    # The last microbatch may be smaller; it counts as much as the others, as in gradient accumulation of means.
    microbatches = mask.float().split(microbatch_size)
    return torch.cat([each / each.sum().clamp(min=1.0) for each in microbatches]) / len(microbatches)


def constant_weights(mask: Bool[Tensor, "N T"], max_completion_length: int, _: int) -> Float[Tensor, "N T"]:
    """1 / (N max_completion_length): no length in it, so no bias towards short right and long wrong answers (2503.20783, 3.2)."""
    return mask.float() / (mask.shape[0] * max_completion_length)


@dataclass(frozen=True, slots=True)
class Loss:
    """One `loss_type`: the term of a token, the ratios outside which it counts as clipped, the weights of tokens."""

    term: Callable[[Float[Tensor, "N _"], LossInputs, StageConfig], Float[Tensor, "N _"]]
    bounds: Callable[[StageConfig], tuple[float, float]]
    weights: Callable[[Bool[Tensor, "N T"], int, int], Float[Tensor, "N T"]]


LOSSES = {
    "grpo": Loss(clipped, clip_range, completion_weights),
    "bnpo": Loss(clipped, clip_range, microbatch_weights),
    "dr_grpo": Loss(clipped, clip_range, constant_weights),
    "dapo": Loss(clipped, clip_range, mean_weights),
    "cispo": Loss(capped, lambda stage: (-math.inf, stage.epsilon_high or math.inf), mean_weights),
    "sapo": Loss(gated, lambda _: (-math.inf, math.inf), completion_weights),
}
"""A new loss is a row here and its name in the config: nothing else names one."""

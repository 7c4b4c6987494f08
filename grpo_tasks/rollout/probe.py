"""Whether a sampler serves this policy: the log-probabilities of a few given tokens, the probe, are compared.

    shift = probe under the policy - probe under the base       the trainer has one, and so has the sampler

A sampler that ignores the policy has a shift of 0 whatever the last version was, so it is found as soon as the trainer's own
exceeds the noise: the rounding of two forward passes, measured on the base. Noise has no direction: over T tokens it moves the
slope (1 when the sampler serves the policy) by noise / (size sqrt(T)) only, so the slope sees shifts that no single token shows.
"""

import math

import torch
from jaxtyping import Float
from peft import PeftModel
from torch import Tensor

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.folded_adapter import CausalLM, causal_model
from grpo_tasks.policy.logprobs import completion_logprobs

PROBE_IDS = [3 + 7 * index % 200 for index in range(128)]
"""Arbitrary token ids that every vocabulary has. The first two are the prompt of the others."""
BASE_LIMIT = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Largest mean difference (nats per token) between the base of a sampler and the trainer's."""
LEAST_NOISE = {"float32": 1e-4, "bfloat16": 0.01, "float16": 2e-3}
"""Noise of a shift (nats, root mean square over tokens) that is assumed even where less is measured."""
CALIBRATION_SHARE = {"float32": 0.02, "bfloat16": 0.25, "float16": 0.1}
"""Share of the calibration's shift, 1 nat and more, by which a sampler's may differ beyond the noise."""
POLICY_SHARE = 0.5
"""The same for the policy's shift. A sampler that ignores the policy differs by 1."""
SIGMAS = 6.0
"""Multiple of the noise that counts as a difference: chance reaches it once in 10^9 times."""


def probe_ids(*limits: int | None) -> list[int]:
    """The probe's tokens, cut to what fits into each limit with one more token."""
    return PROBE_IDS[: max(3, min([len(PROBE_IDS), *(limit - 1 for limit in limits if limit)]))]


@torch.no_grad()
def probe_logps(model: CausalLM, ids: list[int]) -> Float[Tensor, " T"]:
    """Log-probabilities (nats) of the probe's tokens after the first two, on the CPU."""
    # Without sampling: the tokens are given, so one forward pass on each side is enough. [1, T] -> [T]
    batch = token_batch([ids[:2]], [ids[2:]], [0], device=causal_model(model).device)
    training = model.training
    model.eval()
    try:
        return completion_logprobs(model, batch, temperature=1.0, layout="plain").logps[0].float().cpu()
    finally:
        model.train(training)


def base_logps(policy: CausalLM, ids: list[int]) -> Float[Tensor, " T"]:
    """The same under the policy without its adapter; without an adapter the base is what the policy is now."""
    if not isinstance(policy, PeftModel):
        return probe_logps(policy, ids)
    with policy.disable_adapter():
        return probe_logps(policy, ids)


def noise_of(found: Float[Tensor, " T"], wanted: Float[Tensor, " T"], dtype: str) -> float:
    """Noise (nats) of a shift, from the log-probabilities of one model on two sides: a shift is a difference of two such."""
    return max(LEAST_NOISE[dtype], math.sqrt(2.0) * _size(found - wanted))


def shift_fault(found: Float[Tensor, " T"], wanted: Float[Tensor, " T"], *, noise: float, share: float) -> str | None:
    """What is wrong with a sampler's shift (nats per token), as a clause; None: it is the trainer's, up to noise and a share."""
    size, off = _size(wanted), _size(found - wanted)
    uncertain = noise / (size * math.sqrt(len(wanted))) if size else math.inf  # standard deviation of the slope
    slope = float(found @ wanted / (wanted @ wanted)) if size else 1.0
    # A slope that chance alone can move by half says nothing.
    misses = SIGMAS * uncertain <= POLICY_SHARE and not abs(slope - 1.0) <= share + SIGMAS * uncertain
    # `not <=` also refuses a sampler that answers NaN.
    if not misses and off <= SIGMAS * noise + share * size:
        return None
    if _size(found) <= max(noise, 0.05 * size):
        return f"it shows no shift from its base, and the trainer's is {size:.3g} nats: it ignores what it loads"
    return (
        f"its shift from the base is another one: {_size(found):.3g} nats, the trainer's {size:.3g}, "
        f"and they differ by {off:.3g} (noise {noise:.2g})"
    )


def _size(values: Float[Tensor, " T"]) -> float:
    return float(values.double().pow(2).mean().sqrt())

"""Sample one token per row from logits, by inverse transform sampling.

Each completion has a random stream of its own. `torch.multinomial` draws from one stream for the whole batch, so a completion
would depend on its neighbours in the batch and on which of them have ended.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_tasks.rollout.engine import Sampling


def uniform_numbers(seeds: Sequence[int], length: int, *, device: torch.device) -> Float[Tensor, "N L"]:
    """`length` uniform numbers in [0, 1) for each seed, float64, the same on every device.

    Philox is a counter-based generator (Salmon et al. 2011, doi:10.1145/2063384.2063405): neighbouring seeds give independent
    streams.
    """
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(length) for seed in seeds]
    return torch.from_numpy(np.stack(rows)).to(device)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sampled token per row, with its log-probability (nats) under two distributions."""

    tokens: Int[Tensor, " N"]
    logps: Float[Tensor, " N"]
    """Under the distribution the token was drawn from."""
    policy_logps: Float[Tensor, " N"]
    """Under the model's distribution at the sampling temperature, before truncation and penalty: what the trainer computes."""


def sample_tokens(
    logits: Float[Tensor, "N V"],
    uniform: Float[Tensor, " N"],
    sampling: Sampling,
    seen: Bool[Tensor, "N V"] | None = None,
) -> Drawn:
    """Sample a token per row.

    The order is that of transformers: repetition_penalty, temperature, top_k, top_p, min_p. vLLM applies min_p before top_k and
    top_p; alone, each gives the same distribution in both.

    Args:
        logits: of the next token.
        uniform: one number in [0, 1) per row; unused at temperature 0, which takes the most likely token.
        sampling: temperature, penalty and truncation.
        seen: the tokens that each row's prompt or completion contains; for repetition_penalty.
    """
    logits = logits.float()
    # Greedy decoding draws from a point mass; reported are the log-probabilities at temperature 1, as vLLM does.
    greedy, temperature = sampling.temperature == 0.0, sampling.temperature or 1.0
    penalised = logits if seen is None else repetition_penalty(logits, seen, sampling.repetition_penalty)
    logp = torch.log_softmax(truncate(penalised / temperature, sampling), dim=-1)  # [N, V]
    tokens = penalised.argmax(-1) if greedy else _inverse_cdf(logp, uniform)
    logps = logp.gather(-1, tokens[:, None]).squeeze(-1)
    if greedy or not sampling.changes_distribution:
        # A second softmax over [N, V] would cost as much as the first.
        return Drawn(tokens, logps, logps)
    policy = torch.log_softmax(logits / temperature, dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
    return Drawn(tokens, logps, policy)


def _inverse_cdf(logp: Float[Tensor, "N V"], uniform: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    # float64: in float32 the sum over 150,000 tokens would round away the probabilities of rare ones.
    cdf = logp.exp().double().cumsum(-1)
    # The first token whose cumulative probability exceeds the number. The last entry of the CDF is not exactly 1, so the number
    # is scaled by it; otherwise a number close to 1 could fall behind the last token.
    return torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True).squeeze(-1).clamp(max=logp.shape[-1] - 1)


def repetition_penalty(logits: Float[Tensor, "N V"], seen: Bool[Tensor, "N V"], penalty: float) -> Float[Tensor, "N V"]:
    """Logits of seen tokens divided by the penalty, or multiplied where they are negative (CTRL, arXiv:1909.05858, 4.1)."""
    if penalty == 1.0:
        return logits
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def truncate(logits: Float[Tensor, "N V"], sampling: Sampling) -> Float[Tensor, "N V"]:
    """Logits with -inf for all tokens outside the `top_k` most likely, then outside the `top_p` nucleus (arXiv:1904.09751), then
    less likely than `min_p` times the most likely one (arXiv:2407.01082)."""
    if 0 < sampling.top_k < logits.shape[-1]:
        limit = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < limit, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        # Probability of all more likely tokens. A token stays while these have not reached top_p, so the most likely one always
        # stays.
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        # scatter takes the decision back from the sorted order to the order of the vocabulary.
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    if sampling.min_p > 0.0:
        # A ratio of probabilities is a difference of logits, whatever the other two have removed.
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(sampling.min_p), -torch.inf)
    return logits

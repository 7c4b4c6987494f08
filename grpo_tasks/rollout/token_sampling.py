"""Sample one token per row from logits, by inverse transform sampling.

Each completion has a random stream of its own. `torch.multinomial` draws from one stream for the whole batch, so a completion
would depend on its neighbours in the batch and on which of them have ended.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from grpo_tasks.policy.batch import moved
from grpo_tasks.rollout.engine import Sampling

BLOCK = 256
"""Tokens that are summed by one product with a triangle of ones."""


def uniform_numbers(seeds: Sequence[int], length: int, *, device: torch.device) -> Float[Tensor, "N L"]:
    """`length` uniform numbers in [0, 1) for each seed, float64, the same on every device.

    Philox is a counter-based generator (Salmon et al. 2011, doi:10.1145/2063384.2063405): neighbouring seeds give independent
    streams.
    """
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(length) for seed in seeds]
    return moved(torch.from_numpy(np.stack(rows)), device)


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
    scaled = penalised if temperature == 1.0 else penalised / temperature
    logp = torch.log_softmax(truncate(scaled, sampling), dim=-1)  # [N, V]
    tokens = penalised.argmax(-1) if greedy else _inverse_cdf(logp, uniform)
    logps = logp.gather(-1, tokens[:, None]).squeeze(-1)
    if greedy or not sampling.changes_distribution:
        # A second softmax over [N, V] would cost as much as the first.
        return Drawn(tokens, logps, logps)
    policy = torch.log_softmax(logits / temperature, dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
    return Drawn(tokens, logps, policy)


def _inverse_cdf(logp: Float[Tensor, "N V"], uniform: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    # float64: in float32 the sum over 150,000 tokens would round away the probabilities of rare ones.
    probabilities = logp.exp().double()
    if logp.device.type != "cpu":
        return inverse_cdf_in_blocks(probabilities, uniform)
    cdf = probabilities.cumsum(-1)
    # The first token whose cumulative probability exceeds the number. The last entry of the CDF is not exactly 1, so the number
    # is scaled by it; otherwise a number close to 1 could fall behind the last token.
    return torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True).squeeze(-1).clamp(max=logp.shape[-1] - 1)


def inverse_cdf_in_blocks(probabilities: Float[Tensor, "N V"], uniform: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    """The first token whose cumulative probability exceeds the number: first its block of tokens, then the token.

    On a GPU `cumsum` adds in an order that changes from run to run. Here sums and products add in a fixed one, and only one block
    per row is summed token by token.
    """
    blocks = _in_blocks(probabilities)  # [N, B, C]
    totals = blocks.sum(-1)
    ends = totals @ _triangle(totals)  # [N, B], cumulative
    goal = (uniform * ends[:, -1])[:, None]
    block = torch.searchsorted(ends, goal, right=True).clamp(max=ends.shape[1] - 1)  # [N, 1]
    chosen = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)  # [N, C]
    inner = chosen @ _triangle(chosen)
    # Rounding may put the number just outside its block; then it means the block's first or last token that has a probability.
    rest = (goal - (ends - totals).gather(1, block)).clamp(min=0.0)
    rest = torch.minimum(rest, inner[:, -1:] * (1 - 2**-50))
    token = torch.add(torch.searchsorted(inner, rest, right=True), block, alpha=BLOCK)
    return token.squeeze(-1).clamp(max=probabilities.shape[-1] - 1)


def sums_in_blocks(values: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """`values.cumsum(-1)`, added in a fixed order on every device."""
    blocks = _in_blocks(values)  # [N, B, C]
    totals = blocks.sum(-1)  # [N, B]
    before = totals @ _triangle(totals) - totals
    return (blocks @ _triangle(blocks) + before[:, :, None]).flatten(1)[:, : values.shape[-1]]


def _in_blocks(values: Float[Tensor, "N V"]) -> Float[Tensor, "N B C"]:
    return functional.pad(values, (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def _triangle(like: Float[Tensor, "*N C"]) -> Float[Tensor, "C C"]:
    """Ones on and above the diagonal: a product with it gives running sums."""
    return _ones(like.shape[-1], like.dtype, like.device)


@cache
def _ones(size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "C C"]:
    # Made once, not at every step. Outside of inference mode, so that it can be used everywhere.
    with torch.inference_mode(mode=False):
        return torch.ones(size, size, dtype=dtype, device=device).triu()


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
        likely = ordered.softmax(-1)
        before = (likely.cumsum(-1) if likely.device.type == "cpu" else sums_in_blocks(likely)) - likely
        # scatter takes the decision back from the sorted order to the order of the vocabulary.
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    if sampling.min_p > 0.0:
        # A ratio of probabilities is a difference of logits, whatever the other two have removed.
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(sampling.min_p), -torch.inf)
    return logits

"""Drawing one token per row from logits, by inverse CDF with numbers that belong to the completion, not to the batch."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_tasks.rollout.engine import Sampling


def uniform_numbers(seeds: Sequence[int], length: int, *, device: torch.device) -> Float[Tensor, "N L"]:
    """`length` uniform numbers in [0, 1) for each seed, the same on every device (Philox, counter based)."""
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(length) for seed in seeds]
    return torch.from_numpy(np.stack(rows)).to(device)


def sample_tokens(
    logits: Float[Tensor, "N V"], uniform: Float[Tensor, " N"], sampling: Sampling
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Tokens and their log-probabilities (nats) under the distribution drawn from; temperature 0 takes the likeliest."""
    if sampling.temperature == 0.0:
        tokens = logits.argmax(-1)
        return tokens, torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
    logp = torch.log_softmax(top_k_top_p(logits.float() / sampling.temperature, sampling), dim=-1)
    cdf = logp.exp().double().cumsum(-1)
    # Scaling by the last entry keeps the draw inside the vocabulary whatever the rounding of the sum.
    tokens = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1)


def top_k_top_p(logits: Float[Tensor, "N V"], sampling: Sampling) -> Float[Tensor, "N V"]:
    """Logits with all but the top_k likeliest, then all but the top_p nucleus, set to -inf."""
    if 0 < sampling.top_k < logits.shape[-1]:
        limit = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < limit, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return logits

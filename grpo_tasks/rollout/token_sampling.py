"""Sample one token per row from logits, by inverse transform sampling.

Each completion has a random stream of its own. `torch.multinomial` draws from one stream for the whole batch, so a completion
would depend on its neighbours in the batch and on which of them have ended.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_tasks.rollout.engine import Sampling


def uniform_numbers(seeds: Sequence[int], length: int, *, device: torch.device) -> Float[Tensor, "N L"]:
    """`length` uniform numbers in [0, 1) for each seed, float64, the same on every device.

    Philox is a counter-based generator (Salmon et al. 2011, doi:10.1145/2063384.2063405): neighbouring seeds give independent
    streams.
    """
    rows = [np.random.Generator(np.random.Philox(key=seed)).random(length) for seed in seeds]
    return torch.from_numpy(np.stack(rows)).to(device)


def sample_tokens(
    logits: Float[Tensor, "N V"], uniform: Float[Tensor, " N"], sampling: Sampling
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Tokens and their log-probabilities (nats) under the distribution they are drawn from.

    Args:
        logits: of the next token.
        uniform: one number in [0, 1) per row; unused at temperature 0, which takes the most likely token.
        sampling: temperature, top_k and top_p.
    """
    if sampling.temperature == 0.0:
        tokens = logits.argmax(-1)
        # Greedy decoding draws from a point mass; reported is the log-probability at temperature 1, as vLLM does.
        return tokens, torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
    logp = torch.log_softmax(top_k_top_p(logits.float() / sampling.temperature, sampling), dim=-1)  # [N, V]
    # float64: in float32 the sum over 150,000 tokens would round away the probabilities of rare ones.
    cdf = logp.exp().double().cumsum(-1)
    # The first token whose cumulative probability exceeds the number. The last entry of the CDF is not exactly 1, so the number
    # is scaled by it; otherwise a number close to 1 could fall behind the last token.
    tokens = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1)


def top_k_top_p(logits: Float[Tensor, "N V"], sampling: Sampling) -> Float[Tensor, "N V"]:
    """Logits with -inf for all tokens outside the `top_k` most likely, then outside the `top_p` nucleus (arXiv:1904.09751)."""
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
    return logits

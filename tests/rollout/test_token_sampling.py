import numpy as np
import pytest
import torch
from scipy import stats

from grpo_tasks.rollout.engine import Sampling
from grpo_tasks.rollout.token_sampling import sample_tokens, top_k_top_p, uniform_numbers
from schemas.config.rollout import RolloutConfig

CPU = torch.device("cpu")


def sampling(**settings):
    return Sampling.of(RolloutConfig(**settings))


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    uniform = uniform_numbers(range(20_000), 1, device=CPU)[:, 0]
    tokens, logps = sample_tokens(logits.expand(20_000, 5), uniform, sampling(temperature=0.8))
    wanted = (logits / 0.8).softmax(-1).numpy().astype(np.float64)
    counts = np.bincount(tokens.numpy(), minlength=5)
    assert counts[4] == 0
    assert stats.chisquare(counts[:4], wanted[:4] / wanted[:4].sum() * 20_000).pvalue > 1e-3
    torch.testing.assert_close(logps, (logits / 0.8).log_softmax(-1)[tokens])


def test_the_same_seed_draws_the_same_numbers_in_any_batch():
    alone = uniform_numbers([7], 5, device=CPU)
    assert torch.equal(uniform_numbers([1, 7, 9], 5, device=CPU)[1:2], alone)
    assert ((alone >= 0) & (alone < 1)).all()


def test_top_k_and_top_p_keep_the_likeliest_and_renormalise():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert torch.isfinite(top_k_top_p(logits, sampling(top_k=2)))[0].tolist() == [True, True, False, False]
    assert torch.isfinite(top_k_top_p(logits, sampling(top_p=0.7)))[0].tolist() == [True, True, False, False]
    assert torch.isfinite(top_k_top_p(logits, sampling(top_p=0.01)))[0].tolist() == [True, False, False, False]
    _, logp = sample_tokens(logits, torch.tensor([0.0]), sampling(top_k=2))
    assert logp.exp().item() == pytest.approx(0.5 / 0.8)


def test_temperature_zero_takes_the_likeliest():
    logits = torch.tensor([[0.1, 3.0, 0.2]])
    tokens, _ = sample_tokens(logits, torch.tensor([0.999]), Sampling.of(RolloutConfig(top_k=5), temperature=0.0))
    assert tokens.tolist() == [1]

"""Tokens are drawn with the probabilities of transformers' processors, on every device alike."""

import numpy as np
import pytest
import torch
import transformers
from scipy import stats

from grpo_tasks.rollout import decoding_loop
from grpo_tasks.rollout.decoding_loop import draw_in_blocks, inverse_cdf_in_blocks, sample_tokens, truncate, uniform_numbers
from grpo_tasks.rollout.engine import Sampling
from schemas.config.rollout import RolloutConfig
from tests.benchmarks.count_decode import passes_per_token

CPU = torch.device("cpu")


def sampling(**settings):
    return Sampling.of(RolloutConfig(**settings))


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    uniform = uniform_numbers(range(20_000), 1, device=CPU)[:, 0]
    drawn = sample_tokens(logits.expand(20_000, 5), uniform, sampling(temperature=0.8))
    tokens, logps = drawn.tokens, drawn.logps
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
    assert torch.isfinite(truncate(logits, sampling(top_k=2)))[0].tolist() == [True, True, False, False]
    assert torch.isfinite(truncate(logits, sampling(top_p=0.7)))[0].tolist() == [True, True, False, False]
    assert torch.isfinite(truncate(logits, sampling(top_p=0.01)))[0].tolist() == [True, False, False, False]
    drawn = sample_tokens(logits, torch.tensor([0.0]), sampling(top_k=2))
    assert drawn.logps.exp().item() == pytest.approx(0.5 / 0.8)
    assert drawn.policy_logps.exp().item() == pytest.approx(0.5)


@pytest.mark.parametrize("size", [5, 256, 1_000, 151_936])
def test_a_gpu_draws_the_tokens_that_a_cpu_draws(size):
    logits = torch.randn(64, size, generator=torch.Generator().manual_seed(3)) * 4
    uniform = uniform_numbers(range(64), 1, device=CPU)[:, 0]
    found, wanted = draw_in_blocks(logits, uniform), decoding_loop._draw(logits, uniform)
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5)
    probabilities = logits.softmax(-1)
    torch.testing.assert_close(decoding_loop.sums_in_blocks(probabilities), probabilities.cumsum(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.ci
def test_a_million_tokens_drawn_in_blocks_are_those_of_float64():
    generator, different = torch.Generator().manual_seed(7), 0
    for _ in range(50):
        logits = torch.randn(20_000, 320, generator=generator) * 3  # a block of 256, and a shorter one
        uniform = torch.rand(20_000, dtype=torch.float64, generator=generator)
        cdf = logits.double().softmax(-1).cumsum(-1)
        wanted = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).squeeze(-1)
        different += int((draw_in_blocks(logits, uniform)[0] != wanted).sum())
    # On a CPU, where each token's probability is that of its log-probability in float32, 3 differ.
    assert different <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9}], ids=str)
def test_a_token_is_drawn_in_three_passes_over_the_logits(dtype, settings):
    assert passes_per_token(dtype, sampling(**settings)) <= 3
    greedy = Sampling.of(RolloutConfig(), temperature=0.0)
    assert passes_per_token(dtype, greedy) <= 3


@pytest.mark.parametrize("temperature", [0.3, 0.7, 0.9, 1.7])
def test_16_bit_logits_are_divided_in_float32(temperature):
    logits = torch.randn(64, 320, generator=torch.Generator().manual_seed(4)).bfloat16() * 5
    uniform = uniform_numbers(range(64), 1, device=CPU)[:, 0]
    found = sample_tokens(logits, uniform, sampling(temperature=temperature))
    wanted = sample_tokens(logits.float() / temperature, uniform, sampling())
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.logps, wanted.logps)


@pytest.mark.parametrize("number", [0.0, 2**-53, 0.5, 1 - 2**-53])
def test_no_number_draws_a_token_without_probability(number):
    probabilities = torch.zeros(200, 1_500, dtype=torch.float64)
    alive = torch.randint(1_500, (200, 3), generator=torch.Generator().manual_seed(1))
    probabilities.scatter_(1, alive, torch.rand(200, 3, dtype=torch.float64) + 0.1)
    drawn = inverse_cdf_in_blocks(probabilities, torch.full((200,), number, dtype=torch.float64))
    assert (probabilities.gather(1, drawn[:, None]) > 0).all()


def theirs(settings):
    """The same settings as transformers' own processors, in the order in which `generate` applies them."""
    kinds = {
        "repetition_penalty": transformers.RepetitionPenaltyLogitsProcessor,
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    return transformers.LogitsProcessorList([kind(settings[name]) for name, kind in kinds.items() if name in settings])


@pytest.mark.parametrize(
    "settings",
    [
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"min_p": 0.05, "temperature": 1.7, "repetition_penalty": 1.2},
        {"min_p": 0.2, "top_k": 6, "top_p": 0.8, "temperature": 0.6, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_penalty_and_truncation_are_those_of_transformers(settings):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 40, generator=generator)
    contexts = torch.randint(0, 40, (64, 12), generator=generator)
    seen = torch.zeros(64, 40, dtype=torch.bool).scatter(1, contexts, value=True)
    wanted = theirs(settings)(contexts, logits.clone()).log_softmax(-1)
    uniform = uniform_numbers(range(64), 1, device=CPU)[:, 0]
    drawn = sample_tokens(logits, uniform, sampling(**settings), seen)
    torch.testing.assert_close(drawn.logps, wanted.gather(-1, drawn.tokens[:, None]).squeeze(-1))
    ours = decoding_loop.repetition_penalty(logits, seen, settings.get("repetition_penalty", 1.0))
    torch.testing.assert_close(truncate(ours / settings.get("temperature", 1.0), sampling(**settings)).log_softmax(-1), wanted)
    assert not torch.equal(wanted.isfinite().sum(-1), torch.full((64,), 40)) or "min_p" not in settings


def test_the_probability_that_the_trainer_is_compared_with_knows_temperature_only():
    logits = 2 * torch.randn(16, 30, generator=torch.Generator().manual_seed(1))
    uniform = uniform_numbers(range(16), 1, device=CPU)[:, 0]
    seen = torch.ones(16, 30, dtype=torch.bool)
    drawn = sample_tokens(logits, uniform, sampling(min_p=0.1, repetition_penalty=1.4, temperature=0.7), seen)
    wanted = (logits / 0.7).log_softmax(-1).gather(-1, drawn.tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(drawn.policy_logps, wanted)
    assert (drawn.logps - drawn.policy_logps).abs().mean() > 0.05


def test_greedy_decoding_takes_the_likeliest_and_heeds_the_penalty():
    logits, seen = torch.tensor([[2.0, 1.9, 0.0]]), torch.tensor([[True, False, False]])
    for penalty, token in ((1.0, 0), (1.2, 1)):
        settings = Sampling.of(RolloutConfig(top_k=5, repetition_penalty=penalty), temperature=0.0)
        assert sample_tokens(logits, torch.tensor([0.999]), settings, seen).tokens.tolist() == [token]

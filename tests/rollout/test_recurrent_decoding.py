"""Decoding of models that mix layers with a state of their own and attention, against transformers' `generate`."""

import warnings
from dataclasses import replace

import pytest
import torch

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.recurrent_layers import state_bytes
from grpo_tasks.rollout.decoding_cache import StepStates
from grpo_tasks.rollout.decoding_loop import Buckets
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.graphs import Graphs
from grpo_tasks.rollout.local import LocalEngine, RepeatedPromptState, SharedPromptState
from schemas.config.rollout import RolloutConfig
from schemas.errors import Notice
from tests.benchmarks.count_decode import GPU
from tests.benchmarks.tapes import Tapes
from tests.policy.test_recurrent_layers import HYBRIDS, KINDS, hybrid

PROMPTS = [[5, 40, 7, 9], [70, 12, 200, 41, 33, 8, 90, 17, 66, 3, 120], [11, 95, 260]]
ENDS = frozenset(range(0, 320, 9))
FINE = replace(GPU, fewest_rows=1, first_columns=16)
"""Many changes of shape."""


def engine_of(name, tokenizer, buckets, ends=ENDS, **options):
    engine = LocalEngine(hybrid(name).requires_grad_(False), tokenizer, **options)
    engine._end_ids, engine._buckets = ends, buckets
    return engine


def sampling(temperature=1.0, length=10):
    return Sampling.of(RolloutConfig(max_completion_length=length), temperature=temperature)


@pytest.mark.parametrize("prompts", [PROMPTS, [[5], [40]]], ids=["prompts", "single tokens"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_greedy_completions_equal_those_of_generate(name, prompts, tokenizer):
    model = hybrid(name)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]
    engine = engine_of(name, tokenizer, Buckets(1, 0, 0, 16), frozenset())
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)  # of a slow way
        found = engine.generate([Request(prompt, seed) for prompt in prompts for seed in (0, 1)], sampling(0.0))
    assert [list(one.token_ids) for one in found] == [tokens for tokens in wanted for _ in (0, 1)]


class Single(Graphs):
    """Steps at the same places, and none of them replayed."""

    def run(self, step):
        step()


@pytest.mark.parametrize("name", KINDS)
def test_replayed_steps_and_dropped_rows_draw_what_single_steps_draw(name, tokenizer):
    requests = [Request(PROMPTS[index // 4], seed=index) for index in range(12)]
    tapes = Tapes()
    replayed, single = (engine_of(name, tokenizer, FINE, capture=tapes) for _ in range(2))
    single._graphs = Single(tapes)
    slow = engine_of(name, tokenizer, FINE, share_prompts=False)
    drawn = [engine.generate(requests, sampling(length=24)) for engine in (replayed, single, slow)]
    assert tapes.count > 0
    assert drawn[0] == drawn[1]
    assert [one.token_ids for one in drawn[0]] == [one.token_ids for one in drawn[2]]
    assert len({len(one.token_ids) for one in drawn[0]}) > 3


def test_a_prompts_state_is_computed_once_for_its_group(tokenizer, monkeypatch):
    engine = engine_of("bamba", tokenizer, Buckets(1, 0, 0, 16))
    engine.generate([Request(PROMPTS[0], 0)], sampling())
    shapes = []

    def recording(self, prompts, rows):
        shapes.append((len(prompts.recurrent_states[0]), len(rows)))
        begin(self, prompts, rows)

    begin = StepStates.__init__
    monkeypatch.setattr(StepStates, "__init__", recording)
    engine.generate([Request(prompt, seed) for prompt in PROMPTS for seed in range(4)], sampling())
    # Three prompts, twelve completions, two layers with a state.
    assert shapes == [(3, 12)] * 2


@pytest.mark.parametrize("name", KINDS)
def test_the_plan_knows_the_size_of_the_states(name):
    model = hybrid(name)
    batch = token_batch(PROMPTS, [[0]] * 6, [0, 0, 1, 1, 2, 2], device=torch.device("cpu"))
    with torch.no_grad():
        cache = SharedPromptState(model, batch).cache
    held = sum(state.nbytes for states in cache._states.values() for state in states.tensors())
    assert held == 6 * state_bytes(hybrid(name).to("meta")) > 0


def test_a_state_that_stands_still_is_refused_for_the_slow_way(tokenizer, monkeypatch):
    monkeypatch.setattr(StepStates, "update_recurrent_state", lambda *_, **__: None)
    engine = engine_of("qwen3_next", tokenizer, Buckets(1, 0, 0, 16))
    with pytest.warns(Notice, match="one copy for all: off by"):
        engine.generate([Request(PROMPTS[0], 0)], sampling())
    assert engine._make_state is RepeatedPromptState

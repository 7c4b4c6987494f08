"""The rollout contract, shown on the local engine with the embedded model."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.load import load_base, load_tokenizer
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rollout.engine import Completion, Request, Sampling, completion_seed
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.stop import StopRule
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ConfigError
from tests.rollout.stops import ORDINARY, SPECIAL, assert_stops, reference, stop_requests, stop_settings


@pytest.fixture
def engine(policy, tokenizer):
    return LocalEngine(policy, tokenizer)


@pytest.fixture
def requests(prompts):
    return [Request(prompt, completion_seed(1, index, k)) for index, prompt in enumerate(prompts) for k in range(6)]


def sampling(temperature=None, **settings):
    return Sampling.of(RolloutConfig(**{"max_completion_length": 48, **settings}), temperature=temperature)


def test_sampled_logprobs_are_the_trainers(engine, policy, prompts, requests):
    drawn = engine.generate(requests, sampling(temperature=0.9))
    batch = token_batch(prompts, [c.token_ids for c in drawn], [i // 6 for i in range(24)], device=torch.device("cpu"))
    scores = completion_logprobs(policy.eval(), batch, temperature=0.9)
    sampled = torch.tensor([logp for completion in drawn for logp in completion.logprobs])
    torch.testing.assert_close(scores.logps[batch.completion_mask].detach(), sampled, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_in_float32_a_completion_comes_out_the_same_whatever_the_batch(engine, requests):
    together = engine.generate(requests, sampling())
    assert engine.generate(requests[9:10], sampling())[0].token_ids == together[9].token_ids
    small = engine.generate(requests, sampling(max_batch_size=5))
    assert [c.token_ids for c in small] == [c.token_ids for c in together]
    backwards = engine.generate(requests[::-1], sampling())
    assert [c.token_ids for c in backwards[::-1]] == [c.token_ids for c in together]


def test_an_ended_turn_is_a_stop_a_cut_is_length(engine, tokenizer, requests):
    for completion in engine.generate(requests, sampling(max_completion_length=12)):
        ended = completion.token_ids[-1] == tokenizer.eos_token_id
        assert (completion.finish_reason == "stop") == ended
        assert ended or len(completion.token_ids) == 12
        assert "<|im_end|>" not in completion.text
        assert len(completion.logprobs) == len(completion.token_ids)


@pytest.mark.slow
def test_new_weights_are_sampled_from_only_after_a_sync(engine, policy, requests):
    before = [c.token_ids for c in engine.generate(requests, sampling())]
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    assert [c.token_ids for c in engine.generate(requests, sampling())] == before
    engine.sync()
    assert [c.token_ids for c in engine.generate(requests, sampling())] != before


@pytest.fixture(scope="module")
def widened_engine(widened):
    base = load_base(widened, ModelConfig(), device=torch.device("cpu"))
    tokenizer = load_tokenizer(widened)
    engine, requests = LocalEngine(base, tokenizer), stop_requests(tokenizer, count=24)
    return engine, tokenizer, requests, engine.generate(requests, sampling())


@pytest.mark.slow
def test_stop_strings_with_added_tokens_mean_what_the_reference_says(widened_engine):
    engine, tokenizer, requests, free = widened_engine
    for case in stop_settings(tokenizer, free):
        assert_stops(engine, tokenizer, requests, free, sampling(**case))


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_the_text_of_any_tokens_with_any_stop_string_is_the_references(widened_engine, data):
    _, tokenizer, _, _ = widened_engine
    special, ordinary = tokenizer.convert_tokens_to_ids([SPECIAL, ORDINARY])
    letters = tokenizer("a 7é\n</b>", add_special_tokens=False)["input_ids"]
    tokens = st.sampled_from([special, ordinary, tokenizer.eos_token_id, *letters])
    ids = data.draw(st.lists(tokens, min_size=1, max_size=12))
    stops = data.draw(st.lists(st.sampled_from(["a", " 7", SPECIAL, f"a{SPECIAL}", f"{SPECIAL}{ORDINARY}", "é"]), max_size=3))
    wanted = sampling(stop=stops, include_stop_str_in_output=data.draw(st.booleans()))
    assume(not (any(SPECIAL in stop for stop in stops) and "a" in stops))  # part of the special token: refused
    rule = StopRule(tokenizer, frozenset(), wanted)
    free = Completion(ids, [0.0] * len(ids), "", "length")
    cut, text, reason = reference(tokenizer, free, wanted)
    ended = next((count for count in range(1, len(ids) + 1) if rule.ended(ids[:count])), None)
    assert (ended is None) == (reason == "length")
    assert (ended or len(ids), rule.text(cut)) == (len(cut), text)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"min_p": 0.1}, {"min_p": 0.05, "repetition_penalty": 1.2}], ids=str)
def test_a_truncated_completion_is_compared_by_the_policys_own_probabilities(engine, policy, prompts, requests, settings):
    drawn = engine.generate(requests, sampling(temperature=0.9, **settings))
    batch = token_batch(prompts, [c.token_ids for c in drawn], [i // 6 for i in range(24)], device=torch.device("cpu"))
    scores = completion_logprobs(policy.eval(), batch, temperature=0.9).logps[batch.completion_mask].detach()
    compared = torch.tensor([logp for completion in drawn for logp in completion.policy_logprobs])
    torch.testing.assert_close(scores, compared, rtol=1e-4, atol=1e-4)
    given = torch.tensor([logp for completion in drawn for logp in completion.logprobs])
    assert (given - compared).abs().mean() > 1e-3
    # The same whatever the batch: the tokens that a row has seen stay with it when others end.
    small = engine.generate(requests, sampling(temperature=0.9, max_batch_size=5, **settings))
    assert [c.token_ids for c in small] == [c.token_ids for c in drawn]


def test_any_number_of_special_tokens_may_stand_within_a_stop_string(tokenizer):
    ids = [
        one for text in ("5", *[str(tokenizer.eos_token)] * 20, "+") for one in tokenizer.encode(text, add_special_tokens=False)
    ]
    rule = StopRule(tokenizer, frozenset(), sampling(stop=["5+"]))
    assert [rule.ended(ids[:-1]), rule.ended(ids), rule.text(ids)] == [False, True, "5+"]


def test_a_stop_token_ends_a_completion_by_its_id_or_its_text(engine, tokenizer, requests):
    [comma] = tokenizer(",", add_special_tokens=False)["input_ids"]
    by_text, by_id = (engine.generate(requests, sampling(stop_token_ids=[stop])) for stop in (",", comma))
    assert [c.token_ids for c in by_text] == [c.token_ids for c in by_id]
    ended = [completion for completion in by_id if comma in completion.token_ids]
    assert ended
    for completion in ended:
        assert completion.token_ids.index(comma) == len(completion.token_ids) - 1
        assert completion.finish_reason == "stop"
    with pytest.raises(ConfigError, match="no token '<nowhere>'"):
        engine.generate(requests, sampling(stop_token_ids=["<nowhere>"]))


@pytest.mark.parametrize("penalty", [1.0, pytest.param(1.25, marks=pytest.mark.slow)])
def test_greedy_equals_generate_of_transformers(engine, policy, tokenizer, prompts, penalty):
    settings = sampling(temperature=0.0, repetition_penalty=penalty)
    ours = engine.generate([Request(prompt, 0) for prompt in prompts], settings)
    for completion, prompt in zip(ours, prompts, strict=True):
        [row] = policy.eval().generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=48, do_sample=False, repetition_penalty=penalty,
            pad_token_id=tokenizer.pad_token_id,
        )[:, len(prompt) :].tolist()  # fmt: skip
        assert row[: len(completion.token_ids)] == completion.token_ids
        assert completion.finish_reason == "stop" or len(completion.token_ids) == len(row) == 48
    # The penalty matters here.
    plain = engine.generate([Request(prompt, 0) for prompt in prompts], sampling(temperature=0.0))
    assert ([c.token_ids for c in ours] == [c.token_ids for c in plain]) == (penalty == 1.0)


@pytest.mark.parametrize("others", [[], [[5, 6, 7]]], ids=["alone", "beside longer ones"])
def test_prompts_of_a_single_token_have_no_context(engine, policy, tokenizer, others):
    prompts = [[5], [6], *others]
    for completion, prompt in zip(
        engine.generate([Request(prompt, 0) for prompt in prompts], sampling(0.0)), prompts, strict=True
    ):
        options = {"max_new_tokens": 48, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
        [row] = policy.eval().generate(input_ids=torch.tensor([prompt]), **options)[:, len(prompt) :].tolist()
        assert row[: len(completion.token_ids)] == completion.token_ids

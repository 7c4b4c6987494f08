"""A judge behind a real vLLM server: it keeps to the schema of a verdict, whatever the model would say.

The model has random weights, so no verdict can come from anything but structured output.
"""

import json
import sqlite3

import httpx
import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from grpo_tasks.judging.frame import MalformedError, ask, parse
from grpo_tasks.judging.judge import Case, Judge
from grpo_tasks.rollout.vllm_server import BASE, ServerModel, authorization, serving
from schemas.config.rewards import JudgeConfig
from schemas.paths import resolve
from tests.judging.endpoint import Endpoint
from tests.judging.endpoint import serving as stub
from tests.rollout.conftest import key  # noqa: F401 - a fixture
from tests.rollout.servers import CONFIG, MARKS

pytestmark = MARKS
CONTEXT = 4096
"""Tokens of a prompt and its verdict: as many as the CPU server takes without chunked prefill."""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of a vLLM server with a tiny random model, up to and including /v1."""
    folder = tmp_path_factory.mktemp("random-judge")
    AutoTokenizer.from_pretrained(resolve("embedded:base")).save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    limits = {"num_key_value_heads": 1, "vocab_size": 320, "max_position_embeddings": CONTEXT, "eos_token_id": 318}
    Qwen2ForCausalLM(Qwen2Config(**shape, **limits)).save_pretrained(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "planted-key-of-the-tests")
        with serving(CONFIG, ServerModel(folder / "model", "float32", None, cuda=False), folder) as [server]:
            yield f"{server.address}/v1"


@pytest.fixture
def settings(address, tmp_path):
    def make(**changes):
        given = {
            "base_urls": [address],
            "model": BASE,
            "api_key_variable": "VLLM_API_KEY",
            "rubric": [{"name": "clear", "description": "Clear?"}],
            "max_tokens": 2_500,
            # A random model may not close its string within max_tokens.
            "max_malformed": 5,
            "temperature": 1.0,
            "cache": tmp_path / "cache",
        }
        return JudgeConfig(**given | changes)

    return make


@pytest.mark.parametrize("mode", ["absolute", "pairwise"])
def test_a_vllm_server_keeps_to_the_schema_of_a_verdict(settings, mode):
    given = settings(mode=mode)
    judge = Judge(given)
    cases = [Case("2 + 2?", "4"), Case("2 + 2?", "It is [5] <|im_end|>.")]
    found = judge.score(cases)
    judge.close()
    assert found.tally.unjudged == 0
    assert all(score is not None and 0.0 <= score <= 1.0 for score in found.scores)
    base = sqlite3.connect(given.cache / "verdicts.sqlite")
    rows = base.execute("SELECT messages, reply, problem, prompt_tokens, completion_tokens FROM verdicts").fetchall()
    base.close()
    assert sum(problem == "" for _, _, problem, _, _ in rows) == 2
    for messages, reply, problem, prompt_tokens, completion_tokens in rows:
        user = json.loads(messages)[1]["content"]
        marker = user[1:17]
        # Of a verdict that max_tokens has cut the beginning keeps to the schema too.
        start = f'{{"marker":"{marker}","criteria":{{"clear":{{"reason":"'
        assert "".join(reply.split()).startswith(start), problem
        assert 0 < completion_tokens <= given.max_tokens
        assert prompt_tokens + completion_tokens <= CONTEXT


def test_the_same_model_gives_no_verdict_without_the_schema(settings, address):
    given = settings()
    question = ask(given, {"question": "2 + 2?"}, ["4"])
    body = {"model": BASE, "messages": question.messages, "temperature": 1.0, "max_tokens": 200, "seed": 0}
    answer = httpx.post(f"{address}/chat/completions", json=body, headers=authorization(), timeout=120.0).raise_for_status()
    with pytest.raises(MalformedError):
        parse(answer.json()["choices"][0]["message"]["content"] or "", question, given)


def test_a_pool_answers_while_one_of_its_servers_is_away(settings, address):
    with stub(Endpoint(None)) as gone:
        pass
    judge = Judge(settings(base_urls=[gone, address], max_outage_s=0.0))
    found = judge.score([Case("2 + 2?", "4"), Case("2 + 3?", "5")])
    judge.close()
    assert found.tally.unjudged == 0

"""The code in a published artifact: it answers as the engine of the training does, and in the form that OpenAI clients read."""

import random
import shutil
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from mlflow.exceptions import MlflowException

from grpo_tasks.content.tokenizer import add_tokens, prompt_ids, set_system_prompt, set_template_defaults
from grpo_tasks.kit import cards
from grpo_tasks.kit.cards import check_cards
from grpo_tasks.policy.load import load_policy, load_tokenizer
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.rollout.stop import StopRule
from grpo_tasks.tracking.chat_model import ServedModel, _StopSearch
from schemas.config.model import AddedToken, ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ModelError
from schemas.paths import resolve
from schemas.results.model import ModelRef

CHAT = [{"role": "user", "content": "What is 15 + 27?"}]
SYSTEM = "Reply with <reasoning>...</reasoning><answer>...</answer>."


def served(folder, **settings):
    model = ServedModel()
    settings = {"max_tokens": 32, "device": "cpu", "dtype": "float32"} | settings
    model.load_context(SimpleNamespace(artifacts={"model": str(folder)}, model_config=settings))
    return model


def ask(served_model, /, **request):
    return served_model.predict(None, {"messages": CHAT} | request)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the card of this machine")
def test_a_card_that_torch_cannot_use_is_a_warning(tmp_path, monkeypatch, caplog):
    def loaded():
        caplog.clear()
        model = served(resolve("embedded:base"), device="auto", max_tokens=2)
        assert ask(model)["usage"]["completion_tokens"] == 2
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert loaded() == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 535.104.05\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    [warning] = loaded()
    monkeypatch.setattr(cards, "DRIVER", tmp_path)  # as on a machine whose driver nvidia-smi alone knows
    with pytest.raises(ModelError) as refused:
        check_cards()
    assert warning.startswith(refused.value.message)
    assert "answers on the CPU (fix: " in warning
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert loaded() == []


@pytest.fixture(scope="module")
def model():
    return served(resolve("embedded:base"), name="demo")


@pytest.mark.slow
@pytest.mark.parametrize(
    "stops",
    [
        {},
        {"stop": ["</reasoning>"]},
        {"stop": ["=1", "5+"], "include_stop_str_in_output": False},
        {"stop_token_ids": ["="]},
        {"max_completion_length": 3},
        {"stop": ["<|im_end|>"]},
    ],
)
def test_it_answers_as_the_engine_of_the_training_does(stops):
    rollout = RolloutConfig(**({"max_completion_length": 32} | stops))
    ref = ModelRef(path="embedded:base")
    tokenizer = load_tokenizer(ref)
    policy = load_policy(ref, ModelConfig(), device=torch.device("cpu"), dtype="float32")
    request = Request(prompt_ids(tokenizer, CHAT), 0)
    [expected] = LocalEngine(policy, tokenizer).generate([request], Sampling.of(rollout, temperature=0.0))
    model = served(
        resolve("embedded:base"),
        max_tokens=rollout.max_completion_length,
        stop=rollout.stop,
        include_stop=rollout.include_stop_str_in_output,
        stop_token_ids=rollout.stop_token_ids,
    )
    reply = ask(model)
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert choice["finish_reason"] == expected.finish_reason
    assert reply["usage"]["completion_tokens"] == len(expected.token_ids)


def test_the_prompt_has_one_bos_and_one_system_prompt(tmp_path):
    folder = shutil.copytree(resolve("embedded:base"), tmp_path / "model")
    tokenizer = load_tokenizer(ModelRef(path=str(folder)))
    # Llama's tokenizers add BOS to any text, and their templates write it too.
    tokenizer.chat_template = "<|endoftext|>" + tokenizer.chat_template
    set_system_prompt(tokenizer, SYSTEM)
    tokenizer.save_pretrained(folder)
    with_system = [{"role": "system", "content": SYSTEM}, *CHAT]
    expected = prompt_ids(tokenizer, with_system)
    model = served(folder)
    for chat in (CHAT, with_system):
        assert ask(model, messages=chat)["usage"]["prompt_tokens"] == len(expected)
        assert model._prompt_ids({"messages": chat}) == expected


def test_the_tools_of_a_request_replace_those_of_the_training(tmp_path):
    folder = shutil.copytree(resolve("embedded:base"), tmp_path / "model")
    tokenizer = load_tokenizer(ModelRef(path=str(folder)))
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}" + tokenizer.chat_template
    set_template_defaults(tokenizer, {"tools": [{"type": "function", "function": {"name": "multiply"}}]})
    tokenizer.save_pretrained(folder)
    model = served(folder)

    def shown(**request):
        return model._tokenizer.decode(model._prompt_ids({"messages": CHAT} | request)).partition("<|im_start|>")[0]

    assert shown() == "multiply;"
    assert shown(tools=[]) == ""
    assert shown(tools=[{"type": "function", "function": {"name": name}} for name in ("add", "look")]) == "add;look;"


def test_a_request_overrides_the_settings_of_the_training(model):
    whole = ask(model)["choices"][0]["message"]["content"]
    short = ask(model, max_tokens=4)["choices"][0]
    assert short["finish_reason"] == "length"
    assert whole.startswith(short["message"]["content"])
    assert ask(model, max_completion_tokens=4)["choices"][0]["message"] == short["message"]
    assert ask(model, stop="</reasoning>")["choices"][0]["message"]["content"] == whole.partition("</reasoning>")[0]
    assert ask(model, model="mine")["model"] == "demo"


def test_sampling_draws_several_choices_and_temperature_zero_is_greedy(model):
    torch.manual_seed(1)
    drawn = ask(model, n=4, temperature=1.5)["choices"]
    assert [choice["index"] for choice in drawn] == [0, 1, 2, 3]
    assert len({choice["message"]["content"] for choice in drawn}) > 1
    greedy = ask(model, n=2)["choices"]
    assert greedy[0]["message"] == greedy[1]["message"]


def test_a_frame_is_answered_row_by_row_without_a_template(model):
    both = model.predict(None, pd.DataFrame({"messages": [CHAT, CHAT], "max_tokens": [4, None]}))
    assert both[0]["usage"]["completion_tokens"] == 4
    assert both[1]["usage"] == ask(model)["usage"]
    plain = model.predict(None, {"prompt": "15 + 27 ="})
    assert plain["object"] == "text_completion"
    assert isinstance(plain["choices"][0]["text"], str)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"messages": []}, "`messages` is empty"),
        ({"messages": None}, "a request has `messages`"),
        ({"stream": True}, "does not stream"),
        ({"messages": [{"role": "user"}]}, "the chat template refuses the messages"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_with_the_reason(model, request_, says):
    with pytest.raises(MlflowException, match=says) as refused:
        ask(model, **request_)
    assert refused.value.get_http_status_code() == 400


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stop", [["<search>"], ["<search>", "5"], ["5<search>"], ["<ask>"], ["5+"], ["<|im_end|>"]])
def test_stop_strings_with_special_tokens_mean_what_they_mean_in_training(stop, include):
    tokenizer = load_tokenizer(ModelRef(path="embedded:base"))
    added = [AddedToken(token="<search>", special=True), AddedToken(token="<sep>", special=True), AddedToken(token="<ask>")]
    # Special, and without a role such as EOS, like most special tokens of published tokenizers.
    assert add_tokens(tokenizer, added)
    assert "<search>" not in tokenizer.all_special_tokens
    texts = ["<search>", "<sep>", "<ask>", "5", "+", "=", "<|im_end|>"]
    ids = [one for text in texts for one in tokenizer.encode(text, add_special_tokens=False)]
    rollout = RolloutConfig(stop=stop, include_stop_str_in_output=include)
    rule = StopRule(tokenizer, frozenset(), Sampling.of(rollout))
    search, draw, ended = _StopSearch(tokenizer, stop, 0), random.Random(7), 0
    for _ in range(100):
        drawn = draw.choices(ids, k=12)
        length = next((count for count in range(1, 13) if rule.ended(drawn[:count])), None)
        tokens = drawn[:length]
        assert search.cut(tokens, include=include) == (rule.text(tokens), length is not None)
        assert [bool(search(torch.tensor([tokens[:count]]), None)) for count in range(1, len(tokens))] == [False] * (
            len(tokens) - 1
        )
        ended += length is not None
    assert ended > 20

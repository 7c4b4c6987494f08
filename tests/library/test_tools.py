"""The tools of a config stand in every prompt: of the data's check, of the training, of the merged model, of questions."""

import json
from types import SimpleNamespace

import polars as pl
import pytest
from transformers import AutoTokenizer

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.data.table import read_prompts
from grpo_tasks.library import base_model, completions_of, evaluate, generate, load_data, merge
from grpo_tasks.rollout.conversations import player
from grpo_tasks.tracking.chat_model import ServedModel
from schemas.config.load import load_config
from schemas.results.model import PROOF_TOKENS
from tests.rollout.tool_model import TOOLS, write_model

QUESTIONS = ["What is 15 + 27?", "What is 20 + 2?"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The demo with a model that calls tools, and a tool in its working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tools.py").write_text(TOOLS, encoding="utf-8")
    settings = [
        f"model.path={write_model(tmp_path / 'model', weights=True)}",
        "interaction.tools=[my_tools:add]",
        "interaction.workers=1",
        "interaction.max_turns=3",
        # Within the reasoning, where this model writes its calls, none would count.
        "completion.tags.reasoning=plan",
        "rollout.max_completion_length=24",
        "model.merged_dtype=float32",
        "validation.max_prompt_length=1000",
        "data.train.0.max_rows=20",
        "data.eval.0.max_rows=6",
        "evaluation.num_samples=2",
        "resources.num_threads=1",
    ]
    return load_config("demo", settings)


@pytest.mark.long
def test_every_prompt_of_a_run_shows_the_same_tools(config):
    data = load_data(config, "work/data")
    rows = read_prompts(data.eval)
    settings = (config.interaction, base_model(config), config.model, config.rollout)
    with player(*settings, completion=config.completion) as found:
        # The trainer takes its tokenizer from here.
        trained = [prompt_ids(found.tokenizer, row.messages) for row in rows]
    assert '"name": "add"' in found.tokenizer.decode(trained[0])
    assert [row.prompt_tokens for row in rows] == [len(ids) for ids in trained]
    merged = merge(config, base_model(config), data, "work/merged")
    alone = AutoTokenizer.from_pretrained(merged.model.path)
    assert [prompt_ids(alone, row.messages) for row in rows] == trained
    # A client may offer others, or none.
    chat = [{"role": "user", "content": "Hi"}]
    assert "add" not in alone.apply_chat_template(chat, tools=[], tokenize=False)
    # What MLflow loads answers to the prompts of the proof, which had the tools.
    served = ServedModel()
    answers_as = {"device": "cpu", "dtype": "float32", "max_tokens": PROOF_TOKENS, "temperature": 0.0}
    served.load_context(SimpleNamespace(artifacts={"model": merged.model.path}, model_config=answers_as))
    for answer in merged.answers:
        reply = served.predict(None, {"messages": answer.messages})
        assert reply["choices"][0]["message"]["content"] == answer.text
        assert reply["usage"]["prompt_tokens"] == len(prompt_ids(alone, answer.messages))
    assert len(merged.answers) > 0


@pytest.mark.long
def test_questions_and_evaluations_are_played_with_the_tools(config):
    data, model = load_data(config, "work/data"), base_model(config)
    asked = [one for each in completions_of(config, model, QUESTIONS, num_samples=4, temperature=1.0) for one in each]
    assert all('"name": "add"' in AutoTokenizer.from_pretrained(model.path).decode(one.conversation.prompt_ids) for one in asked)
    said = {message["content"] for one in asked for turn in one.conversation.turns for message in turn.answers}
    assert "3" in said or "50" in said
    assert generate(config, model, QUESTIONS, num_samples=4, temperature=1.0) == [
        [one.text for one in asked[:4]],
        [one.text for one in asked[4:]],
    ]
    evaluate(config, model, data, "work/evaluation")
    played = [json.loads(text) for text in pl.read_parquet("work/evaluation/samples.parquet")["conversation"]]
    answers = [answer for one in played for turn in one["turns"] for answer in turn["answers"]]
    assert any(answer["content"] in ("3", "50") for answer in answers)


@pytest.mark.slow
def test_a_fault_of_an_environment_is_a_warning_with_its_question(config, tmp_path):
    (tmp_path / "my_broken.py").write_text(
        "class Broken:\n"
        "    def reset(self, row, seed):\n        return None\n"
        "    def step(self, completion):\n        raise KeyError('the shelf')\n"
    )
    broken = config.interaction.model_copy(update={"tools": [], "environment": "my_broken:Broken"})
    with pytest.warns(UserWarning, match=r"What is 15 \+ 27\?.*ended early.*the shelf"):
        [[text]] = generate(config.model_copy(update={"interaction": broken}), base_model(config), QUESTIONS[:1])
    assert text

"""Validation knows the tokens that a run adds, and the variables of its chat template."""

import logging

import polars as pl
import pytest

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.data.sources import load_sources
from grpo_tasks.policy.load import load_tokenizer
from grpo_tasks.running.step import Work
from grpo_tasks.steps import validate_data as module
from schemas.config.model import ModelConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.results.data import PreparedData
from schemas.results.model import ModelRef

ADDED = [{"token": "<search>", "special": True}]


@pytest.fixture
def validate(tmp_path, write, monkeypatch):
    """The accepted training rows of six questions that name the token."""
    monkeypatch.setattr(module, "run_logger", lambda: logging.getLogger("step"))
    monkeypatch.setattr(Work, "artifact", lambda *_: None)

    def step(*, model, **rollout):
        path = write(*({"question": f"Write <search> for {number} é", "answer": str(number)} for number in range(6)))
        data = {"train": [{"path": path}], "eval_fraction": 0.5}
        stages = [{"name": "s", "rewards": ["format"]}]
        config = RunConfig(data=data, model=model, rollout=rollout, stages=stages, seed=1)
        loaded = load_sources(config.data, directory=tmp_path)
        rows = PreparedData(key="k", directory=tmp_path, seconds=0.0, sources=loaded.sources, rows=6)
        report = module.validate_data.body(Work("k", tmp_path, None), config, rows)
        return pl.read_parquet(report.train)

    return step


def test_prompts_may_name_an_added_token_and_its_stop_settings_are_possible(validate):
    rows = validate(model=ModelConfig(added_tokens=ADDED), stop=["<search>"], stop_token_ids=["<search>"])
    assert len(rows) > 1


def test_an_unknown_stop_token_is_refused_before_any_row(validate):
    with pytest.raises(ConfigError, match="no token '<search>'"):
        validate(model=ModelConfig(), stop_token_ids=["<search>"])


def test_prompts_are_counted_as_they_are_rendered(validate, base_ref, tmp_path):
    tokenizer = load_tokenizer(base_ref)
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    tokenizer.save_pretrained(tmp_path / "model")
    model = ModelConfig(path=str(tmp_path / "model"), added_tokens=ADDED)
    rows = validate(model=model, chat_template_kwargs={"enable_thinking": False})
    used = load_tokenizer(ModelRef(path=model.path), model, {"enable_thinking": False})
    counted = [len(prompt_ids(used, messages)) for messages in rows["prompt"].to_list()]
    assert used.decode(prompt_ids(used, rows["prompt"].to_list()[0])).endswith("<think></think>")
    # Short prompts get an upper bound, long ones the exact count.
    assert all(bound >= count for bound, count in zip(rows["prompt_tokens"], counted, strict=True))

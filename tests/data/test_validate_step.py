"""The validation step: tokens that a run adds, variables of its chat template, answers that no completion can equal."""

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
from schemas.errors import ConfigError, DataError
from schemas.results.data import PreparedData
from schemas.results.model import ModelRef

ADDED = [{"token": "<search>", "special": True}]
CITIES = ["Paris", "Rome", "Oslo", "Bern", "Riga", "Kyiv"]
NUMBERS = [str(number) for number in range(6)]


@pytest.fixture
def validate(tmp_path, write, monkeypatch):
    """The accepted training rows with these answers; Prefect's logger and artifacts exist inside a run only."""
    monkeypatch.setattr(module, "run_logger", lambda: logging.getLogger("step"))
    monkeypatch.setattr(Work, "artifact", lambda *_: None)

    def step(answers, **sections):
        path = write(*({"question": f"Write <search> for {number} é", "answer": answer} for number, answer in enumerate(answers)))
        data = {"train": [{"path": path}], "eval_fraction": 0.5}
        config = RunConfig(data=data, stages=[{"name": "s", "rewards": ["format"]}], seed=1, **sections)
        sources = load_sources(config.data, directory=tmp_path)
        rows = PreparedData(key="k", directory=tmp_path, seconds=0.0, sources=sources, rows=len(answers))
        return pl.read_parquet(module.validate_data.body(Work("k", tmp_path, None), config, rows).train)

    return step


def test_prompts_may_name_an_added_token_and_its_stop_settings_are_possible(validate):
    stops = {"stop": ["<search>"], "stop_token_ids": ["<search>"]}
    assert len(validate(NUMBERS, model=ModelConfig(added_tokens=ADDED), rollout=stops)) > 1
    with pytest.raises(ConfigError, match="no token '<search>'"):
        validate(NUMBERS, rollout={"stop_token_ids": ["<search>"]})


def test_prompts_are_counted_as_they_are_rendered(validate, base_ref, tmp_path):
    tokenizer = load_tokenizer(base_ref)
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    tokenizer.save_pretrained(tmp_path / "model")
    model = ModelConfig(path=str(tmp_path / "model"), added_tokens=ADDED)
    rows = validate(NUMBERS, model=model, rollout={"chat_template_kwargs": {"enable_thinking": False}})
    used = load_tokenizer(ModelRef(path=model.path), model, {"enable_thinking": False})
    counted = [len(prompt_ids(used, messages)) for messages in rows["prompt"].to_list()]
    assert used.decode(prompt_ids(used, rows["prompt"].to_list()[0])).endswith("<think></think>")
    # Short prompts get an upper bound, long ones the exact count.
    assert all(bound >= count for bound, count in zip(rows["prompt_tokens"], counted, strict=True))


def test_text_among_numbers_is_warned_of_in_report_and_log(validate, tmp_path, caplog):
    validate([*["4"] * 20, "Paris"])
    for text in ((tmp_path / "report.md").read_text(), caplog.text):
        assert "1 of 21 answers are not numbers (first 'Paris'" in text
        assert "completion.equality: exact" in text


def test_text_answers_stop_a_numeric_run_and_not_an_exact_one(validate, tmp_path):
    with pytest.raises(DataError, match="can ever be right"):
        validate(CITIES)
    assert "6 of 6 answers" in (tmp_path / "report.md").read_text()
    validate(CITIES, completion={"equality": "exact"})
    assert "6 of 6 answers" not in (tmp_path / "report.md").read_text()

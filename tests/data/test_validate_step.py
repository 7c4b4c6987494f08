"""The validation step: how it reports answers that no completion can equal."""

import logging

import pytest

from grpo_tasks.data.sources import load_sources
from grpo_tasks.running.step import Work
from grpo_tasks.steps import validate_data as module
from schemas.config.run import RunConfig
from schemas.errors import DataError
from schemas.results.data import PreparedData


@pytest.fixture
def validate(tmp_path, write, monkeypatch):
    """The body of the step on rows with these answers; Prefect's logger and artifacts exist inside a run only."""
    monkeypatch.setattr(module, "run_logger", lambda: logging.getLogger("step"))
    monkeypatch.setattr(Work, "artifact", lambda *_: None)

    def step(*answers, **completion):
        path = write(*({"question": f"What about {number}?", "answer": answer} for number, answer in enumerate(answers)))
        data = {"train": [{"path": path}], "eval_fraction": 0.5}
        config = RunConfig(data=data, completion=completion, stages=[{"name": "s", "rewards": ["format"]}], seed=1)
        loaded = load_sources(config.data, directory=tmp_path)
        rows = PreparedData(key="k", directory=tmp_path, seconds=0.0, sources=loaded.sources, rows=6)
        return module.validate_data.body(Work("k", tmp_path, None), config, rows)

    return step


def test_text_among_numbers_is_warned_of_in_report_and_log(validate, tmp_path, caplog):
    validate(*["4"] * 20, "Paris")
    for text in ((tmp_path / "report.md").read_text(), caplog.text):
        assert "1 of 21 answers are not numbers (first 'Paris'" in text
        assert "completion.equality: exact" in text


def test_text_answers_stop_a_numeric_run_and_not_an_exact_one(validate, tmp_path):
    with pytest.raises(DataError, match="can ever be right"):
        validate("Paris", "Rome", "Oslo", "Bern", "Riga", "Kyiv")
    assert "6 of 6 answers" in (tmp_path / "report.md").read_text()
    validate("Paris", "Rome", "Oslo", "Bern", "Riga", "Kyiv", equality="exact")
    assert "6 of 6 answers" not in (tmp_path / "report.md").read_text()

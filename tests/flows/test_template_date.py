"""The day that a chat template writes is fixed for all runs in a folder of results, and recorded."""

import json
import shutil
from datetime import datetime

import pytest

from flows.model_names import DATE, with_fixed_date, with_local_model
from grpo_tasks.content.model_files import asks_for_date
from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.policy.load import load_tokenizer
from grpo_tasks.running.key import content_key
from grpo_tasks.steps.probe_rewards import _date
from schemas.config.rollout import RolloutConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.paths import resolve
from schemas.results.model import ModelRef

CHAT = [{"role": "user", "content": "What is 15 + 27?"}]


@pytest.fixture
def dated(tmp_path, monkeypatch):
    """A config whose model writes the present day into every prompt."""
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(resolve("embedded:base"), tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text("Today: {{ strftime_now('%d %b %Y') }}\n" + template.read_text())
    tree = {
        "name": "small",
        "data": {"train": [{"path": "train.jsonl"}]},
        "model": {"path": "model"},
        "stages": [{"name": "one", "rewards": ["format"], "max_steps": 1}],
    }
    return RunConfig.model_validate(tree)


def tokens(config):
    return prompt_ids(load_tokenizer(ModelRef(path=config.model.path), config.model, config.rollout.chat_template_kwargs), CHAT)


def test_a_run_repeated_on_another_day_has_the_same_tokens(dated, tmp_path):
    first = with_local_model(dated)
    today = datetime.now().astimezone().date().isoformat()
    assert first.rollout.chat_template_kwargs == {"strftime_now": today}
    # As a run on that day has left it.
    (tmp_path / "runs" / "small" / DATE).write_text("2031-03-09")
    again, later = with_local_model(dated), with_local_model(dated)
    assert tokens(again) != tokens(first)
    assert tokens(again) == tokens(later)
    assert content_key("pipeline", (), {"rollout": again.rollout}) == content_key("pipeline", (), {"rollout": later.rollout})
    [warning] = _date(again.rollout)
    assert (warning.outcome, "2031-03-09 in all prompts" in warning.detail) == ("warned", True)


def test_a_configured_day_counts_and_other_templates_are_left_alone(dated, tmp_path):
    named = dated.model_copy(update={"rollout": RolloutConfig(chat_template_kwargs={"strftime_now": "2031-03-09"})})
    plain = dated.model_copy(update={"model": type(dated.model)()})
    assert (with_fixed_date(named), with_fixed_date(plain)) == (named, plain)
    assert not (tmp_path / "runs").exists()
    assert _date(plain.rollout) == []


@pytest.mark.parametrize("file", ["tokenizer_config.json", "additional_chat_templates/tool_use.jinja"])
def test_a_template_is_found_wherever_transformers_finds_one(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    assert not asks_for_date(str(tmp_path), None)
    (tmp_path / file).write_text(json.dumps({"chat_template": "{{ strftime_now('%Y') }}"}))
    assert asks_for_date(str(tmp_path), None)


@pytest.mark.parametrize("given", ["yesterday", 2031, None, "2031-02-30"])
def test_what_is_no_day_is_refused_with_the_fix(dated, tmp_path, given):
    with pytest.raises(ValueError, match=r"is the day that the template writes; fix: '2026-11-26', in quotes"):
        RolloutConfig(chat_template_kwargs={"strftime_now": given})
    with_fixed_date(dated)
    (tmp_path / "runs" / "small" / DATE).write_text(str(given))
    with pytest.raises(ConfigError, match="is no date"):
        with_fixed_date(dated)

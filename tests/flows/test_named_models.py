"""What a flow makes of the model that a config or a command names: a pinned version, a copy, a fixed date in its template."""

import json
import shutil
from datetime import datetime

import pytest
import yaml
from mlflow import MlflowClient

from flows import model_names
from flows.flow_run import pipeline_key
from flows.frozen_inputs import frozen_inputs
from flows.model_names import DATE, DTYPE, copy_model, with_fixed_date, with_local_model, with_pinned_model
from flows.sweeps.flow import pinned
from flows.sweeps.variant import plans_of
from grpo_tasks.content.model_files import asks_for_date
from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.policy.load import load_tokenizer
from grpo_tasks.running.key import content_key
from grpo_tasks.steps.probe_rewards import _date
from grpo_tasks.tracking.models import ORIGIN
from schemas.config.grid import make_grid
from schemas.config.load import load_config
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, ModelError
from schemas.paths import resolve
from schemas.results.model import ModelRef
from tests.flows.place import SMALL


@pytest.fixture
def champion(tmp_path, monkeypatch):
    """Makes a version of `other` its champion."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    client.create_registered_model("other")
    for _ in range(2):
        client.create_model_version("other", source=str(tmp_path))
    return lambda version: client.set_registered_model_alias("other", "champion", version)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["other@champion", "models:/other@champion", "other"])
def test_a_new_champion_behind_the_base_of_a_config_makes_other_keys(champion, tmp_path, name):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL | {"model": {"path": name}}))
    found = []
    for version in ("1", "2", "1"):
        champion(version)
        config = with_pinned_model(load_config("small.yaml"))
        assert config.model.path == f"models:/other/{version}", "what is trained is what was hashed"
        grid = pinned(make_grid("small.yaml", [], ["stages.0.learning_rate=1e-3,3e-4"], seeds=1))
        found.append((pipeline_key(frozen_inputs(config), "base"), plans_of(grid)))
    assert found[0] == found[2]
    assert found[0][0] != found[1][0]
    assert found[0][1].keys() == found[1][1].keys()
    assert not {plan.key for plan in found[0][1].values()} & {plan.key for plan in found[1][1].values()}


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "asked", "refused"), [
    ("float32", "bfloat16", True), ("float16", "bfloat16", True), ("float32", "float16", True),
    ("bfloat16", "bfloat16", False), ("float16", "float32", False),
])  # fmt: skip
def test_a_published_model_is_not_started_from_in_a_shorter_precision(champion, tmp_path, saved, asked, refused):
    folder = tmp_path / "downloaded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": saved}))
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL | {"model": {"path": str(folder), "dtype": asked}}))
    config = load_config("small.yaml")
    # A model from elsewhere is used as the user says.
    assert with_local_model(config) == config
    # This one was downloaded from the registry.
    (folder / "grpo.json").write_text("{}")
    if not refused:
        assert with_local_model(config) == config
        return
    with pytest.raises(
        ConfigError, match=f"published in {saved}, because a shorter precision would lose what it learned"
    ) as error:
        with_local_model(config)
    assert (error.value.place, error.value.fix) == ("model.dtype", f"model.dtype: {saved}")


def test_another_base_is_left_as_it_is(champion, tmp_path):
    config = load_config("demo")
    assert with_pinned_model(config) == config


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_copy_that_was_cut_off_is_made_again(source, tmp_path, monkeypatch):
    def killed(given, into):
        into.mkdir()
        (into / "config.json").write_text("{}")
        raise KeyboardInterrupt

    into = tmp_path / "new" / "merged"
    into.parent.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(model_names.shutil, "copytree", killed)
        with pytest.raises(KeyboardInterrupt):
            copy_model(source, into)
    assert not into.exists()
    for _ in range(2):
        copy_model(source, into)
        assert sorted(path.name for path in into.parent.rglob("*")) == ["config.json", "merged", "model.safetensors"]
    assert (into / "model.safetensors").read_bytes() == b"weights"


def test_other_files_stay_and_the_copy_is_refused(source, tmp_path):
    into = tmp_path / "into"
    into.mkdir()
    (into / "config.json").write_text("mine")
    with pytest.raises(ModelError, match="holds other files"):
        copy_model(source, into)
    assert (into / "config.json").read_text() == "mine"


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


def test_dtype_auto_is_that_of_the_first_run_whatever_machine_resumes_it(dated, tmp_path, monkeypatch, caplog):
    config = dated.model_copy(update={"model": ModelConfig(dtype="auto")})
    monkeypatch.setattr(model_names, "fastest_dtype", lambda _: "float32")
    # Only to validate the data: a login node does not decide for the GPU.
    assert with_local_model(config, computes=False).model.dtype == "float32"
    monkeypatch.setattr(model_names, "fastest_dtype", lambda _: "bfloat16")
    first = with_local_model(config)
    assert "stays" not in caplog.text
    monkeypatch.setattr(model_names, "fastest_dtype", lambda _: "float32")
    assert first.model == with_local_model(config).model == ModelConfig(dtype="bfloat16")
    assert f"model.dtype auto stays bfloat16, as in the first run of {config.name}" in caplog.text
    assert with_local_model(config.model_copy(update={"name": "other"})).model.dtype == "float32"
    assert with_local_model(dated).model.dtype == "float32"
    (tmp_path / "runs" / "small" / DTYPE).write_text("int8")
    with pytest.raises(ConfigError, match="'int8' is no precision"):
        with_local_model(config)


def test_dtype_auto_does_not_round_a_published_model(dated, tmp_path, monkeypatch):
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text('{"dtype": "float32"}')
    monkeypatch.setattr(model_names, "fastest_dtype", lambda _: "bfloat16")
    model = ModelConfig(path=str(tmp_path / "published"), dtype="auto")
    assert with_local_model(dated.model_copy(update={"model": model, "name": "mine"})).model.dtype == "bfloat16"
    (tmp_path / "published" / ORIGIN).write_text("{}")
    assert with_local_model(dated.model_copy(update={"model": model})).model.dtype == "float32"

"""A base model that is named by an alias: another version behind it is a change, for a retraining and for a sweep."""

import json

import pytest
import yaml
from mlflow import MlflowClient

from flows.flow_run import pipeline_key
from flows.frozen_inputs import frozen_inputs
from flows.model_names import with_local_model, with_pinned_model
from flows.sweeps.flow import pinned
from flows.sweeps.variant import plans_of
from schemas.config.grid import make_grid
from schemas.config.load import load_config
from schemas.errors import ConfigError
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

"""Every field of the configuration is a parameter; none is dropped and none is cut."""

import json
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from grpo_tasks.tracking.description import MAX_KEY, MAX_VALUE, describe_environment, flatten, stage_params
from schemas.config.load import PRESETS, load_config
from schemas.config.run import RunConfig


def field_paths(section: BaseModel, prefix=""):
    """Dotted paths of all fields, found by walking the models."""
    for name in type(section).model_fields:
        value, path = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from field_paths(value, path + ".")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                yield from field_paths(item, f"{path}.{index}.")
        elif isinstance(value, dict) and value:
            for key, item in value.items():
                yield from field_paths(item, f"{path}.{key}.") if isinstance(item, BaseModel) else [f"{path}.{key}"]
        else:
            yield path


@pytest.mark.parametrize("preset", sorted(Path(PRESETS).glob("*.yaml")), ids=lambda path: path.stem)
def test_every_field_of_every_preset_is_a_parameter(preset):
    config = load_config(preset)
    assert set(field_paths(config)) == set(flatten(config))


def test_parameters_can_be_read_back_as_their_values():
    tree = {
        "data": {"train": [{"path": "a b.jsonl"}, {"path": "c.jsonl"}]},
        "stages": [{"name": "one", "rewards": ["format", "correctness"], "learning_rate": 1e-5}],
    }
    params = flatten(RunConfig.model_validate(tree))
    assert params["data.train.1.path"] == "c.jsonl"
    assert json.loads(params["stages.0.rewards"]) == ["format", "correctness"]
    assert float(params["stages.0.learning_rate"]) == 1e-5
    assert params["model.revision"] == "null"
    assert params["data.eval"] == "[]"
    assert params["rewards.functions"] == "{}"
    assert yaml.safe_load(params["resources.deterministic"]) is True


class Section(BaseModel):
    params: dict[str, object] = {}
    text: str = ""


@given(st.text(max_size=3 * MAX_VALUE), st.integers(0, 4))
def test_the_parts_of_a_long_text_are_complete(text, repeats):
    text = text * (1 + repeats)
    params = flatten(Section(text=text))
    assert all(len(value) <= MAX_VALUE for value in params.values())
    parts = [key for key in params if key.startswith("text.part")]
    assert "".join(params[key] for key in parts) == text if parts else params["text"] == text
    assert bool(parts) == (len(text) > MAX_VALUE)


@given(st.dictionaries(st.text(max_size=400), st.integers(), max_size=5))
def test_mlflow_accepts_every_key_of_a_users_parameters(params):
    from mlflow.utils.validation import _validate_param

    flat = flatten(Section(params=params))
    assert len(flat) == 1 + max(1, len(params))
    for key, value in flat.items():
        assert len(key) <= MAX_KEY
        _validate_param(key, value)


def test_every_installed_distribution_is_named_with_its_version():
    known = {found.name.lower(): found.version for found in metadata.distributions() if found.name}
    assert describe_environment().packages == dict(sorted(known.items()))


DATA = {"train": [{"path": "train.jsonl"}], "system_prompt": "Answer in tags."}
OWN = {"function": "my.rewards:own", "params": {"needle": ["a", "b"]}}


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        ({"rewards": {"functions": {"own": OWN | {"weight": 2.0}}}}, {"reward.own.weight"}),
        ({"model": {"lora": {"r": 8}}}, {"model.lora.r"}),
        ({"completion": {"equality": "exact"}}, {"completion.equality"}),
        ({"interaction": {"tools": ["my.tools:calculate"]}}, {"interaction.tools"}),
        ({"difficulty": {"success": 0.5}}, {"difficulty.success"}),
        ({"validation": {"max_prompt_length": 99}}, {"validation.max_prompt_length"}),
        ({"rollout": {"temperature": 0.7}}, {"rollout.temperature"}),
        ({"data": DATA | {"system_prompt": "Be brief."}}, {"data.system_prompt"}),
        (
            {"data": DATA | {"task_column": "kind", "tasks": {"sums": {"weight": 2}}}},
            {"data.task_column", "data.tasks", *(f"data.tasks.sums.{name}" for name in ("weight", "rewards", "answers"))},
        ),
        ({"seed": 7}, {"seed"}),
    ],
    ids=[
        "rewards",
        "model",
        "completion",
        "interaction",
        "difficulty",
        "validation",
        "rollout",
        "system prompt",
        "tasks",
        "seed",
    ],
)
def test_the_parameters_of_two_stages_show_everything_that_differs(make_config, changes, differ):
    ours, theirs = (stage_params(make_config(None, **one), "format") for one in ({}, changes))
    assert {name for name in ours | theirs if ours.get(name) != theirs.get(name)} == differ
    known = {"model.lora.r": "16", "rollout.temperature": "1.0", "reward.format.weight": "1.0", "rewards.memory_limit_gb": "8.0"}
    own = {"function": "my.rewards:own", "params.needle": '["a", "b"]', "time_limit_s": "30.0"}
    assert (known | {f"reward.own.{name}": value for name, value in own.items()}).items() <= ours.items()

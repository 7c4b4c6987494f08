"""The form is another view of the same tree: what it sends back is what a YAML file would have said."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas.config.load import PRESETS, check_config, load_config, read_tree
from schemas.config.run import RunConfig
from schemas.config.section import FLAT, Section, form_values
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError

SCHEMA = RunConfig.model_json_schema()


def sections():
    todo, found = [RunConfig], []
    while todo:
        section = todo.pop()
        found.append(section)
        for field in section.model_fields.values():
            for part in [field.annotation, *getattr(field.annotation, "__args__", ())]:
                todo += [part] if isinstance(part, type) and issubclass(part, Section) else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("preset", [path.stem for path in PRESETS.glob("*.yaml")])
def test_a_presets_form_values_fit_the_forms_schema_and_mean_the_preset(preset):
    values = form_values(read_tree(preset), RunConfig)
    jsonschema.validate(values, SCHEMA)
    assert RunConfig.model_validate(values) == load_config(preset)


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_a_group_names_fields_that_exist_and_folds_each_once(section):
    members = [name for group in section.GROUPS.values() for name in group]
    assert len(members) == len(set(members))
    assert set(members) <= section.model_fields.keys()
    assert not section.GROUPS.keys() & section.model_fields.keys()
    assert not [name for name in members if section.model_fields[name].is_required()]


def test_rarely_used_fields_are_folded_and_keep_their_descriptions():
    stage = SCHEMA["$defs"]["StageConfig"]
    assert "learning_rate" in stage["properties"]
    assert "adam_beta1" not in stage["properties"]
    [shown, folded] = stage["properties"]["optimizer"]["anyOf"]
    assert folded["type"] == "null"
    assert shown["properties"]["adam_beta1"]["description"] == "Decay rate of the first moment."
    assert len(stage["properties"]) <= 15


@given(st.floats(0, 0.99), st.floats(0, 1), st.integers(1, 9))
def test_folded_and_flat_fields_read_the_same(beta, ratio, iterations):
    flat = {"name": "a", "rewards": ["format"], "adam_beta1": beta, "warmup_ratio": ratio, "num_iterations": iterations}
    assert StageConfig.model_validate(form_values(flat, StageConfig)) == StageConfig.model_validate(flat)


DATA = {"data": {"train": [{"path": "x.jsonl"}]}}


def test_a_bad_value_in_a_group_of_the_form_names_its_field():
    stage = {"name": "a", "rewards": ["format"], "optimizer": {"adam_beta1": 2}}
    with pytest.raises(ValidationError, match=r"stages\.0\.adam_beta1\s.*less than 1"):
        RunConfig.model_validate(DATA | {"stages": [stage]})
    with pytest.raises(ValidationError, match="set twice"):
        RunConfig.model_validate(DATA | {"stages": [stage | {"adam_beta1": 0.9}]})
    with pytest.raises(ValidationError, match="optimizer groups fields"):
        RunConfig.model_validate(DATA | {"stages": [stage | {"optimizer": 3}]})


def test_a_file_has_one_spelling_for_a_field_the_flat_one():
    stage = {"name": "a", "rewards": ["format"]}
    assert check_config(DATA | {"stages": [stage | {"adam_beta1": 0.5}]}).stages[0].adam_beta1 == 0.5
    with pytest.raises(ConfigError, match=r"stages\.0\.optimizer: unknown key; did you mean optim\?"):
        check_config(DATA | {"stages": [stage | {"optimizer": {"adam_beta1": 0.5}}]})


def test_reward_modules_are_found_next_to_the_file_that_is_extended(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    (tmp_path / "top").mkdir()
    (tmp_path / "base" / "beside_the_base.py").write_text("def f(completions, **kwargs): return [0.0] * len(completions)\n")
    (tmp_path / "base" / "base.yaml").write_text("extends: demo\nrewards: {functions: {own: {function: 'beside_the_base:f'}}}\n")
    (tmp_path / "top" / "top.yaml").write_text("extends: ../base/base.yaml\nname: top\n")
    monkeypatch.chdir(tmp_path)
    assert load_config("top/top.yaml").rewards.module_dir == Path("base")


def test_a_section_that_a_form_shows_as_its_defaults_has_its_defaults():
    stage = {"name": "s", "rewards": ["format"]}
    folded = {
        "stages": [stage | {"logs_and_checkpoints": {"save_steps": 7, "guards": None}}],
        "rollout": None,
        "completion": None,
    }
    data = {"data": {"train": [{"path": "t.jsonl"}]}}
    plain = RunConfig.model_validate(data | {"stages": [stage | {"save_steps": 7}]})
    jsonschema.validate(data | folded, SCHEMA)
    assert RunConfig.model_validate(data | folded) == plain
    with pytest.raises(ValidationError):  # a YAML file cannot
        RunConfig.model_validate(data | {"stages": [stage], "rollout": None}, context=FLAT)
    for name in ("completion", "rollout", "evaluation", "promotion"):
        assert SCHEMA["properties"][name]["anyOf"][1] == {"type": "null", "title": "Defaults"}, "folded until a value is set"


def test_tags_in_the_help_texts_of_a_form_are_shown_as_text():
    text = json.dumps(SCHEMA)
    assert "&lt;reasoning>" in text
    assert not re.search(r"<[a-z/]", text), "a browser would take it for a tag and show nothing"

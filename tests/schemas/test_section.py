"""The form is another view of the same tree: what it sends back is what a YAML file would have said."""

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config.load import PRESETS, check_config, load_config, read_tree
from schemas.config.run import RunConfig
from schemas.config.section import Section, form_values
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
    assert shown["properties"]["adam_beta1"]["description"] == "Decay of the first moment."
    assert len(stage["properties"]) < 15


@given(st.floats(0, 0.99), st.floats(0, 1), st.integers(1, 9))
def test_folded_and_flat_fields_read_the_same(beta, ratio, iterations):
    flat = {"name": "a", "rewards": ["format"], "adam_beta1": beta, "warmup_ratio": ratio, "num_iterations": iterations}
    assert StageConfig.model_validate(form_values(flat, StageConfig)) == StageConfig.model_validate(flat)


def test_a_bad_value_inside_a_group_is_refused_with_the_fields_name():
    stage = {"name": "a", "rewards": ["format"], "optimizer": {"adam_beta1": 2}}
    with pytest.raises(ConfigError, match=r"stages\.0\.adam_beta1: .*less than 1"):
        check_config({"data": {"train": [{"path": "x.jsonl"}]}, "stages": [stage]})
    with pytest.raises(ConfigError, match="given twice"):
        check_config({"data": {"train": [{"path": "x.jsonl"}]}, "stages": [stage | {"adam_beta1": 0.9}]})
    with pytest.raises(ConfigError, match="optimizer holds settings"):
        check_config({"data": {"train": [{"path": "x.jsonl"}]}, "stages": [stage | {"optimizer": 3}]})

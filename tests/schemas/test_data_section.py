"""The section `data`: forms of prompts, tasks, templates and what a source may say about its file."""

import pytest
from pydantic import ValidationError

from schemas.config.data import DataConfig, TaskConfig, applies, template_columns
from schemas.config.run import RunConfig

SOURCE = {"path": "rows.jsonl"}
STAGE = {"name": "one", "rewards": ["format", "length"]}


def test_reward_functions_of_a_task_are_all_unless_it_names_some():
    tasks = {"math": {"rewards": ["correctness"]}, "style": {"weight": 2.0}}
    data = DataConfig.model_validate({"train": [{**SOURCE, "task": "math"}], "tasks": tasks})
    assert data.rewards_of("math") == {"correctness"}
    assert data.rewards_of("style") is data.rewards_of("other") is None
    only = {"math": TaskConfig(rewards=["correctness"])}
    assert applies(only, "math", "correctness")
    assert not applies(only, "math", "style")
    assert applies(only, "other", "style")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"tasks": {"math": {}}}, "no row has a task"),
        ({"task_column": "task", "tasks": {"math": {"weight": 0}}}, "greater than 0"),
        ({"format": "standard", "system_prompt": "be brief"}, "no system message"),
        ({"question": "no column"}, "name columns in braces"),
        ({"question": "{a.b!r}"}, "name columns in braces"),
        ({"question": "{a"}, "malformed"),
        ({"train": [{**SOURCE, "delimiter": "ab"}]}, "a delimiter is one character"),
        ({"train": [{**SOURCE, "encoding": "klingon"}]}, "no encoding is called klingon"),
    ],
)
def test_impossible_setting_is_refused_with_the_fix(section, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate({"train": [SOURCE], **section})


def test_a_task_names_rewards_of_stages_and_one_in_each():
    data = {"train": [SOURCE], "task_column": "task"}
    for rewards, message in (
        (["style"], "which no stage uses; fix: one of format, length"),
        ([], "no reward of stages.0 applies"),
    ):
        with pytest.raises(ValidationError, match=message):
            RunConfig.model_validate({"data": {**data, "tasks": {"a": {"rewards": rewards}}}, "stages": [STAGE]})


def test_template_names_its_columns_and_doubled_braces_are_text():
    assert template_columns("{Body} {{x}} {Question 2}") == ["Body", "Question 2"]


@pytest.mark.parametrize(("given", "mark"), [("\\t", "\t"), ("tab", "\t"), (";", ";")])
def test_delimiter_is_a_character_or_its_name(given, mark):
    assert DataConfig.model_validate({"train": [{**SOURCE, "delimiter": given}]}).train[0].delimiter == mark

"""A setting in the wrong section, or under another library's name, is answered with ours."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from schemas.config.load import check_config, check_recorded
from schemas.errors import ConfigError
from schemas.hints import GONE, NOTHING, OURS, all_fields, hint_for, places_of

TREE = {"data": {"train": [{"path": "rows.jsonl"}]}, "stages": [{"name": "only", "rewards": ["format"]}]}


def declared(package, file, name):
    """The fields that a class of an installed package declares, read from its source: the import takes seconds."""
    spec = find_spec(package)
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return [item.target.id for item in found.body if isinstance(item, ast.AnnAssign)]


def test_every_field_of_trls_config_is_ours_or_has_a_hint():
    if find_spec("trl") is None:
        pytest.skip("trl is not installed")
    names = {
        *declared("trl", "trainer/grpo_config.py", "GRPOConfig"),
        *declared("trl", "trainer/base_config.py", "_BaseConfig"),
        *declared("transformers", "training_args.py", "TrainingArguments"),
    }
    assert len(names) > 180, "the classes have moved in the source"
    assert [name for name in sorted(names) if not (places_of(name) or name in OURS or name in NOTHING)] == []


def test_every_hint_names_a_field_that_exists_and_no_name_has_two():
    assert OURS.keys() & NOTHING.keys() == set()
    sections = ("name", "seed", "start_from", "section ", *(f"{section}." for section in all_fields()), "stages[].")
    for name, ours in OURS.items():
        assert ours.startswith((*sections, "name of")), name
        place = ours.split(":")[0].split(" ")[0].rstrip(",")
        if "." in place and "NAME" not in place:
            assert place in places_of(place.rpartition(".")[2]), f"{name}: {place}"


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("stages.0.max_completion_length", "it belongs to rollout.max_completion_length"),
        ("stages.0.temperature", "it belongs to rollout.temperature or evaluation.temperature"),
        ("learning_rate", "it belongs to stages[].learning_rate"),
        ("stages.0.max_prompt_length", "it belongs to validation.max_prompt_length"),
        ("stages.0.output_dir", "it belongs to resources.output_dir"),
        ("stages.0.bf16", "here it is model.dtype: bfloat16"),
        ("stages.0.fp16", "here it is model.dtype: float16"),
        ("rollout.use_vllm", "here it is rollout.engine: vllm"),
        ("rollout.max_new_tokens", "here it is rollout.max_completion_length"),
        ("report_to", "it belongs to tracking.report_to"),
        ("model.load_in_4bit", "here it is model.quantization: nf4"),
        ("model.peft_config", "here it is model.lora"),
        ("stages.0.reward_weights", "here it is rewards.functions.NAME.weight"),
        ("stages.0.deepspeed", "it has no equivalent: "),
        ("stages.0.learning_rat", "did you mean learning_rate?"),
        ("stages.0.max_completion_lenght", "did you mean rollout.max_completion_length?"),
    ],
)
def test_a_setting_in_the_wrong_section_is_shown_its_place(place, says):
    location = [int(part) if part.isdigit() else part for part in place.split(".")]
    assert hint_for(location).startswith(says)


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({"max_steps": -1}, "leave max_steps out: num_train_epochs then decides"),
        ({"scale_rewards": False}, "scale_rewards: none"),
        ({"scale_rewards": True}, "scale_rewards: group"),
        ({"warmup_steps": 0.1}, "warmup_ratio: 0.1"),
        ({"bf16": True}, "stages.0.bf16: unknown key; here it is model.dtype: bfloat16"),
    ],
)
def test_a_value_of_trls_is_refused_with_ours(stage, says):
    tree = yaml.safe_load(yaml.safe_dump(TREE))
    tree["stages"][0] |= stage
    with pytest.raises(ConfigError) as caught:
        check_config(tree)
    assert says in caught.value.message


def test_a_removed_setting_says_what_to_do_and_old_records_load():
    adaptive = {"every_steps": 5, "shrink": 0.8, "min_scale": 0.5, "max_scale": 2.0}
    judge = {"base_urls": ["http://127.0.0.1:1"], "model": "m", "rubric": [{"name": "r", "description": "d"}], "max_call_s": 60.0}
    functions = {"format": {"adaptive": adaptive}, "judge": {"judge": judge}}
    tracking = {"webhook": {"url": "https://host/hook", "limit_s": 3.0}, "flush_interval_s": 1.0, "patience_s": 7.0}
    old = TREE | {"tracking": tracking, "rewards": {"functions": functions}}
    with pytest.raises(ConfigError) as refused:
        check_config(old)
    assert str(refused.value).count("it is no setting any more: ") == len(GONE)
    assert "examples/webhook" in str(refused.value)
    read = check_recorded(yaml.safe_dump(old), place="config.yaml")
    assert read.tracking.patience_s == 7.0
    assert read.rewards.functions["format"].adaptive.every_steps == 5
    with pytest.raises(ConfigError, match="unknown key"):
        check_recorded(yaml.safe_dump(old | {"never": 1}), place="config.yaml")

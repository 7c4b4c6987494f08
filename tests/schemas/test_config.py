import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from schemas.config import BUILTIN_REWARDS, RunConfig, StageConfig
from schemas.errors import ConfigError, DataError, UserError
from schemas.load import PRESETS, check_config, load_config
from schemas.metrics import TRAINING, describe

STAGE = {"name": "only", "rewards": ["format"]}
TREE = {"data": {"train": [{"path": "rows.jsonl"}]}, "stages": [STAGE]}


@pytest.mark.parametrize("preset", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_every_preset_is_a_valid_config(preset):
    config = load_config(preset)
    assert check_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("section", "key", "near"),
    [
        ((), "stage", "stages"),
        (("model",), "pth", "path"),
        (("model", "lora"), "alpha", "lora_alpha"),
        (("data", "train", 0), "max_row", "max_rows"),
        (("stages", 0), "num_generation", "num_generations"),
        (("stages", 0, "early_stop"), "tagret", "target"),
        (("rewards", "functions", "mine"), "wieght", "weight"),
    ],
)
def test_an_unknown_key_anywhere_is_refused_with_the_nearest_right_one(section, key, near):
    tree = yaml.safe_load(yaml.safe_dump(TREE))
    node = tree
    for part in section:
        node = node[part] if isinstance(node, list) else node.setdefault(part, {})
    node[key] = 1
    place = ".".join(str(part) for part in (*section, key))
    with pytest.raises(ConfigError, match=rf"{place}: unknown key; did you mean {near}\?"):
        check_config(tree)


@pytest.mark.parametrize(
    ("settings", "mend"),
    [
        ({"resources": {"fsdp": True}, "model": {"quantization": "nf4"}}, "fsdp: false"),
        ({"resources": {"fsdp": True}, "model": {"lora": None, "dtype": "float16"}}, "bfloat16"),
        ({"resources": {"fsdp": True}, "stages": [STAGE | {"optim": "adamw_8bit"}]}, "adamw_torch"),
        ({"resources": {"fsdp": True}, "stages": [STAGE | {"engine": "trl"}]}, "engine: native"),
        ({"rollout": {"engine": "vllm", "vllm": {"overlap": True, "sleep": True}}}, "overlap or sleep"),
        ({"rollout": {"engine": "vllm", "vllm": {"overlap": True}}}, "importance_sampling_correction: token_truncate"),
        (
            {
                "rollout": {"engine": "vllm", "vllm": {"overlap": True, "base_urls": ["http://127.0.0.1:1"]}},
                "resources": {"num_processes": 2},
            },
            "num_processes: 1",
        ),
        ({"model": {"quantization": "nf4", "lora": None}}, "quantization: none"),
    ],
    ids=str,
)
def test_what_cannot_go_together_is_refused_with_the_mend(settings, mend):
    with pytest.raises(ConfigError, match=mend):
        check_config(TREE | settings)


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        check_config(TREE | {"seed": -1, "nmae": "x"})
    assert "seed" in caught.value.message
    assert "did you mean name?" in caught.value.message


def test_the_mend_for_an_impossible_batch_is_possible():
    settings = {"name": "s", "rewards": ["format"], "num_generations": 6}
    with pytest.raises(ValueError, match="mend: per_device_train_batch_size: 6") as caught:
        StageConfig(**settings, per_device_train_batch_size=8)
    assert "= 8 completions" in str(caught.value)
    StageConfig(**settings, per_device_train_batch_size=6)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)))
def test_rubbish_in_place_of_a_config_is_an_error_of_ours(rubbish):
    with pytest.raises(ConfigError):
        check_config({"data": rubbish, "stages": rubbish})


def test_overrides_reach_every_depth_and_keep_their_types():
    config = load_config(
        "demo", ["stages.0.beta=0.1", "model.lora=null", "evaluation.max_prompts=5", "rollout.stop=['</answer>']"]
    )
    assert config.stages[0].beta == 0.1
    assert config.model.lora is None
    assert config.evaluation.max_prompts == 5
    assert config.rollout.stop == ["</answer>"]


def test_a_file_that_extends_another_says_only_what_differs(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: demo\nname: mine\nrollout: {temperature: 0.7}\n")
    (tmp_path / "more.yaml").write_text("extends: mine.yaml\nrollout: {top_k: 5}\n")
    demo, more = load_config("demo"), load_config(tmp_path / "more.yaml", ["seed=9"])
    assert (more.name, more.seed, more.stages) == ("mine", 9, demo.stages)
    assert more.rollout == demo.rollout.model_copy(update={"temperature": 0.7, "top_k": 5})
    (tmp_path / "mine.yaml").write_text("extends: more.yaml\n")
    with pytest.raises(ConfigError, match="does not lead back here"):
        load_config(tmp_path / "more.yaml")


def test_an_own_reward_gets_its_settings_and_a_builtin_its_default_weight():
    functions = {"mine": {"function": "module:f"}, "format": {"params": {"a": 1}}}
    config = check_config(TREE | {"rewards": {"functions": functions}})
    assert config.rewards.resolve("mine").weight == 1.0
    assert config.rewards.resolve("format").weight == BUILTIN_REWARDS["format"]
    assert config.rewards.resolve("format").params == {"a": 1}
    assert config.rewards.resolve("nothing") is None


def test_an_error_of_ours_crosses_a_process_border_whole():
    error = DataError("bad rows", place="a.jsonl:3", mend="mend them")
    again = UserError.from_json(error.to_json())
    assert type(again) is DataError
    assert str(again) == str(error) == "bad rows\n  where: a.jsonl:3\n  mend:  mend them"


def test_every_training_metric_is_named_once_and_families_are_found():
    names = [metric.name for metric in TRAINING]
    assert len(names) == len(set(names))
    assert describe("rewards/my_own/mean").name == "rewards/*/mean"
    assert describe("nothing") is None


def test_the_schema_of_a_run_carries_a_description_for_every_field():
    definitions = RunConfig.model_json_schema()["$defs"]
    bare = [
        f"{name}.{key}"
        for name, model in definitions.items()
        for key, field in model["properties"].items()
        if not field.get("description")
    ]
    assert bare == []

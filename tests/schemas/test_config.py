from datetime import date

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from schemas.config.data import DataConfig, applies, template_columns
from schemas.config.load import PRESETS, check_config, load_config
from schemas.config.rewards import BUILTIN_REWARDS
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.errors import ConfigError
from schemas.paths import resolve

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


PLAYED = {"environment": "tests.rollout.counting:Counting"}
NO_BANDS = ([0.9, 0.1], [0.1], [0.1, 0.5, 0.9], [-0.1, 0.5], [0.1, 1.5])
BAD_DATA = [
    ({"tasks": {"math": {}}}, "no row has a task"),
    ({"task_column": "task", "tasks": {"math": {"weight": 0}}}, "greater than 0"),
    ({"task_column": "task", "tasks": {"a": {"rewards": ["style"]}}}, "which no stage uses; fix: one of format"),
    ({"task_column": "task", "tasks": {"a": {"rewards": []}}}, "no reward of stages.0 applies"),
    ({"format": "standard", "system_prompt": "be brief"}, "no system message"),
    ({"question": "no column"}, "name columns in braces"),
    ({"question": "{a.b!r}"}, "name columns in braces"),
    ({"question": "{a"}, "malformed"),
    ({"train": [{"path": "a.csv", "delimiter": "ab"}]}, "a delimiter is one character"),
    ({"train": [{"path": "a.csv", "encoding": "klingon"}]}, "no encoding is called klingon"),
]
CLUSTER = {"cluster": {"engine": "ray", "address": "auto"}}
ADDED = {"added_tokens": ["<ask>", {"token": "<search>", "special": True}]}


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"resources": {"fsdp": True}, "model": {"quantization": "nf4"}}, "fsdp: false"),
        ({"resources": {"fsdp": True}, "model": {"lora": None, "dtype": "float16"}}, "bfloat16"),
        ({"resources": {"fsdp": True}, "stages": [STAGE | {"optim": "adamw_8bit"}]}, "adamw_torch"),
        ({"resources": {"fsdp": True}, "stages": [STAGE | {"engine": "trl"}]}, "engine: native"),
        ({"resources": CLUSTER, "stages": [STAGE | {"engine": "trl"}]}, "stages.0.engine: native"),
        ({"resources": CLUSTER, "model": ADDED, "rollout": {"engine": "vllm"}}, "rollout.engine: local"),
        ({"resources": CLUSTER | {"num_processes": 2}}, "cluster.processes_per_node"),
        ({"rollout": {"engine": "vllm", "max_staleness": 1, "vllm": {"sleep": True}}}, "max_staleness: 0, or sleep: false"),
        ({"rollout": {"max_staleness": 1}}, "max_staleness: 0, or engine: vllm"),
        (
            {
                "rollout": {"engine": "vllm", "max_staleness": 4},
                "stages": [STAGE | {"importance_sampling_correction": "none"}],
            },
            "importance_sampling_correction: auto",
        ),
        ({"rollout": {"engine": "vllm", "vllm": {"overlap": True}}}, "rollout.max_staleness: 1"),
        (
            {
                "rollout": {"engine": "vllm", "max_staleness": 1},
                "stages": [STAGE | {"num_iterations": 2, "importance_sampling_correction": "token_truncate"}],
            },
            "rollout.max_staleness: 2, or 0",
        ),
        ({"model": {"quantization": "nf4", "lora": None}}, "quantization: none"),
        ({"model": ADDED, "rollout": {"engine": "vllm", "vllm": {"base_urls": ["http://127.0.0.1:1"]}}}, "remove rollout.vllm"),
        ({"model": ADDED, "rollout": {"vllm": {"sync": "adapter"}}, "evaluation": {"engine": "vllm"}}, "sync: auto"),
        ({"model": ADDED | {"quantization": "nf4"}, "rollout": {"engine": "vllm"}}, "engine: local"),
        ({"model": ADDED, "resources": {"fsdp": True}}, "fsdp: false"),
        ({"model": {"added_tokens": ["<ask>", {"token": "<ask>"}]}}, "name each token once"),
        ({"rollout": {"chat_template_kwargs": {"add_generation_prompt": False}}}, "leave it out"),
        ({"rollout": {"chat_template_kwargs": {"a b": 1}}}, "letters, digits"),
        ({"rollout": {"chat_template_kwargs": {"day": date(2026, 1, 2)}}}, "strings, numbers"),
        ({"stages": [STAGE | {"rewards": ["environment"]}]}, "no environment answers"),
        ({"stages": [STAGE | {"rewards": ["environment"]}], "interaction": {"tools": ["tools:add"]}}, "no environment answers"),
        ({"interaction": PLAYED | {"max_tokens": 128}}, "fix: interaction.max_tokens: 1024"),
        ({"interaction": PLAYED, "stages": [STAGE | {"engine": "trl"}]}, "fix: stages.0.engine: native"),
        (
            {"stages": [STAGE | {"keep_pass_rate": [0.1, 0.9]}]},
            r"stages\.0\.keep_pass_rate needs pass rates; fix: difficulty.samples",
        ),
        (
            {"stages": [STAGE | {"measure_difficulty": True}], "difficulty": {"pass_rate_column": "r"}},
            "samples no completions; fix",
        ),
        ({"difficulty": {"samples": 2, "screen": 2}}, r"screen is 2.*fix: difficulty\.samples: 8, difficulty\.screen: 2"),
        *(({"stages": [STAGE | {"keep_pass_rate": band}], "difficulty": {"samples": 8}}, "keep_pass_rate") for band in NO_BANDS),
        *(({"data": TREE["data"] | given}, says) for given, says in BAD_DATA),
    ],
    ids=lambda case: str(case)[:80],
)
def test_what_cannot_go_together_is_refused_with_the_fix(settings, fix):
    with pytest.raises(ConfigError, match=fix):
        check_config(TREE | settings)


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({"early_stop": {"metric": "rewrd", "target": 1}}, "did you mean reward?"),
        ({"early_stop": {"metric": "rewards/formt/mean", "target": 1}}, r"did you mean rewards/format/mean\?"),
        ({"early_stop": {"metric": "rewards/correctness/mean", "target": 1}}, "not a metric of this stage"),
        ({"early_stop": {"metric": "accuracy", "target": 1}}, "not a metric of this stage"),
        ({"early_stop": {"metric": "eval_reward", "target": 1}}, "eval_steps: 20"),
        ({"early_stop": {"metric": "x" * 100_000, "target": 1}}, "at most 200 characters"),
        ({"learning_rate": float("inf")}, r"stages\.0\.learning_rate: must be a finite number"),
        ({"learning_rate": "nan"}, r"stages\.0\.learning_rate: must be a finite number"),
        ({"learning_rate": "1e999"}, r"stages\.0\.learning_rate: must be a finite number"),
        ({"max_steps": 10**12}, r"stages\.0\.max_steps: .*less than or equal to 10000000"),
        ({"per_device_train_batch_size": 10**6, "gradient_accumulation_steps": 10**6}, "at most 1,000,000"),
        ({"trl": {"a": [1, {"b": float("-inf")}]}, "engine": "trl"}, r"a\.1\.b is -inf, not a finite number"),
    ],
    ids=lambda case: str(case)[:60],
)
def test_a_senseless_number_or_metric_of_a_stage_is_refused(stage, says):
    with pytest.raises(ConfigError, match=says):
        check_config(TREE | {"stages": [STAGE | stage]})


def test_what_fits_together_is_accepted():
    check_config(TREE | {"interaction": PLAYED, "stages": [STAGE | {"rewards": ["environment"]}]})
    band = {"stages": [STAGE | {"keep_pass_rate": [0.1, 0.9]}]}
    check_config(TREE | band | {"difficulty": {"pass_rate_column": "rate"}})
    check_config(TREE | band | {"difficulty": {"samples": 3, "screen": 2}})


def test_a_task_has_rewards_a_question_columns_a_delimiter_names():
    tasks = {"math": {"rewards": ["correctness"]}, "style": {"weight": 2.0}}
    data = DataConfig.model_validate({"train": [{"path": "a.csv", "task": "math", "delimiter": "tab"}], "tasks": tasks})
    assert data.rewards_of("math") == {"correctness"}
    assert data.rewards_of("style") is data.rewards_of("other") is None
    applying = [applies(data.tasks, task, reward) for task, reward in (("math", "correctness"), ("math", "a"), ("other", "a"))]
    assert applying == [True, False, True]
    for written, mark in (("\\t", "\t"), (";", ";")):
        assert DataConfig.model_validate({"train": [{"path": "a.csv", "delimiter": written}]}).train[0].delimiter == mark
    assert data.train[0].delimiter == "\t"
    assert template_columns("{Body} {{x}} {Question 2}") == ["Body", "Question 2"]


def test_a_metric_that_a_stage_has_may_stop_it():
    for metric in ("reward", "kl", "completions/mean_length", "rewards/format/success"):
        check_config(TREE | {"stages": [STAGE | {"early_stop": {"metric": metric, "target": 1}}]})
    stage = STAGE | {"early_stop": {"metric": "eval_rewards/format/mean", "target": 1}, "eval_steps": 5}
    check_config(TREE | {"stages": [stage]})


def numbers(schema, kind):
    """Where in a JSON schema a field is of this kind."""
    if isinstance(schema, dict):
        if schema.get("type") == kind:
            yield schema
        for part in schema.values():
            yield from numbers(part, kind)
    elif isinstance(schema, list):
        for part in schema:
            yield from numbers(part, kind)


def test_every_field_of_a_run_has_a_description():
    models = RunConfig.model_json_schema()["$defs"].items()
    fields = [(f"{model}.{key}", field) for model, made in models for key, field in made.get("properties", {}).items()]
    assert len(fields) > 100
    assert [name for name, field in fields if not field.get("description")] == []


def test_every_count_has_an_upper_bound():
    found = list(numbers(RunConfig.model_json_schema(), "integer"))
    assert len(found) > 40
    assert [field for field in found if not {"maximum", "exclusiveMaximum"} & field.keys()] == []


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_no_number_anywhere_may_be_infinite_or_nan(value):
    def broken(tree):
        """The tree with each number in turn replaced."""
        for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(inner, float):
                yield key, tree | {key: value} if isinstance(tree, dict) else None
            elif isinstance(inner, dict | list):
                for name, made in broken(inner):
                    again = {**tree, key: made} if isinstance(tree, dict) else [*tree[:key], made, *tree[key + 1 :]]
                    yield name, again

    tree = load_config("gsm8k-qwen2.5-1.5b").model_dump(mode="json")
    cases = list(broken(tree))
    assert len(cases) > 40
    for name, case in cases:
        with pytest.raises(ConfigError, match=rf"{name}: must be a finite number"):
            check_config(case)


@pytest.mark.parametrize("value", ["2024-01-01", "!!binary aGk=", "!!set {a, b}", ".inf"])
def test_a_reward_parameter_that_json_cannot_hold_is_refused(value):
    with pytest.raises(ConfigError, match="since"):
        load_config("demo", [f"rewards.functions={{mine: {{function: 'a:b', params: {{since: {value}}}}}}}"])


def test_a_text_that_only_looks_like_a_number_stays_one():
    config = load_config("demo", ["data.system_prompt=nan", "model.revision='1e5'", "stages.0.max_steps=1e2"])
    assert (config.data.system_prompt, config.model.revision, config.stages[0].max_steps) == ("nan", "1e5", 100)


def test_all_faults_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        check_config(TREE | {"seed": -1, "nmae": "x"})
    assert "seed" in caught.value.message
    assert "did you mean name?" in caught.value.message


def test_the_fix_for_an_impossible_batch_is_possible():
    settings = {"name": "s", "rewards": ["format"], "num_generations": 6}
    with pytest.raises(ValueError, match="fix: per_device_train_batch_size: 6") as caught:
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
    with pytest.raises(ConfigError, match="does not extend this one"):
        load_config(tmp_path / "more.yaml")


def test_an_own_reward_gets_its_settings_and_a_builtin_its_default_weight():
    functions = {"mine": {"function": "module:f"}, "format": {"params": {"a": 1}}}
    config = check_config(TREE | {"rewards": {"functions": functions}})
    assert config.rewards.resolve("mine").weight == 1.0
    assert config.rewards.resolve("format").weight == BUILTIN_REWARDS["format"]
    assert config.rewards.resolve("format").params == {"a": 1}
    assert config.rewards.resolve("nothing") is None


@pytest.mark.parametrize(("on", "prompt"), [(True, "Answer in tags."), (False, None)])
def test_the_merged_model_gets_the_datas_system_prompt(on, prompt):
    data = {"train": [{"path": "train.jsonl"}], "system_prompt": "Answer in tags."}
    stage = {"name": "format", "rewards": ["format"], "max_steps": 1}
    tree = {"data": data, "stages": [stage], "model": {"merged_system_prompt": on}}
    assert RunConfig.model_validate(tree).merged_system_prompt == prompt


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.path=embedded:../..", "embedded: names a file or folder that ships with this project"),
        ("data.train.0.path=embedded:/etc/passwd", "embedded: names a file or folder that ships with this project"),
        ("data.train.0.path='embedded:'", "embedded: names a file or folder that ships with this project"),
        ("resources.output_dir=/", "belongs to the system; fix: a folder of your own"),
        ("resources.output_dir=/tmp/../", "belongs to the system"),
        ("resources.output_dir=/dev/null", "belongs to the system"),
        ("resources.output_dir=/proc/self/cwd", "belongs to the system"),
        ("name=NUL", "the name of a device on Windows"),
        ("name=com1.yaml", "the name of a device on Windows"),
        ("stages.0.name=aux", "the name of a device on Windows"),
        *((f"tracking.registered_model={name!r}", "") for name in ("team/model", "a:b", "a@b", "", "x" * 300)),
        ("tracking.registered_model=it's", "MLflow cannot find or refuses a name with '"),
        ("tracking.registered_model='..'", "MLflow cannot find or refuses a name"),
        ("tracking.tracking_uri=databricks", "not the address of an MLflow server or database"),
        ("tracking.tracking_uri=mlruns.db", "fix: sqlite:///mlruns.db"),
    ],
)
def test_a_path_name_or_address_that_would_fail_later_is_refused(override, says):
    with pytest.raises(ConfigError) as refused:
        load_config("demo", [override])
    assert override.partition("=")[0] in refused.value.message
    assert says in refused.value.message


@pytest.mark.parametrize("path", ["embedded:../..", "embedded:base/../../..", "embedded:/etc/passwd", "embedded:"])
def test_no_embedded_name_leads_out_of_the_package(path):
    with pytest.raises(ConfigError, match="does not ship with the project"):
        resolve(path)


def test_memory_of_the_kernel_and_ordinary_folders_may_be_written_to():
    for folder in ("/dev/shm/runs", "/devices", "runs", "../runs", "/root/proc"):
        assert str(load_config("demo", [f"resources.output_dir={folder}"]).resources.output_dir) == folder

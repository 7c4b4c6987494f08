"""Which settings a stage of each kind takes: what belongs to another kind is refused with the place and the fix."""

import pytest
from pydantic import ValidationError

from schemas.config.load import load_config
from schemas.config.stage import FOREIGN, StageConfig, kind_with
from schemas.errors import ConfigError

SFT = {"name": "s", "kind": "sft", "demonstrations": {"column": "solution"}}
REJECTION = {"name": "r", "kind": "rejection", "rewards": ["format"]}
GRPO = {"name": "g", "rewards": ["format"]}


@pytest.mark.parametrize(
    ("base", "given", "words"),
    [
        (SFT, {"num_generations": 4}, ["num_generations", "kind sft", "fix: remove it, or kind: grpo"]),
        (SFT, {"beta": 0.1}, ["beta", "kind sft", "kind: grpo"]),
        (SFT, {"engine": "trl"}, ["engine", "kind sft"]),
        (SFT, {"keep_pass_rate": [0.1, 0.9]}, ["keep_pass_rate", "kind sft"]),
        (SFT, {"keep_completions": 2}, ["keep_completions", "kind: rejection"]),
        (SFT, {"demonstrations": None}, ["needs demonstrations", "fix: demonstrations: {column: solution}"]),
        (SFT, {"eval_steps": 5}, ["eval_steps", "rewards", "fix:"]),
        (SFT, {"max_tokens_per_microbatch": "auto"}, ["max_tokens_per_microbatch: 8192"]),
        (GRPO, {"demonstrations": {"column": "x"}}, ["demonstrations", "kind grpo", "kind: sft"]),
        (GRPO, {"keep_reward": 0.5}, ["keep_reward", "kind: rejection"]),
        (GRPO, {"rewards": []}, ["rewards are missing", "fix: rewards: ["]),
        (REJECTION, {"epsilon": 0.1}, ["epsilon", "kind rejection", "kind: grpo"]),
        (REJECTION, {"demonstrations": {"column": "x"}}, ["demonstrations", "kind: sft"]),
        (REJECTION, {"keep_completions": None}, ["fix: keep_reward: 0.8"]),
        (SFT, {"demonstrations": {}}, ["either a column or a function"]),
        (SFT, {"demonstrations": {"column": "a", "function": "b:c"}}, ["either a column or a function"]),
        (SFT, {"demonstrations": {"function": "b"}}, ["package.module:function"]),
    ],
)
def test_a_setting_of_another_kind_is_refused_with_its_fix(base, given, words):
    with pytest.raises(ValidationError) as caught:
        StageConfig(**base | given)
    for word in words:
        assert word in str(caught.value)


def test_the_place_of_a_refused_setting_is_its_stage(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "name: x\ndata: {train: [{path: a.jsonl}]}\nstages:\n"
        "  - {name: a, rewards: [format]}\n  - {name: b, kind: sft, demonstrations: {column: s}, beta: 1.0}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "config.yaml"))
    assert "stages.1" in str(caught.value)


def test_every_kind_survives_a_file_and_another_takes_what_it_refuses():
    for made in (StageConfig(**SFT), StageConfig(**REJECTION), StageConfig(**GRPO)):
        assert StageConfig.model_validate_json(made.model_dump_json()) == made
    for names in FOREIGN.values():
        assert set(names) <= StageConfig.model_fields.keys()
        assert all(name not in FOREIGN[kind_with(name)] for name in names)


def test_the_learning_rate_of_cross_entropy_is_not_that_of_grpo():
    assert StageConfig(**GRPO).learning_rate == 1e-6
    assert StageConfig(**SFT).learning_rate == StageConfig(**REJECTION).learning_rate == 2e-5
    assert StageConfig(**SFT, learning_rate=1e-4).learning_rate == 1e-4


def test_an_update_of_demonstrations_need_not_be_a_multiple_of_a_group():
    stage = StageConfig(**SFT, per_device_train_batch_size=7)
    assert (stage.prompts_per_rollout, stage.updates_per_rollout) == (7, 1)

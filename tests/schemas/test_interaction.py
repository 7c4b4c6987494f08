"""Tools and environments of a run: what fits together."""

import pytest
from pydantic import ValidationError

from grpo_tasks.running.key import content_key
from schemas.config.rollout import InteractionConfig
from schemas.config.run import RunConfig

DATA = {"train": [{"path": "rows.jsonl"}], "eval": [{"path": "rows.jsonl"}]}
PLAYED = {"environment": "tests.rollout.counting:Counting"}


def config(interaction, *, rewards=("format",), stage=None, **others):
    stages = [{"name": "s", "rewards": list(rewards), **(stage or {})}]
    return RunConfig(**{"data": DATA, "stages": stages, "interaction": interaction} | others)


def test_the_reward_of_the_environment_needs_an_environment():
    with pytest.raises(ValidationError, match="no environment answers"):
        config({}, rewards=["environment"])
    with pytest.raises(ValidationError, match="no environment answers"):
        config({"tools": ["tools:add"]}, rewards=["environment"])
    assert config(PLAYED, rewards=["environment"]).interaction.active


def test_a_conversation_has_room_for_a_turn():
    with pytest.raises(ValidationError, match=r"less than one turn .* fix: interaction.max_tokens: 2048"):
        config(PLAYED | {"max_tokens": 128}, rollout={"max_completion_length": 512})


def test_engines_that_play_no_conversations_are_named():
    with pytest.raises(ValidationError, match=r"fix: stages.0.engine: native"):
        config(PLAYED, stage={"engine": "trl"})


def test_an_edited_environment_is_another_one_and_more_workers_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "my_environment.py"
    module.write_text("class Counter: pass\n")
    keys = []
    for workers, text in ((1, "class Counter: pass\n"), (3, "class Counter: pass\n"), (1, "class Counter: turns = 2\n")):
        module.write_text(text)
        inputs = {"interaction": InteractionConfig(environment="my_environment:Counter", workers=workers)}
        keys.append(content_key("step", (), inputs))
    assert keys[0] == keys[1] != keys[2]

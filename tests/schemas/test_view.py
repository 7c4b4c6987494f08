"""A step sees the settings that it declares, and its key holds no other."""

import pkgutil
from importlib import import_module

import pytest

import grpo_tasks.steps
from grpo_tasks.rollout.spec import SampleSpec
from grpo_tasks.running.key import content_key
from grpo_tasks.running.step import Step
from schemas.config.load import load_config
from schemas.config.rollout import InteractionConfig
from schemas.config.section import view
from schemas.results.model import ModelRef

STEPS = [
    getattr(import_module(f"grpo_tasks.steps.{module.name}"), module.name)
    for module in pkgutil.iter_modules(grpo_tasks.steps.__path__)
]


@pytest.fixture(scope="module")
def demo():
    return load_config("demo", ["data.task_column=kind", "data.tasks.sums={rewards: [format, correctness]}"])


def test_a_setting_that_is_not_declared_cannot_be_read(demo):
    seen = view(demo, "rollout model -model.lora stages.name")
    assert seen.rollout == demo.rollout
    assert seen.model.path == demo.model.path
    assert [stage.name for stage in seen.stages] == ["format", "correctness"]
    for read in (lambda: seen.seed, lambda: seen.model.lora, lambda: seen.stages[0].rewards, lambda: seen.supervised_first):
        with pytest.raises(AttributeError):
            read()


def test_a_path_goes_through_every_task(demo):
    assert view(demo, "data.tasks.rewards").task_rewards() == demo.task_rewards() == {"sums": ["format", "correctness"]}


@pytest.mark.parametrize("reads", ["rolout", "model.lorra", "-model.lorra", "stages.rewards.weight.more stages.weights"])
def test_a_setting_that_does_not_exist_is_refused(demo, reads):
    with pytest.raises(AttributeError, match="has no setting"):
        view(demo, reads)


@pytest.mark.parametrize(
    ("reads", "counts"), [("seed", False), ("rollout", True), ("rollout.temperature", True), ("rollout.top_p", False)]
)
def test_only_what_is_declared_counts_in_a_key(demo, reads, counts):
    other = demo.model_copy(update={"rollout": demo.rollout.model_copy(update={"temperature": 0.5})})
    keys = [content_key("s", (), {"config": view(config, reads)}) for config in (demo, other)]
    assert (keys[0] != keys[1]) == counts


def test_a_child_process_reads_what_is_left_out_as_its_default(demo, tmp_path):
    changed = demo.model_copy(update={"model": demo.model.model_copy(update={"gradient_checkpointing": True})})
    seen = view(changed, "model -model.gradient_checkpointing rollout interaction completion seed")
    spec = SampleSpec.of(seen, ModelRef(path="m"), tmp_path / "rows", demo.resources, num_samples=2)
    spec.save(tmp_path / "spec.json")
    assert not SampleSpec.load(tmp_path / "spec.json").model.gradient_checkpointing


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.body.__name__)
def test_every_step_declares_settings_that_exist(demo, step):
    assert isinstance(step, Step)
    view(demo, step.reads)


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

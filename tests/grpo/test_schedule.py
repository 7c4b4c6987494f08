from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from grpo_tasks.grpo.learner import make_optimizer, make_scheduler
from grpo_tasks.grpo.rounds import Mixture, PromptSchedule
from schemas.config.data import TaskConfig
from schemas.config.stage import StageConfig


@given(num=st.integers(1, 40), per=st.integers(1, 12), seed=st.integers(0, 1000))
def test_every_prompt_is_used_once_an_epoch(num, per, seed):
    schedule = PromptSchedule(num, per, seed)
    order = [prompt for rollout in range(2 * num) for prompt in schedule.prompts_of(rollout)]
    for epoch in range(len(order) // num):
        assert Counter(order[epoch * num : (epoch + 1) * num]) == Counter(range(num))


def test_the_order_depends_on_the_seed_and_changes_each_epoch():
    first = PromptSchedule(50, 50, 1)
    assert first.prompts_of(0) != first.prompts_of(1)
    assert first.prompts_of(0) != PromptSchedule(50, 50, 2).prompts_of(0)
    assert first.prompts_of(0) == PromptSchedule(50, 50, 1).prompts_of(0)


def test_epochs_become_updates():
    stage = StageConfig(name="s", rewards=["format"], num_generations=4, per_device_train_batch_size=8, num_train_epochs=2)
    assert stage.num_updates(num_prompts=11) == 11
    again = stage.model_copy(update={"num_iterations": 3})
    assert again.num_updates(num_prompts=11) == 33


@pytest.mark.parametrize(("kind", "wanted"), [("linear", [0, 0.5, 1, 0.5]), ("constant_with_warmup", [0, 0.5, 1, 1])])
def test_learning_rate_warms_up_and_follows_its_schedule(kind, wanted):
    stage = StageConfig(name="s", rewards=["format"], learning_rate=1.0, lr_scheduler_type=kind, warmup_steps=2)
    optimizer = make_optimizer(stage, [torch.nn.Parameter(torch.zeros(1))])
    scheduler = make_scheduler(stage, optimizer, updates=4)
    rates = []
    for _ in range(4):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(wanted)


@pytest.mark.parametrize(("device", "fused"), [("cuda", True), ("cpu", False)])
def test_adamw_is_fused_on_a_card_and_exact_on_a_cpu(device, fused):
    with FakeTensorMode():
        optimizer = make_optimizer(StageConfig(name="s", rewards=["format"]), [torch.nn.Parameter(torch.zeros(3, device=device))])
    assert [(group["fused"], group["foreach"]) for group in optimizer.param_groups] == [(fused, None)]


def mixed(weights, sizes, per, seed=3):
    names = [name for name, size in sizes.items() for _ in range(size)]
    settings = {name: TaskConfig(weight=weight) for name, weight in weights.items()}
    return names, PromptSchedule(len(names), per, seed, Mixture.of(names, settings))


@given(
    weights=st.lists(st.floats(0.1, 50), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    per=st.integers(1, 12),
    rollout=st.integers(0, 2000),
)
def test_a_mixture_gives_each_task_its_share_of_any_run_of_rollouts(weights, sizes, per, rollout):
    shares = {f"t{index}": weight for index, weight in enumerate(weights)}
    names, schedule = mixed(shares, dict(zip(shares, sizes, strict=False)), per)
    drawn = [names[row] for number in range(rollout, rollout + 5) for row in schedule.prompts_of(number)]
    assert len(drawn) == 5 * per
    for name, weight in shares.items():
        # Each end of the run rounds by less than one prompt for each task.
        assert abs(drawn.count(name) - 5 * per * weight / sum(weights)) <= len(weights) + 1


def test_a_resumed_mixture_is_the_same_and_uses_each_row_once():
    names, schedule = mixed({"a": 1.0, "b": 3.0}, {"a": 5, "b": 7}, 4)
    turns = schedule.mixture.turns(0, 400)
    assert all(schedule.mixture.turns(start, start + 4) == turns[start : start + 4] for start in range(396))
    rows = [row for number in range(100) for row in schedule.prompts_of(number)]
    assert [names[row] for row in rows[:4]].count("b") == 3
    for name, size in (("a", 5), ("b", 7)):
        own = [row for row in rows if names[row] == name]
        assert all(len(set(own[start : start + size])) == size for start in range(0, len(own) - size, size))
        assert own[:size] != own[size : 2 * size]
    _, other = mixed({"a": 1.0, "b": 3.0}, {"a": 5, "b": 7}, 4, seed=4)
    assert rows[:40] != [row for number in range(10) for row in other.prompts_of(number)]


def test_without_settings_or_with_one_task_rows_have_the_same_chance():
    assert Mixture.of(["a", "b"], {}) is None
    assert Mixture.of(["a", "a"], {"a": TaskConfig(weight=3.0)}) is None
    tasks = Mixture.of(["a", "", "a"], {"a": TaskConfig(weight=3.0)}).tasks
    assert {task.name: task.weight for task in tasks} == {"": 1.0, "a": 3.0}

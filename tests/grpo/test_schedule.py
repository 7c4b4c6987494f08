from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.grpo.schedule import PromptSchedule, make_optimizer, make_scheduler, num_updates
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
    assert num_updates(stage, num_prompts=11) == 11
    again = stage.model_copy(update={"num_iterations": 3})
    assert num_updates(again, num_prompts=11) == 33


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

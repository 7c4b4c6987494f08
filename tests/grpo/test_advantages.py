import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grpo_tasks.grpo.advantages import STD_FLOOR, advantages

rewards_of_groups = arrays(np.float64, (3, 4), elements=st.floats(-5, 5, width=32))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@given(grouped=rewards_of_groups)
def test_advantages_equal_the_textbook_formula(scale, grouped):
    found = advantages(torch.tensor(grouped.ravel()), group_size=4, scale=scale)
    flat = grouped.ravel()
    batch_mean = sum(flat) / 12
    batch_std = math.sqrt(sum((r - batch_mean) ** 2 for r in flat) / 11)
    for index, group in enumerate(grouped):
        mean = sum(group) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / 3)
        divisor = {"group": std + STD_FLOOR, "batch": batch_std + STD_FLOOR, "none": 1.0}[scale]
        for k, reward in enumerate(group):
            wanted = 0.0 if found.dead[index] else (reward - mean) / divisor
            assert found.values[4 * index + k].item() == pytest.approx(wanted, rel=1e-6, abs=1e-7)


@given(value=st.floats(-1e3, 1e3), scale=st.sampled_from(["group", "batch", "none"]))
def test_tied_groups_are_exactly_zero_whatever_the_value(value, scale):
    rewards = torch.tensor([value] * 5 + [0.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float32)
    found = advantages(rewards, group_size=5, scale=scale)
    assert found.dead.tolist() == [True, False]
    assert (found.values[:5] == 0).all()
    assert found.group_std[0] == 0


def test_a_nearly_tied_group_is_not_blown_up_by_its_tiny_std():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.3], dtype=torch.float64)
    assert (advantages(rewards, group_size=4, scale="group").values == 0).all()

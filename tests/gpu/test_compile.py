"""torch's compiler takes longest, and needs a C compiler: it comes last in deploy/gpu-check.sh, in a process of its own."""

import pytest

from grpo_tasks.policy.load import compile_layers
from tests.gpu.conftest import on_device
from tests.gpu.test_passes import assert_same, batch_on, policy_of, results


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler reads it
def test_compiled_layers_give_the_same_numbers(device):
    policy = policy_of("qwen2")
    del policy.get_base_model().model.layers[1:]
    on_device(policy.to(device))
    wanted = results(policy, batch_on(device))
    compile_layers(policy)
    assert_same(results(policy, batch_on(device)), wanted, 1e-3)

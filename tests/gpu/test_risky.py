"""What may break the process on a card: it runs last, and in a process of its own."""

import pytest
import torch

from grpo_tasks.policy.load import compile_layers
from grpo_tasks.rollout.graphs import EAGER_STEPS, CudaCapture, Graphs
from tests.gpu.test_passes import assert_same, batch_on, policy_of, results


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler reads it
def test_compiled_layers_give_the_same_numbers(device):
    policy = policy_of("qwen2")
    del policy.get_base_model().model.layers[1:]
    policy.to(device)
    wanted = results(policy, batch_on(device))
    compile_layers(policy)
    assert_same(results(policy, batch_on(device)), wanted, 1e-3)


def test_a_step_without_capture_leaves_the_stream_as_it_is(device):
    if device.type != "cuda":
        pytest.skip("only a card captures steps")
    number, stream = torch.ones(4, device=device), torch.cuda.current_stream()
    steps = Graphs(CudaCapture())
    for _ in range(EAGER_STEPS):
        steps.run(lambda: number.sum().item())
    with pytest.warns(UserWarning, match="CUDA graphs cannot be used"):
        steps.run(lambda: number.sum().item())
    assert torch.cuda.current_stream() == stream

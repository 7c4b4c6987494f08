"""What may break its process on a card, so it has one of its own in deploy/gpu-check.sh: a capture that fails."""

import pytest
import torch

from grpo_tasks.rollout.graphs import EAGER_STEPS, CudaCapture, Graphs


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

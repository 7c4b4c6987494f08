"""Where the tests of this folder run. GRPO_TEST_DEVICE=cpu runs them on a CPU, which tests the tests."""

import os
from importlib.util import find_spec

import pytest
import torch
from accelerate.state import AcceleratorState

# Without pyarrow there are no stages to test.
if find_spec("pyarrow"):
    from tests.grpo.conftest import stages  # noqa: F401 - a fixture

DEVICE = os.environ.get("GRPO_TEST_DEVICE", "cuda")


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
            if DEVICE == "cuda" and not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def forget_device():
    """accelerate keeps its device for the whole process: the Accelerator of one test would be that of all later ones."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def own_accelerator():
    forget_device()


def on_device(model):
    """The model, all of whose weights are where these tests claim to compute."""
    assert {parameter.device.type for parameter in model.parameters()} == {DEVICE}
    return model


@pytest.fixture(autouse=True)
def exact():
    """No TF32: float32 is compared with a CPU's."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture
def device():
    return torch.device(DEVICE)

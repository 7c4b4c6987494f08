"""How long host and GPU wait for each other, with a GPU whose clock a test counts."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_tasks.grpo.measure import Waits

LAUNCH_S = 0.25


class CountedGpu:
    """Computes what is launched in order; the host launches it and continues."""

    def __init__(self):
        self.host = self.done = self.busy = 0.0

    def launch(self, seconds):
        self.done = max(self.host, self.done) + seconds
        self.busy += seconds
        self.host += LAUNCH_S

    def event(self, *, enable_timing):
        assert enable_timing
        return Mark(self)


class Mark:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = max(self.gpu.host, self.gpu.done)

    def synchronize(self):
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 9), st.floats(LAUNCH_S, 9)), min_size=1, max_size=6))
def test_a_gpu_is_idle_while_it_has_nothing_to_compute(steps):
    gpu, waits = CountedGpu(), Waits(torch.device("cuda"))

    def microbatches():
        for build, compute in steps:
            gpu.host += build
            yield compute

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", gpu.event)
        for compute in waits.as_built(microbatches()):
            gpu.launch(compute)
        found = waits.figures()
    assert found["update/gpu_idle_time"] == pytest.approx(gpu.done - gpu.busy, abs=1e-9)
    # A second reading is of another update.
    assert waits.figures() == {"update/gpu_idle_time": 0.0, "update/host_wait_time": 0.0}


def test_the_host_waits_where_it_reads_numbers(monkeypatch):
    clock = iter([10.0, 12.5, 20.0, 20.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    waits = Waits(torch.device("cuda"))
    for _ in range(2):
        with waits.for_numbers():
            pass
    assert waits.figures() == {"update/gpu_idle_time": 0.0, "update/host_wait_time": 3.0}


def test_a_cpu_does_not_wait_for_itself():
    waits = Waits(torch.device("cpu"))
    with waits.for_numbers():
        assert list(waits.as_built([1, 2])) == [1, 2]
    assert waits.figures() == {}

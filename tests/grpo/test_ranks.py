"""The ranks of one stage."""

from functools import partial

import pytest
import torch
from accelerate import Accelerator

from grpo_tasks.grpo.measure import UpdateFigures
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.stage.stage_dir import StageSpec
from tests.forked import in_processes
from tests.gpu.conftest import forget_device


def show(spec, limit_s):
    ranks = Ranks.of(StageSpec.load(spec), torch.device("cpu"))
    group = torch.distributed.distributed_c10d._get_default_group()
    assert torch.distributed.get_world_size() == 2
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == limit_s
    ranks.wait()
    ranks.accelerator.end_training()


@pytest.mark.long
def test_the_time_limit_of_the_config_is_that_of_the_process_group(stages):
    directory = stages.write("two", resources={"num_processes": 2, "distributed_timeout_minutes": 47.5})
    in_processes(partial(show, directory.spec, 2850.0), 2)


@pytest.fixture
def card_for_accelerate(monkeypatch):
    """accelerate takes a card for there, and knows no device yet."""
    forget_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield
    forget_device()


@pytest.mark.usefixtures("card_for_accelerate")
def test_no_stage_is_trained_on_the_device_of_an_earlier_accelerator(stages):
    spec = StageSpec.load(stages.write().spec)
    Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match="accelerate computes on cpu, and cuda was asked for"):
        Ranks.of(spec, torch.device("cuda"))
    # As tests/gpu does before each test.
    forget_device()
    assert Ranks.of(spec, torch.device("cuda")).accelerator.device.type == "cuda"


def over_both(mine, other):
    class Both(Ranks):
        count = 2

        def gather(self, item):
            return [item, other]

    return mine.over(Both(Accelerator(cpu=True)))


def test_a_rank_without_microbatches_erases_no_figures_of_the_others():
    idle, busy = UpdateFigures(), UpdateFigures(tokens=4, correction=3.0, hits=2.0, mismatch=1.0)
    for found in (over_both(idle, busy), over_both(busy, idle)):
        assert (found.tokens, found.correction, found.hits, found.mismatch) == (4, 3.0, 2.0, 1.0)
    assert over_both(idle, UpdateFigures()).correction is None
    # The difference to the sampler is only known if every rank knows it.
    assert over_both(busy, UpdateFigures(mismatch=None)).mismatch is None

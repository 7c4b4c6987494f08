"""The ranks of one stage."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from grpo_tasks.grpo.measure import UpdateFigures
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.sampler import check_copy_fits
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.planning.memory_plan import RESERVE
from grpo_tasks.policy.load import load_base
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import ModelError
from tests.forked import in_processes
from tests.gpu.conftest import forget_device
from tests.in_process import suite_of


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


def take_turns(log):
    ranks = Ranks.of(StageSpec.load(log.with_name("spec.json")), torch.device("cpu"))

    def make():
        with log.open("a") as file:
            file.write("in ")
            file.flush()
            time.sleep(0.3)
            file.write("out ")
        return ranks.rank

    assert ranks.in_turn(make) == ranks.rank
    ranks.accelerator.end_training()


@pytest.mark.long
def test_the_host_loads_a_sharded_model_for_one_rank_after_the_other(stages, tmp_path):
    stages.write("two", resources={"num_processes": 2}).spec.rename(tmp_path / "spec.json")
    in_processes(partial(take_turns, tmp_path / "log"), 2)
    assert (tmp_path / "log").read_text() == "in out in out "


def test_a_copy_to_sample_from_that_does_not_fit_is_refused_early(stages, monkeypatch):
    directory = stages.write("two", resources={"num_processes": 2, "fsdp": True})
    spec = StageSpec.load(directory.spec)
    model = load_base(spec.start, spec.model, device=torch.device("cpu"))
    whole = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    # A copy and half of the weights, beside what a plan leaves free, are not enough: there are keys and values, too.
    for memory in (0.0, RESERVE + 1.5 * whole):
        with pytest.raises(ModelError, match="complete copy of the model on each card") as caught:
            check_copy_fits(spec, 40, torch.device("cpu"), memory)
        assert "base_urls" in caught.value.fix
    check_copy_fits(spec, 40, torch.device("cpu"), RESERVE + 500.0 * whole)
    check_copy_fits(spec, 40, torch.device("cpu"))
    # The stage is refused before anything is loaded.
    monkeypatch.setattr(Ranks, "count", 2)
    monkeypatch.setattr("grpo_tasks.grpo.sampler.device_memory", lambda _: SimpleNamespace(total=1.5 * whole))
    monkeypatch.setattr("grpo_tasks.grpo.policies.trainable_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    with suite_of(spec) as suite, pytest.raises(ModelError, match="complete copy"):
        Trainer(directory, suite)


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

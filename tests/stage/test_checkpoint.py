import shutil
from types import SimpleNamespace

import pytest
import torch

from grpo_tasks.grpo.learner import make_optimizer, make_scheduler
from grpo_tasks.stage.checkpoint import MANIFEST, Checkpoints, TrainingState, is_intact
from grpo_tasks.stage.guards import Guards
from grpo_tasks.stage.journal import Counters, Events
from grpo_tasks.stage.stage_dir import StageDir
from schemas.config.guards import GuardsConfig
from schemas.config.stage import StageConfig


@pytest.fixture
def make_state(base_ref, tokenizer):
    from grpo_tasks.policy.load import trainable_policy
    from schemas.config.model import ModelConfig

    def make(lora=True, optim="adamw_torch"):
        config = ModelConfig() if lora else ModelConfig(lora=None)
        model = trainable_policy(base_ref, config, device=torch.device("cpu"), seed=3)
        stage = StageConfig(name="s", rewards=["format"], learning_rate=1e-2, warmup_steps=2, optim=optim)
        optimizer = make_optimizer(stage, [p for p in model.parameters() if p.requires_grad])
        return TrainingState(model, tokenizer, optimizer, make_scheduler(stage, optimizer, updates=10))

    return make


@pytest.fixture
def stage(tmp_path, make_state):
    """The checkpoints of a stage whose reward functions have no state."""

    def make(*given, keep=5):
        directory, suite = StageDir(tmp_path), SimpleNamespace(state=dict, restore=lambda _: None)
        guards, events = Guards(GuardsConfig()), Events(directory.events)
        return Checkpoints(directory, make_state(*given), Counters(), guards, suite, events, keep)

    return make


def update(checkpoints):
    """An update and its checkpoint."""
    state = checkpoints.state
    # The number of the update decides every draw, as in a stage.
    torch.manual_seed(state.scheduler.last_epoch)
    ids = torch.randint(0, 300, (2, 12))
    state.optimizer.zero_grad()
    state.model(input_ids=ids, labels=ids).loss.backward()
    state.optimizer.step()
    state.scheduler.step()
    checkpoints.counters.step += 1
    checkpoints.save()


def weights(checkpoints):
    return {name: p.detach().clone() for name, p in checkpoints.state.model.named_parameters() if p.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adamw_8bit"])
@pytest.mark.parametrize("lora", [True, False])
def test_resuming_from_a_checkpoint_equals_never_having_stopped(tmp_path, stage, lora, optim):
    whole = stage(lora, optim, keep=6)
    for _ in range(6):
        update(whole)
    for later in (4, 5, 6):
        shutil.rmtree(tmp_path / f"checkpoints/step-{later:06d}", ignore_errors=True)
    again = stage(lora, optim)
    again.restore()
    assert (again.counters.step, again.counters.resumed) == (3, 1)
    for _ in range(3):
        update(again)
    wanted = weights(whole)
    assert all(torch.equal(value, wanted[name]) for name, value in weights(again).items())


def kept(tmp_path):
    return sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").iterdir())


def test_a_damaged_or_incomplete_checkpoint_is_skipped_for_the_one_before(tmp_path, stage):
    whole = stage(keep=3)
    for _ in range(4):
        update(whole)
    assert kept(tmp_path) == [2, 3, 4]
    (tmp_path / "checkpoints/step-000004" / MANIFEST).unlink()
    damaged = tmp_path / "checkpoints/step-000003"
    content = bytearray((damaged / "optimizer.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "optimizer.safetensors").write_bytes(content)
    assert not is_intact(damaged)
    again = stage()
    again.restore()
    assert again.counters.step == 2


@pytest.mark.parametrize("lora", [True, False])
def test_updates_and_roll_backs_leave_the_weights_at_their_addresses(stage, lora):
    # CUDA graphs of the local engine read these addresses, or those of a copy that is written in place.
    checkpoints = stage(lora)
    model, optimizer = checkpoints.state.model, checkpoints.state.optimizer

    def addresses():
        return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]

    before, given = addresses(), [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    for _ in range(2):
        update(checkpoints)
    checkpoints.roll_back(to=1)
    update(checkpoints)
    assert addresses() == before
    assert [id(parameter) for group in optimizer.param_groups for parameter in group["params"]] == given


def test_a_roll_back_deletes_the_checkpoints_after_it(tmp_path, stage):
    checkpoints = stage()
    for step in (1, 2, 3):
        update(checkpoints)
        if step == 2:
            good = weights(checkpoints)
    assert checkpoints.roll_back(to=2) == 2
    assert all(torch.equal(value, good[name]) for name, value in weights(checkpoints).items())
    assert kept(tmp_path) == [1, 2]
    assert (checkpoints.counters.step, checkpoints.guards.since, checkpoints.guards.rollbacks) == (3, 3, 1)

import pytest
import torch

from grpo_tasks.grpo.schedule import make_optimizer, make_scheduler
from grpo_tasks.stage.checkpoint import MANIFEST, TrainingState, is_intact, load_checkpoint, roll_back, save_checkpoint
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


def update(state):
    # The number of the update decides every draw, as in a stage.
    torch.manual_seed(state.scheduler.last_epoch)
    ids = torch.randint(0, 300, (2, 12))
    state.optimizer.zero_grad()
    state.model(input_ids=ids, labels=ids).loss.backward()
    state.optimizer.step()
    state.scheduler.step()


def weights(state):
    return {name: p.detach().clone() for name, p in state.model.named_parameters() if p.requires_grad}


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adamw_8bit"])
@pytest.mark.parametrize("lora", [True, False])
def test_resuming_from_a_checkpoint_equals_never_having_stopped(tmp_path, make_state, lora, optim):
    state = make_state(lora, optim)
    for _ in range(3):
        update(state)
    save_checkpoint(tmp_path, 3, state, {"weight": 1.2}, keep=2)
    for _ in range(3):
        update(state)
    again = make_state(lora, optim)
    assert load_checkpoint(tmp_path, again) == (3, {"weight": 1.2})
    for _ in range(3):
        update(again)
    wanted = weights(state)
    assert all(torch.equal(value, wanted[name]) for name, value in weights(again).items())


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, make_state):
    state = make_state()
    for step in (1, 2):
        update(state)
        save_checkpoint(tmp_path, step, state, {}, keep=5)
    target = tmp_path / "step-000002" / "optimizer.safetensors"
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    assert not is_intact(tmp_path / "step-000002")
    assert load_checkpoint(tmp_path, make_state())[0] == 1


def test_only_the_newest_are_kept_and_an_incomplete_one_is_never_loaded(tmp_path, make_state):
    state = make_state()
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, state, {}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    (tmp_path / "step-000003" / MANIFEST).unlink()
    assert load_checkpoint(tmp_path, make_state())[0] == 2


def test_a_roll_back_deletes_the_checkpoints_after_it(tmp_path, make_state):
    state = make_state()
    for step in (1, 2, 3):
        update(state)
        save_checkpoint(tmp_path, step, state, {}, keep=5)
        if step == 2:
            good = weights(state)
    assert roll_back(tmp_path, state, to=2) == 2
    assert all(torch.equal(value, good[name]) for name, value in weights(state).items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]

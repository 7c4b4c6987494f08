"""16 bits: the loss of float16 is scaled, so that no gradient is lost, and a sampler in 16 bits follows the trainer."""

from dataclasses import replace

import pytest
import torch

from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.run import RunConfig
from schemas.errors import NotFiniteError
from tests.benchmarks.mismatch import mismatch
from tests.grpo.conftest import events, journal
from tests.in_process import suite_of

HALF = {"dtype": "float16"}
SHORT = {"model": HALF, "length": 16, "skip_dead_groups": False}
"""A CPU is slow in float16, hence short completions; most of their groups are dead."""
MANY_TOKENS = 262_144


def prepared(stages, name, **settings):
    """A trainer before its first update."""
    directory = stages.write(name, **{"max_grad_norm": 0.0, "stage_rewards": ["incremental_format"]} | settings)
    spec = StageSpec.load(directory.spec)
    return stages.trainer(directory, suite_of(spec))


def gradient(trainer, microbatches):
    """Gradient of the adapter's second matrices (the first have none at the start), in an update of MANY_TOKENS tokens."""
    tokens = sum(int(microbatch.tokens.completion_mask.sum()) for microbatch in microbatches)

    # The weights that the loss of so large an update would give these tokens.
    def small_of(rows):
        microbatch = microbatches.build(rows)
        return replace(microbatch, weights=microbatch.weights * tokens / MANY_TOKENS)

    small = replace(microbatches, build=small_of)
    figures = trainer.learner.update(small, None)
    norm = sum(p.grad.double().square().sum() for p in trainer.learner.model.parameters() if p.grad is not None).sqrt()
    assert figures.grad_norm == pytest.approx(norm.item(), rel=1e-3)
    found = [p.grad.flatten() for name, p in trainer.learner.model.named_parameters() if "lora_B" in name]
    return torch.cat(found).double()


def test_the_gradient_of_an_update_of_many_tokens_is_that_of_float32(stages):
    exact = prepared(stages, "exact")
    with exact.suite:
        [(microbatches, _)] = exact._microbatches(exact._collect())
    wanted = gradient(exact, microbatches)
    scaled = prepared(stages, "scaled", model=HALF)
    unscaled = prepared(stages, "unscaled", model=HALF)
    unscaled.ranks.accelerator.scaler = None
    errors = {
        name: float((gradient(one, microbatches) - wanted).norm() / wanted.norm())
        for name, one in [("s", scaled), ("u", unscaled)]
    }
    assert errors["s"] < 0.02
    assert errors["u"] > 0.1


def poisoned(trainer, updates):
    """Let the gradients of these updates overflow, as a scale that is too high makes them."""
    accumulate, calls = type(trainer.learner)._accumulate, []

    def overflow(learner, *arguments):
        accumulate(learner, *arguments)
        if trainer.step + 1 in updates:
            calls.append(1)
            learner._trained[0].grad.fill_(float("inf"))

    return overflow


def run(stages, directory, monkeypatch, *, overflows, until=None, scale=None):
    from grpo_tasks.grpo.learner import Learner

    spec = StageSpec.load(directory.spec)
    with monkeypatch.context() as patch, suite_of(spec) as suite:
        trainer = stages.trainer(directory, suite)
        patch.setattr(Learner, "_accumulate", poisoned(trainer, overflows))
        trainer.updates = until or trainer.updates
        if scale is not None:
            trainer.learner.scaler.update(scale)
        return trainer.train()


@pytest.mark.slow
def test_an_overflow_skips_the_step_halves_the_scale_and_survives_a_resume(stages, monkeypatch):
    settings = SHORT | {"max_steps": 5, "save_steps": 2, "lr_scheduler_type": "constant"}
    uninterrupted = stages.write("uninterrupted", **settings)
    wanted = run(stages, uninterrupted, monkeypatch, overflows=(2, 4))
    lines = journal(uninterrupted)
    assert [line["skipped_step"] for line in lines] == [0, 1, 0, 1, 0]
    assert [line["loss_scale"] for line in lines] == [65536, 65536, 32768, 32768, 16384]
    assert ["grad_norm" in line for line in lines] == [True, False, True, False, True]
    stopped = stages.write("stopped", **settings)
    run(stages, stopped, monkeypatch, overflows=(2, 4), until=4)
    stopped.result.unlink()
    again = run(stages, stopped, monkeypatch, overflows=(2, 4))
    assert (again.resumed, again.sha256) == (1, wanted.sha256)
    assert [line["loss_scale"] for line in journal(stopped)] == [line["loss_scale"] for line in lines]


def test_a_gradient_that_is_never_finite_stops_the_stage_in_the_end(stages, monkeypatch):
    directory = stages.write("broken", **SHORT, max_steps=40)
    with pytest.raises(NotFiniteError, match="gradient norm"):
        run(stages, directory, monkeypatch, overflows=range(1, 41), scale=2.0)
    assert [line.get("loss_scale") for line in journal(directory)] == [2.0, None]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_can_be_rolled_back_in_float16(stages, monkeypatch):
    from grpo_tasks.grpo import learner as module

    policy_loss, calls = module.policy_loss, []

    def broken(*arguments):
        calls.append(1)
        out = policy_loss(*arguments)
        return replace(out, loss=out.loss * float("nan")) if len(calls) == 2 else out

    monkeypatch.setattr(module, "policy_loss", broken)
    result, directory = stages.train("back", **SHORT, max_steps=4, save_steps=1, guards={"not_finite": "rollback"})
    assert result.steps == 4
    assert ["loss" in line for line in journal(directory)] == [True, False, True, True]
    assert [event["event"] for event in events(directory)] == ["not_finite", "rolled_back"]


def test_float16_is_refused_where_gradients_cannot_be_scaled():
    tree = {
        "data": {"train": [{"path": "embedded:arithmetic_train.jsonl"}]},
        "stages": [{"name": "s", "rewards": ["format"]}],
        "model": HALF,
        "resources": {"fsdp": True, "num_processes": 2},
    }
    with pytest.raises(
        ValueError, match=r"resources\.fsdp does not support the loss scaling of float16; fix: model\.dtype: bfloat16"
    ):
        RunConfig.model_validate(tree)


@pytest.mark.slow
def test_after_small_updates_a_16_bit_sampler_has_the_trained_policy():
    found = mismatch(updates=6)
    # Nearly all that the policy has moved reaches the sampler; folded into the weights, most of it would be lost.
    assert found.sampler < 0.1 * found.moved
    assert found.folded > 0.3 * found.moved
    assert max(found.measured) < 0.05

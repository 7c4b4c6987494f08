"""Guards of stages that really train, what a roll back leaves, and the KL that a guard judges at beta 0."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from grpo_tasks.grpo.learner import Learner
from grpo_tasks.policy.load import load_policy
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import TrainingError
from schemas.results.model import ModelRef
from tests.grpo.conftest import events, journal
from tests.in_process import suite_of

# Dead groups are computed, so that the KL of a policy that fell apart is known.
WILD = {"skip_dead_groups": False, "max_steps": 40, "beta": 0.001, "learning_rate": 0.05, "save_steps": 5, "save_total_limit": 4}


@pytest.mark.slow
def test_a_roll_back_continues_from_good_weights_also_after_a_kill(stages):
    # It blows up within the first dozen updates; more of them would show nothing new.
    guards = {"kl_blow_up": "rollback", "rollback_learning_rate": 0.02}
    settings = WILD | {"max_steps": 16, "lr_scheduler_type": "constant", "guards": guards}
    uninterrupted, directory = stages.train("back", **settings)
    lines = journal(directory)
    assert len(lines) == uninterrupted.steps == 16
    [back] = [event for event in events(directory) if event["event"] == "rolled_back"]
    before, after = lines[: back["step"]], lines[back["step"] :]
    assert {line["learning_rate"] for line in before} == {0.05}
    assert all(line["learning_rate"] == pytest.approx(0.001) for line in after)
    assert after[0]["kl"] < 0.5 < before[-1]["kl"]
    # What a kill before the roll back leaves: the checkpoints up to then.
    killed = stages.write("killed", **settings)
    stages.resume(killed, until=back["step"] - 1)
    shutil.rmtree(killed.checkpoints / f"step-{back['step'] - 1:06d}")
    again = stages.resume(killed)
    assert (again.resumed, again.sha256) == (1, uninterrupted.sha256)
    assert [event["event"] for event in events(killed)].count("rolled_back") == 1


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_moves_no_weight(stages, monkeypatch):
    accumulate, calls = Learner._accumulate, []

    def poisoned(self, *arguments):
        accumulate(self, *arguments)
        calls.append(1)
        if len(calls) == 3:
            self._trained[0].grad.fill_(float("nan"))

    monkeypatch.setattr(Learner, "_accumulate", poisoned)
    settings = {"max_steps": 6, "save_steps": 1, "save_total_limit": 6}
    with pytest.raises(TrainingError, match="not finite"):
        stages.train("stopped", **settings)
    calls.clear()
    result, directory = stages.train("back", **settings, guards={"not_finite": "rollback"})
    assert result.steps == len(journal(directory)) == 6
    assert [event["event"] for event in events(directory)] == ["not_finite", "rolled_back"]
    assert "loss" not in journal(directory)[2]


@pytest.mark.slow
def test_a_stage_out_of_time_resumes_to_the_same_end(stages):
    settings = {"max_steps": 4, "num_iterations": 2, "save_steps": 100}
    uninterrupted, _ = stages.train("uninterrupted", **settings)
    directory = stages.write("late", **settings, resources={"max_hours": 1e-6})
    with pytest.raises(TrainingError, match="stopped at update 2"):
        stages.resume(directory)
    assert (directory.checkpoints / "step-000002").exists()
    assert stages.resume(directory).sha256 == uninterrupted.sha256


# Moves far enough for the KL to be more than rounding.
QUICK = {"max_steps": 4, "learning_rate": 5e-3, "num_iterations": 2, "stage_rewards": ["incremental_format"]}


def plain_logps(model, prompt, completion, temperature):
    """log-probabilities of the completion's tokens from one unpadded row and a plain log_softmax over all logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, dim=-1)[torch.arange(len(completion)), torch.tensor(completion)]


def brute_force_kl(policy, reference, current, temperature):
    """Mean over the tokens of all live groups of exp(x) - x - 1, x = log p(reference) - log p(policy)."""
    rollout, total, tokens = current.scored.rollout, 0.0, 0
    policy.eval()
    for index, completion in enumerate(rollout.completions):
        group = index // rollout.group_size
        if current.advantages.dead[group]:
            continue
        ids, prompt = completion.token_ids, rollout.prompts[group]
        x = plain_logps(reference, prompt, ids, temperature) - plain_logps(policy, prompt, ids, temperature)
        total, tokens = total + (x.exp() - x - 1).sum().item(), tokens + len(ids)
    policy.train()
    return total / tokens


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["base", "stage_start"])
def test_the_kl_is_that_of_a_plain_log_softmax_over_unpadded_rows(stages, reference):
    first, _ = stages.train("first", **QUICK)
    settings = QUICK | {"kl_every_steps": 1, "reference": reference, "num_iterations": 1}
    directory = stages.write("second", **settings, start=first.model, rollout={"temperature": 0.8})
    spec = StageSpec.load(directory.spec)
    with suite_of(spec) as suite:
        trainer = stages.trainer(directory, suite)
        trainer.updates = 2
        trainer.train()
        current = trainer._collect()
        known = load_policy(
            first.model if reference == "stage_start" else ModelRef(path="embedded:base"), spec.model, device=torch.device("cpu")
        )
        assert not current.advantages.dead.all()
        wanted = brute_force_kl(trainer.learner.model, known, current, 0.8)
        measured = trainer._update(trainer._microbatches(current)[0])[0]["kl"]
    assert wanted > 1e-3
    assert measured == pytest.approx(wanted, rel=1e-3)


@pytest.mark.slow
def test_measuring_the_kl_does_not_change_the_weights(stages):
    settings = QUICK | {"model": {"lora": {"lora_dropout": 0.1}}}
    results = [stages.train(f"every-{every}", **settings, kl_every_steps=every)[0].sha256 for every in (0, 3)]
    assert results[0] == results[1]


def steps_with_kl(directory):
    return [step for step, metrics in enumerate(journal(directory), start=1) if "kl" in metrics]


@pytest.mark.slow
def test_the_kl_is_measured_regularly_also_after_a_resume(stages):
    settings = QUICK | {"max_steps": 8, "kl_every_steps": 3, "save_steps": 2}
    _, uninterrupted = stages.train("uninterrupted", **settings)
    measured = steps_with_kl(uninterrupted)
    assert measured[0] == 1
    assert all(later - earlier >= 3 for earlier, later in pairwise(measured))
    directory = stages.write("stopped", **settings)
    stages.resume(directory, until=4)
    # What a kill after two more updates leaves: their lines, and no checkpoint of them.
    lines = uninterrupted.journal.read_text().splitlines(keepends=True)
    directory.journal.write_text("".join(lines[:6]))
    stages.resume(directory)
    assert [line.get("kl") for line in journal(directory)] == [line.get("kl") for line in journal(uninterrupted)]


def test_an_update_without_a_live_group_leaves_the_measurement_to_the_next(stages, monkeypatch):
    from grpo_tasks.grpo import trainer as module

    make_microbatches, calls = module.make_microbatches, []

    def none_at_first(*arguments, **settings):
        calls.append(1)
        made = make_microbatches(*arguments, **settings)
        return replace(made, rows=[]) if len(calls) == 1 else made

    monkeypatch.setattr(module, "make_microbatches", none_at_first)
    _, directory = stages.train("dead", **QUICK | {"num_iterations": 1}, kl_every_steps=3)
    assert steps_with_kl(directory)[0] == 2


@pytest.mark.slow
def test_the_kl_guard_stops_a_blow_up_at_beta_0(stages):
    with pytest.raises(TrainingError, match=r"kl_blow_up: kl is .* above 0\.3 over the last 10 updates"):
        stages.train(
            "stopped", **WILD | {"beta": 0.0}, kl_every_steps=2, guards={"kl_blow_up": {"action": "stop", "threshold": 0.3}}
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "why"),
    [({"kl_every_steps": 0}, "kl_every_steps is 0"), ({"model": {"lora": None}, "learning_rate": 1e-6}, "no reference policy")],
    ids=str,
)
def test_a_kl_guard_that_cannot_fire_reports_it_once(stages, settings, why):
    directory = stages.write("off", **{"max_steps": 2, "save_steps": 1} | settings)
    for updates in (1, 2):
        stages.resume(directory, until=updates)
    [off] = [event for event in events(directory) if event["event"] == "guard_off"]
    assert (off["step"], why in off["detail"], "kl_blow_up" in off["detail"]) == (0, True, True)
    assert not steps_with_kl(directory)
    assert json.loads(directory.journal.read_text().splitlines()[0])["step"] == 1

"""The KL at beta 0: measured every few updates, equal to a plain reference, without an effect on the training."""

import json
from itertools import pairwise

import pytest
import torch

from grpo_tasks.policy.load import load_policy
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import TrainingError
from schemas.results.model import ModelRef
from tests.grpo.conftest import journal
from tests.grpo.test_guards import WILD, events
from tests.in_process import suite_of

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
@pytest.mark.parametrize("model", [{}, {"lora": {"lora_dropout": 0.1}}], ids=str)
def test_measuring_the_kl_does_not_change_the_weights(stages, model):
    results = {every: stages.train(f"every-{every}", **QUICK, kl_every_steps=every, model=model)[0].sha256 for every in (0, 1, 3)}
    assert len(set(results.values())) == 1


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
    spec = StageSpec.load(directory.spec)
    with suite_of(spec) as suite:
        trainer = stages.trainer(directory, suite)
        trainer.updates = 4
        trainer.train()
    directory.result.unlink()
    # What a kill after two more updates leaves: their lines, and no checkpoint of them.
    lines = uninterrupted.journal.read_text().splitlines(keepends=True)
    directory.journal.write_text("".join(lines[:6]))
    with suite_of(spec) as suite:
        stages.trainer(directory, suite).train()
    assert [line.get("kl") for line in journal(directory)] == [line.get("kl") for line in journal(uninterrupted)]


def test_an_update_without_a_live_group_leaves_the_measurement_to_the_next(stages, monkeypatch):
    from grpo_tasks.grpo import trainer as module

    make_microbatches, calls = module.make_microbatches, []

    def none_at_first(*arguments, **settings):
        calls.append(1)
        return [] if len(calls) == 1 else make_microbatches(*arguments, **settings)

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
    spec = StageSpec.load(directory.spec)
    for updates in (1, 2):
        with suite_of(spec) as suite:
            trainer = stages.trainer(directory, suite)
            trainer.updates = updates
            trainer.train()
        directory.result.unlink()
    [off] = [event for event in events(directory) if event["event"] == "guard_off"]
    assert (off["step"], why in off["detail"], "kl_blow_up" in off["detail"]) == (0, True, True)
    assert not steps_with_kl(directory)
    assert json.loads(directory.journal.read_text().splitlines()[0])["step"] == 1


def test_a_guard_that_is_switched_off_reports_nothing(stages):
    _, directory = stages.train("off", max_steps=1, kl_every_steps=0, guards={"kl_blow_up": "off"})
    assert not events(directory)

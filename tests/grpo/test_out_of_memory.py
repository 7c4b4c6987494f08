"""An update whose passes do not fit into memory, on a CPU that is full above a number of tokens."""

import json
from functools import partial

import pytest
import torch

from grpo_tasks.content.hashes import file_sha256
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.policy.folded_adapter import causal_model, decoder_of
from grpo_tasks.stage.checkpoint import MANIFEST
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import TrainingError
from tests.forked import in_processes
from tests.grpo.conftest import events, journal
from tests.in_process import suite_of

SETTINGS = {"max_grad_norm": 0.0, "skip_dead_groups": False, "learning_rate": 1e-4, "stage_rewards": ["incremental_format"]}
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free. If reserved but unallocated memory is large"


def trainer_of(stages, name, **settings):
    directory = stages.write(name, **SETTINGS | settings)
    spec = StageSpec.load(directory.spec)
    return stages.trainer(directory, suite_of(spec))


def fill_above(trainer, share, where="forward", error=torch.OutOfMemoryError(FULL)):  # noqa: B008
    """Let each pass with more than that share of the first one's tokens run out of memory; returns the tokens that were tried."""
    tried, policies = [], trainer.learner.policies

    def full(_):
        raise error

    def begin(module, given):
        # Neither sampling nor the check of the layout, which come first, are limited.
        if module.training and policies._layout is not None:
            tried.append(given[0].numel())
            if where == "forward" and tried[-1] > share * tried[0]:
                full(None)

    def end(_, __, out):
        if where == "backward" and out.requires_grad and out.shape[1] > share * tried[0]:
            out.register_hook(full)

    causal_model(policies.model).get_input_embeddings().register_forward_pre_hook(begin)
    # The gradient of the first layer's result: by then the other layers have added to theirs.
    decoder_of(policies.model).layers[0].register_forward_hook(end)
    return tried


def sizes(microbatches):
    """Tokens of each pass."""
    return [microbatch.tokens.packed.ids.numel() for microbatch in microbatches]


def gradient(trainer):
    return torch.cat([each.grad.flatten() for each in trainer.learner.model.parameters() if each.requires_grad])


def summed_gradient(trainer, current):
    """Of the mean over tokens of -A log p, completion by completion through transformers' own forward pass."""
    model, rollout = trainer.learner.model, current.scored.rollout
    total = sum(len(completion.token_ids) for completion in rollout.completions)
    for completion, prompt, advantage in zip(
        rollout.completions, rollout.prompt_of, current.advantages.values[:, 0].tolist(), strict=True
    ):
        ids = torch.tensor([[*rollout.prompts[prompt], *completion.token_ids]])
        logps = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        own = logps.gather(1, ids[0, 1:, None])[-len(completion.token_ids) :]
        (-advantage / total * own.sum()).backward()
    found = gradient(trainer)
    trainer.learner.optimizer.zero_grad()
    return found


def assert_near(found, wanted):
    assert wanted.norm() > 0
    assert (found - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_update_that_does_not_fit_has_the_gradient_of_all_completions(stages, where):
    trainer = trainer_of(stages, "s", beta=0.0)
    with trainer.suite:
        current = trainer._collect()
    [(microbatches, old)] = trainer._microbatches(current)
    wanted = summed_gradient(trainer, current)
    halves, _ = microbatches.halved(None)
    quarters, _ = halves.halved(None)
    share = max(sizes(quarters)) / sizes(microbatches)[0]
    assert sizes(halves)[0] > max(sizes(quarters))
    tried = fill_above(trainer, share, where)
    figures = trainer.learner.update(microbatches, old)
    assert_near(gradient(trainer), wanted)
    assert tried == [*sizes(microbatches), *sizes(halves)[:1], *sizes(quarters)]
    assert figures.halvings == 2
    assert figures.tokens == sum(len(completion.token_ids) for completion in current.scored.rollout.completions)
    # What has not fitted once is not tried again.
    del tried[1:]
    assert trainer.learner.update(microbatches, old).halvings == 0
    assert tried[1:] == sizes(quarters)


def test_memory_that_a_library_asks_for_counts_like_that_of_tensors(stages):
    trainer = trainer_of(stages, "s")
    with trainer.suite:
        [update] = trainer._microbatches(trainer._collect())
    fill_above(trainer, 0.8, error=RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert trainer.learner.update(*update).halvings == 1
    fill_above(trainer, 0.0, error=RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        trainer.learner.update(*update)


def test_a_resumed_stage_begins_with_the_passes_that_fit(stages):
    trainer = trainer_of(stages, "s", save_steps=1)
    fill_above(trainer, 0.8)
    trainer.updates = 1
    with trainer.suite:
        trainer.train()
    resumed = Trainer(trainer.dir, trainer.suite)
    assert (resumed.step, resumed.learner.halvings) == (1, 1)
    with resumed.suite:
        [update] = resumed._microbatches(resumed._collect())
    tried = fill_above(resumed, 9.0)
    assert resumed.learner.update(*update).halvings == 0
    assert len(tried) == 2 * len(update[0])
    # As an earlier version wrote it.
    [checkpoint] = trainer.dir.checkpoints.iterdir()
    state = checkpoint / "state.json"
    content = json.loads(state.read_text())
    del content["extra"]["halvings"]
    state.write_text(json.dumps(content))
    manifest = json.loads((checkpoint / MANIFEST).read_text()) | {state.name: file_sha256(state)}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    older = Trainer(trainer.dir, trainer.suite)
    assert (older.step, older.learner.halvings) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"num_iterations": 2, "beta": 0.04}, {"top_entropy_quantile": 0.5, "entropy_coef": 0.01, "loss_type": "bnpo"}],
    ids=str,
)
def test_every_kind_of_update_is_computed_again_in_smaller_passes(stages, settings):
    gradients = []
    for name, share in (("whole", 1.0), ("halves", 0.8)):
        trainer = trainer_of(stages, name, **settings)
        with trainer.suite:
            [update] = trainer._microbatches(trainer._collect())
        fill_above(trainer, share, "backward" if "num_iterations" in settings else "forward")
        figures = [trainer.learner.update(*update) for _ in range(2)]
        assert [each.halvings for each in figures] == [int(share < 1), 0]
        gradients.append(gradient(trainer))
    assert_near(*gradients)


def test_log_probabilities_before_several_updates_are_computed_in_passes_that_fit(stages):
    gradients = []
    for name, share in (("whole", 1.0), ("halves", 0.8)):
        trainer = trainer_of(stages, name, num_iterations=2)
        tried = fill_above(trainer, share)
        with trainer.suite:
            [(microbatches, old)] = trainer._microbatches(trainer._collect())
        assert len(microbatches) == len(old) == 1 + (share < 1)
        figures = [trainer.learner.update(microbatches, old) for _ in range(2)]
        # The update tells of it, though its own passes fit.
        assert [each.halvings for each in figures] == [int(share < 1), 0]
        assert tried[share < 1 :] == sizes(microbatches) * 3
        gradients.append(gradient(trainer))
    assert_near(*gradients)


@pytest.mark.slow
def test_training_continues_after_one_event(stages):
    lines = []
    for name, share in (("whole", 9.0), ("halves", 0.8)):
        trainer = trainer_of(stages, name)
        fill_above(trainer, share)
        with trainer.suite:
            assert trainer.train().steps == 3
        lines.append(journal(trainer.dir))
    [event] = [event for event in events(trainer.dir) if event["event"] == "out_of_memory"]
    assert (event["step"], "computed again with 1/2 of their completions" in event["detail"]) == (1, True)
    for whole, halves in zip(*lines, strict=True):
        for figure in ("loss", "grad_norm", "entropy"):
            assert halves[figure] == pytest.approx(whole[figure], rel=1e-3, abs=1e-6)


def test_a_completion_that_does_not_fit_alone_stops_the_stage(stages):
    trainer = trainer_of(stages, "s")
    with trainer.suite:
        updates = trainer._microbatches(trainer._collect())
    fill_above(trainer, 0.01)
    with pytest.raises(
        TrainingError, match=r"single completion does not fit into memory: CUDA out of memory.*1\.00 GiB"
    ) as found:
        trainer.learner.update(*updates[0])
    assert "gradient_checkpointing" in found.value.fix
    assert "reserved" not in found.value.message
    assert all(each.grad is None for each in trainer.learner.model.parameters())


def test_every_rank_stops_where_log_probabilities_of_one_do_not_fit(stages, monkeypatch):
    trainer = trainer_of(stages, "s", num_iterations=2)
    gather = Ranks.gather
    # The other rank of two.
    monkeypatch.setattr(Ranks, "gather", lambda _, mine: [mine, FULL if mine == "" else mine])
    with trainer.suite, pytest.raises(TrainingError, match=r"single completion does not fit into memory: CUDA out of memory"):
        trainer._microbatches(trainer._collect())
    heard = []
    monkeypatch.setattr(Ranks, "gather", lambda ranks, mine: heard.append(mine) or gather(ranks, mine))
    fill_above(trainer, 0.01)
    with trainer.suite, pytest.raises(TrainingError, match="single completion does not fit into memory"):
        trainer._microbatches(trainer._collect())
    assert heard[-1].startswith("CUDA out of memory")


def test_sharded_weights_are_not_computed_again_in_smaller_passes(stages):
    trainer = trainer_of(stages, "s")
    with trainer.suite:
        updates = trainer._microbatches(trainer._collect())
    # As if other ranks had the other shards.
    trainer.learner.policies.mesh = object()
    fill_above(trainer, 0.01)
    with pytest.raises(TrainingError, match=r"with resources\.fsdp it cannot be divided") as found:
        trainer.learner.update(*updates[0])
    assert "max_tokens_per_microbatch" in found.value.fix


def train_rank(directory, share):
    spec = StageSpec.load(directory.spec)
    with suite_of(spec) as suite:
        trainer = Trainer(directory, suite)
        if trainer.ranks.rank == 1:
            fill_above(trainer, share)
        trainer.train()
        trainer.ranks.accelerator.end_training()


@pytest.mark.long
def test_one_of_two_processes_may_run_out_of_memory(stages):
    lines = []
    for name, share in (("whole", 9.0), ("halves", 0.95)):
        directory = stages.write(name, **SETTINGS, resources={"num_processes": 2})
        in_processes(partial(train_rank, directory, share), 2)
        lines.append(journal(directory))
    # The first process writes what happened to the second one.
    assert "out_of_memory" in [event["event"] for event in events(directory)]
    for whole, halves in zip(*lines, strict=True):
        assert halves["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-3)

"""`max_tokens_per_microbatch: auto`, with a memory that reports what a test wants."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.grpo import token_budget
from grpo_tasks.grpo.policies import Policies
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.token_budget import with_measured_budget, with_token_budget
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.planning.memory_plan import GIB, RESERVE
from grpo_tasks.policy.load import trainable_policy
from grpo_tasks.rollout.engine import NoEngine
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.stage.journal import Events
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ModelError
from tests.grpo.conftest import events
from tests.in_process import suite_of
from tests.rollout.conftest import small  # noqa: F401 - a fixture
from tests.rollout.servers import CALIBRATE, LOAD, PROBE, SLEEP, small_config, small_servers, watched

AUTO = {"max_tokens_per_microbatch": "auto", "save_steps": 1, "save_total_limit": 5}
TOTAL = RESERVE + 72 * 2**20
"""A card with room for the graphs of sampling, and for a few hundred tokens of the embedded model."""


class ReportedMemory(token_budget.CudaMemory):
    """A memory that reports so many bytes for each token of a pass, and is full above a number of tokens."""

    def __init__(self, bytes_per_token, most=10**9, others=0):
        self.total, self.bytes_per_token, self.most, self.sizes = TOTAL, bytes_per_token, most, []
        self.others = others

    def usable(self):
        return self.total - self.others

    def begin(self):
        return 0.0

    def peak(self):
        if self.sizes[-1] > self.most:
            raise torch.OutOfMemoryError("full")
        return float(self.bytes_per_token * self.sizes[-1])


@pytest.fixture
def reported_memory(monkeypatch):
    """Let the CPU report a memory."""

    def tell(bytes_per_token, **options):
        memory = ReportedMemory(bytes_per_token, **options)
        batch = token_budget._batch

        def watched(plan, tokens, policies):
            found = batch(plan, tokens, policies)
            memory.sizes.append(found.packed.ids.numel())
            return found

        monkeypatch.setattr(token_budget, "device_memory", lambda _: memory)
        monkeypatch.setattr(token_budget, "_batch", watched)
        return memory

    return tell


def train(directory):
    spec = StageSpec.load(directory.spec)
    with suite_of(spec) as suite:
        trainer = Trainer(directory, suite)
        trainer.train()
    return trainer


@pytest.mark.slow
def test_the_size_of_a_pass_follows_what_the_first_one_took(stages, reported_memory):
    sizes = {}
    for name, bytes_per_token in (("light", 20_000), ("heavy", 80_000)):
        reported_memory(bytes_per_token)
        directory = stages.write(name, **AUTO)
        trainer = train(directory)
        kept = json.loads(directory.token_budget.read_text())
        sizes[name] = trainer.stage.max_tokens_per_microbatch
        assert kept == {"calculated": kept["calculated"], "measured": sizes[name], "checkpointing": False}
        [event] = [event for event in events(directory) if event["event"] == "token_budget"]
        room = "1.6 of 1.6 GiB are free or in use by this stage"
        by_calculation = f"{kept['calculated']} by calculation for all of it"
        assert event["detail"] == f"{sizes[name]} tokens a pass by measurement: {room}; {by_calculation}"
    # Four times the bytes leave room for a quarter of the tokens.
    assert sizes["heavy"] < sizes["light"] / 3


@pytest.mark.slow
def test_a_full_card_halves_the_pass_and_then_checkpoints_it(stages, reported_memory, monkeypatch):
    checkpointed = []

    def measured(name, bytes_per_token, **options):
        memory, directory = reported_memory(bytes_per_token, **options), stages.write(name, **AUTO | {"max_steps": 1})
        monkeypatch.setattr(token_budget, "checkpoint_layers", lambda _: checkpointed.append(setattr(memory, "most", 10**9)))
        train(directory)
        return memory.sizes[1:], json.loads(directory.token_budget.read_text())

    [free], kept = measured("free", 60_000)
    assert not kept["checkpointing"]
    [first, second], half = measured("half", 60_000, most=0.7 * free)
    assert first == free > 0.7 * free >= second
    assert (half["checkpointing"], half["measured"] < kept["measured"]) == (False, True)
    assert not checkpointed
    sizes, least = measured("least", 60_000, most=1)
    assert sizes[0] > sizes[1] > sizes[2]
    assert least["checkpointing"]
    assert checkpointed
    # A resumed stage does not measure again, and checkpoints.
    directory, memory = StageDir(stages.root / "least"), reported_memory(60_000)
    directory.result.unlink()
    checkpointed.clear()
    train(directory)
    assert (memory.sizes, len(checkpointed)) == ([], 1)


@pytest.mark.slow
def test_a_resumed_stage_keeps_the_size_and_ends_with_the_same_bytes(stages, reported_memory):
    reported_memory(60_000)
    whole = stages.write("whole", **AUTO)
    train(whole)
    cut = stages.write("cut", **AUTO)
    train(cut)
    # As a kill after the first update leaves it.
    for later in ("step-000002", "step-000003"):
        shutil.rmtree(cut.checkpoints / later)
    shutil.rmtree(cut.final)
    cut.result.unlink()
    # Less is free now, which changes nothing.
    memory = reported_memory(10_000, others=30 * 2**20)
    resumed = train(cut)
    assert resumed.counters.resumed == 1
    assert memory.sizes == []  # not measured again
    assert resumed.stage.max_tokens_per_microbatch == json.loads(whole.token_budget.read_text())["measured"]
    assert folder_sha256(cut.final) == folder_sha256(whole.final)


@pytest.mark.slow
def test_another_card_is_measured_again(stages, reported_memory):
    reported_memory(60_000)
    directory = stages.write(**AUTO)
    train(directory)
    memory = reported_memory(60_000)
    memory.total *= 2
    directory.result.unlink()
    train(directory)
    assert memory.sizes


def measured(stages, memory, name="stage", *, sharded=False, **settings):
    """The number of tokens of a stage, and its directory."""
    directory = stages.write(name, **AUTO | settings)
    spec = StageSpec.load(directory.spec)
    policy = trainable_policy(spec.start, spec.model, device=torch.device("cpu"), seed=1)
    policies = Policies(policy, spec, Ranks(Accelerator(cpu=True)))
    policies.mesh = object() if sharded else None
    memory.sizes.clear()
    given = with_token_budget(spec, policy, 40, memory.total), policies, directory, Events(directory.events, writes=True)
    return with_measured_budget(*given, 40, NoEngine()).max_tokens_per_microbatch, directory


@pytest.mark.parametrize("sharded", [False, True])
def test_what_others_hold_of_the_card_makes_passes_smaller(stages, reported_memory, sharded):
    tokens, calculated = [], set()
    for mib in (0, 20):
        memory = reported_memory(60_000, others=mib * 2**20)
        found, directory = measured(stages, memory, f"others-{mib}", sharded=sharded)
        tokens.append(found)
        calculated.add(json.loads(directory.token_budget.read_text())["calculated"])
        [event] = events(directory)
        assert f"{memory.usable() / GIB:.1f} of {memory.total / GIB:.1f} GiB" in event["detail"]
        # Sharded passes are not tried.
        assert bool(memory.sizes) != sharded
    assert tokens[1] < 0.8 * tokens[0]
    # What a resumed stage compares does not know of them.
    assert len(calculated) == 1


def test_the_engine_keeps_no_values_in_the_room_of_logits_and_graphs(stages, reported_memory):
    memory, spec = reported_memory(1), StageSpec.load(stages.write().spec)
    policy = trainable_policy(spec.start, spec.model, device=torch.device("cpu"), seed=1)
    plan = token_budget._plan(spec, policy, 40, memory.total)
    assert token_budget.kept_bytes(spec, policy, 40) == plan.sampling[0].bytes < plan.kept


def test_a_server_in_the_plan_is_not_charged_twice(stages, reported_memory):
    tokens = []
    for share in (0.0, 0.5, 0.6):
        memory = reported_memory(60_000, others=share * 4 * GIB)
        memory.total = 4 * GIB
        vllm = {"engine": "vllm", "vllm": {"gpu_memory_utilization": 0.5}}
        tokens.append(measured(stages, memory, f"server-{share}", rollout=vllm)[0])
    assert tokens[0] == tokens[1] > tokens[2]


def test_a_card_that_others_fill_is_named_with_both_numbers(stages, reported_memory):
    with pytest.raises(ModelError, match=r"does not fit into 2 GiB, of which 1\.\d GiB are taken by others") as caught:
        measured(stages, reported_memory(1, others=TOTAL - 100))
    assert "nvidia-smi" in caught.value.fix


def test_the_tried_pass_has_every_gradient_of_an_entropy_bonus(stages, reported_memory, monkeypatch):
    found, scores = [], Policies.scores

    def watched(policies, batch, **options):
        found.append(scores(policies, batch, **options))
        if options.get("entropy_gradients"):
            found[-1].entropies.retain_grad()
        return found[-1]

    monkeypatch.setattr(Policies, "scores", watched)
    measured(stages, reported_memory(20_000), entropy_coef=0.01)
    # The first one finds the layout.
    assert len(found) == 2
    assert found[-1].entropies.grad.any()


def test_only_what_the_allocator_can_give_back_counts_as_free(monkeypatch):
    card = {"free": 3, "allocated": 5, "cached": 7, "in pools of graphs": 2, "others": 11}

    def empty_cache():
        card["free"] += card["cached"]
        card["cached"] = 0

    total = SimpleNamespace(total_memory=sum(card.values()))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: total)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (card["free"], total.total_memory))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: card["allocated"])
    memory = token_budget.CudaMemory(torch.device("cuda"))
    assert (memory.usable(), memory.total) == (3 + 5 + 7, 28)


def test_a_card_too_full_for_the_first_pass_is_named(stages, reported_memory, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Policies, "scores", full)
    with pytest.raises(ModelError, match="does not fit into"):
        measured(stages, reported_memory(1))


def test_every_rank_stops_where_nothing_fits_on_one(stages, reported_memory, monkeypatch):
    # The other rank of two measures nothing.
    monkeypatch.setattr(Ranks, "gather", lambda _, mine: [mine, None])
    with pytest.raises(ModelError, match="does not fit into"):
        measured(stages, reported_memory(1))


@pytest.mark.slow
def test_a_stage_that_fits_in_no_size_says_so_before_it_samples(stages, reported_memory):
    reported_memory(1, most=0)
    directory = stages.write(**AUTO)
    spec = StageSpec.load(directory.spec)
    with suite_of(spec) as suite, pytest.raises(ModelError, match="does not fit into") as caught:
        Trainer(directory, suite)
    assert "quantization" in caught.value.fix
    assert not directory.token_budget.exists()


@pytest.mark.slow
def test_a_server_on_the_same_card_sleeps_while_a_pass_is_tried(stages, reported_memory, small, tokenizer, tmp_path):  # noqa: F811
    memory, paths = reported_memory(20_000), []
    memory.begin = lambda: paths.append([path for path, _ in asked]) or 0.0
    directory = stages.write(**AUTO)
    spec = StageSpec.load(directory.spec)
    policy = trainable_policy(spec.start, spec.model, device=torch.device("cpu"), seed=1)
    policies, events = Policies(policy, spec, Ranks(Accelerator(cpu=True))), Events(directory.events, writes=True)
    stage = with_token_budget(spec, policy, 40)
    with small_servers(tmp_path) as servers:
        weights = tmp_path / "weights"
        engine = VllmEngine(policy, tokenizer, small_config(sleep=True), servers, weights=weights, dtype="float32", merged=False)
        asked = watched(engine)
        for _ in range(2):
            measured = with_measured_budget(stage, policies, directory, events, 40, engine)
            assert isinstance(measured.max_tokens_per_microbatch, int)
        # Once, before the one trial; the second time its outcome was there.
        assert paths == [[*CALIBRATE, LOAD, PROBE, SLEEP]]
        assert [path for path, _ in asked] == paths[0]
        engine.close()

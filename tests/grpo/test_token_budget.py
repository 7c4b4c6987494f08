"""`max_tokens_per_microbatch: auto`, with a memory that reports what a test wants."""

import json
import shutil

import pytest
import torch
from accelerate import Accelerator

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.grpo import token_budget
from grpo_tasks.grpo.policies import Policies
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.token_budget import with_measured_budget, with_token_budget
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.planning.memory_plan import RESERVE
from grpo_tasks.policy.load import trainable_policy
from grpo_tasks.rollout.vllm_engine import VllmEngine
from grpo_tasks.stage.journal import Events
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ModelError
from tests.grpo.conftest import events
from tests.in_process import suite_of
from tests.rollout.conftest import small  # noqa: F401 - a fixture
from tests.rollout.servers import CALIBRATE, LOAD, PROBE, SLEEP, small_config, small_servers, watched

AUTO = {"max_tokens_per_microbatch": "auto", "save_steps": 1, "save_total_limit": 5}
TOTAL = RESERVE + 40 * 2**20
"""A card with room for a few hundred tokens of the embedded model."""


class ReportedMemory(token_budget.CudaMemory):
    """A memory that reports so many bytes for each token of a pass, and is full above a number of tokens."""

    def __init__(self, bytes_per_token, most=10**9):
        self.total, self.bytes_per_token, self.most, self.sizes = TOTAL, bytes_per_token, most, []

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
        assert event["detail"] == f"{sizes[name]} tokens a pass by measurement, {kept['calculated']} by calculation"
    # Four times the bytes leave room for less than a third of the tokens; less than a quarter, because the head takes its part.
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
    memory = reported_memory(10_000)
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

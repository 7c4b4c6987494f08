"""One golden curve, and everything that must reproduce it: however the same work is split, shared, laid out or interrupted.

The curve is tests/golden/journal.jsonl: six updates on the embedded model. `pytest tests/grpo/test_equivalence.py --golden`
writes a new one, which needs a sentence in the CHANGELOG.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_tasks.policy import logprobs
from grpo_tasks.stage.stage_dir import StageSpec
from tests.attention.reference_kernel import masked_way, varlen_way
from tests.forked import train_in_processes
from tests.grpo.conftest import journal

GOLDEN = Path(__file__).parent.parent / "golden" / "journal.jsonl"
WATCHED = ("reward", "reward_std", "loss", "kl", "entropy", "grad_norm", "completions/mean_length", "frac_reward_zero_std")
CURVE = {"max_steps": 6, "beta": 0.04, "num_iterations": 2, "save_steps": 2, "warmup_steps": 1, "learning_rate": 2e-3}


def assert_golden(directory):
    wanted = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    found = journal(directory)
    assert len(found) == len(wanted)
    for step, (one, other) in enumerate(zip(found, wanted, strict=True), start=1):
        for name in WATCHED:
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=2e-5), f"update {step}, {name}"


def test_the_curve_is_the_golden_one(train, request):
    _, directory = train(**CURVE)
    if request.config.getoption("--golden"):
        lines = [json.dumps({name: metrics[name] for name in WATCHED}) for metrics in journal(directory)]
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text("\n".join(lines) + "\n")
    assert_golden(directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        {"max_tokens_per_microbatch": 300},
        {"resources": {"share_prompts": False}},
        {"resources": {"fold_adapter": False}},
        {"resources": {"fuse_kernels": False}},
        {"resources": {"share_prompts": False, "fold_adapter": False}},
        {"model": {"gradient_checkpointing": True}},
        {"model": {"attn_implementation": "eager"}},
    ],
    ids=str,
)
def test_how_the_work_is_done_does_not_show_in_the_curve(train, settings):
    _, directory = train(**CURVE | settings)
    assert_golden(directory)


@pytest.mark.slow
def test_dead_groups_that_are_computed_add_nothing_at_beta_0(train):
    _, skipped = train("skipped", **CURVE | {"beta": 0.0})
    _, kept = train("kept", **CURVE | {"skip_dead_groups": False, "beta": 0.0})
    for one, other in zip(journal(skipped), journal(kept), strict=True):
        for name in ("reward", "loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", [masked_way, varlen_way])
def test_the_attention_of_other_devices_gives_the_curve(stages, way, monkeypatch):
    way(monkeypatch)
    _, directory = stages.train(**CURVE)
    assert_golden(directory)


def test_a_head_in_chunks_gives_the_curve(train, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 5 * 320)
    _, directory = train(**CURVE)
    assert_golden(directory)


@pytest.mark.slow
def test_a_resumed_stage_gives_the_curve(stages):
    settings = CURVE | {"model": {"lora": {"lora_dropout": 0.1}}}
    uninterrupted, wanted = stages.train("uninterrupted", **settings)
    directory = stages.write("stopped", **settings)
    stages.resume(directory, until=4)
    assert stages.resume(directory).sha256 == uninterrupted.sha256
    for one, other in zip(journal(directory), journal(wanted), strict=True):
        assert [one[name] for name in WATCHED] == [other[name] for name in WATCHED]


def assert_same_updates(one, two, file="adapter_model.safetensors"):
    for alone, together in zip(journal(one), journal(two), strict=True):
        for name in WATCHED:
            assert together[name] == pytest.approx(alone[name], rel=2e-3, abs=2e-5), name
    weights = [load_file(directory.final / file) for directory in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-2, atol=2e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {
            "loss_type": "bnpo",
            "scale_rewards": "batch",
            "max_refills": 2,
            "stage_rewards": ["format"],
            "entropy_coef": 0.01,
        },
    ],
    ids=["as it is", "figures of all processes"],
)
def test_two_processes_make_the_updates_of_one(stages, settings):
    _, one = stages.train("by-1", **CURVE | settings)
    two = stages.write("by-2", **CURVE | settings, resources={"num_processes": 2})
    train_in_processes(two.root, 2)
    if not settings:
        assert_golden(two)
    assert_same_updates(one, two)


SHARDED = {"num_processes": 2, "fsdp": True}


@pytest.mark.long
def test_weights_sharded_over_two_processes_make_the_updates_of_one(stages):
    # An odd number of microbatches, so that one rank needs an idle one.
    odd = {"num_generations": 3, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 9}
    # A large epsilon: Adam turns the rounding of a gradient near zero into a full step.
    settings = CURVE | odd | {"top_entropy_quantile": 0.5, "adam_epsilon": 1e-3}
    _, one = stages.train("by-1", **settings)
    two = stages.write("by-2", **settings, resources=SHARDED)
    train_in_processes(two.root, 2)
    assert_same_updates(one, two)


@pytest.mark.long
def test_full_fine_tuning_sharded_over_two_processes_resumes_in_one(stages):
    settings = CURVE | {"model": {"lora": None}, "learning_rate": 1e-4, "reference": "stage_start"}
    _, one = stages.train("by-1", **settings)
    two = stages.write("by-2", **settings, resources=SHARDED)
    train_in_processes(two.root, 2)
    assert_same_updates(one, two, "model.safetensors")
    # Their checkpoints hold no shards: one process resumes from the last but one and ends with the same weights.
    shutil.rmtree(two.checkpoints / "step-000006")
    two.result.unlink()
    spec = StageSpec.load(two.spec)
    spec.model_copy(update={"resources": spec.resources.model_copy(update={"num_processes": 1})}).save(two.spec)
    assert stages.resume(two).resumed == 1
    assert_same_updates(one, two, "model.safetensors")


@pytest.mark.long
def test_when_one_of_two_processes_dies_the_other_ends_too(stages, tmp_path):
    (tmp_path / "fatal.py").write_text(
        "import os\n"
        "def die(prompts, completions, **columns):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise ValueError('no more')\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    functions = {"functions": {"die": {"function": "fatal:die"}}}
    directory = stages.write(rewards=functions, stage_rewards=["die"], resources={"num_processes": 2})
    command = [sys.executable, "-m", "grpo_tasks.grpo", directory.root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode != 0
    error = json.loads((directory.root / "error.json").read_text())
    assert "no more" in json.dumps(error)
    assert not directory.result.exists()

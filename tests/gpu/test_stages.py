"""Whole stages on a GPU: sampling, training, merging, kills. What is quick comes first. Their tables need pyarrow."""

import subprocess
import sys
import time

import pytest
import torch
from accelerate import Accelerator

pytest.importorskip("pyarrow", reason="stages read and write tables with pyarrow")

from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.policy import merge as merged
from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.load import load_policy, load_tokenizer
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.graphs import CudaCapture, Graphs
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.metrics import GPU_MEMORY
from schemas.results.model import MergeSpec, ModelRef, StageResult
from tests.benchmarks.small_update import score_all, small_policy
from tests.gpu.conftest import DEVICE, on_device
from tests.grpo.conftest import journal
from tests.in_process import suite_of
from tests.rollout.test_rows_of_a_batch import rounding

BASE = ModelRef(path="embedded:base")
ON = {"resources": {"device": DEVICE}}
PROMPTS = [[317, 305, 198, 299, 303, 295], [317, 305, 198], [299] * 20]


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 0.05)])
def test_sampled_tokens_have_the_probabilities_that_training_gives_them(dtype, limit, device):
    policy = on_device(load_policy(BASE, ModelConfig(dtype=dtype), device=device))
    requests = [Request(prompt, seed) for prompt in PROMPTS for seed in range(8)]
    engine = LocalEngine(policy, load_tokenizer(BASE))
    sampling = Sampling.of(RolloutConfig(max_completion_length=40))
    found = engine.generate(requests, sampling)
    assert [again.token_ids for again in engine.generate(requests, sampling)] == [completion.token_ids for completion in found]
    prompt_of = [index for index in range(len(PROMPTS)) for _ in range(8)]
    batch = token_batch(PROMPTS, [completion.token_ids for completion in found], prompt_of, device=device)
    with torch.no_grad():
        scored = completion_logprobs(policy, batch, temperature=1.0).logps.cpu()
    drawn = torch.cat([torch.tensor(completion.logprobs) for completion in found])
    assert (scored[batch.completion_mask.cpu()] - drawn).abs().mean() < limit
    # Another batch has other kernels, which round differently: the probabilities stay, the tokens need not.
    differences = torch.tensor(rounding(engine, requests[::4], 20))
    assert differences.mean() < limit
    assert differences.max() < 10 * limit


def test_greedy_tokens_are_those_of_generate(device):
    policy = on_device(load_policy(BASE, ModelConfig(), device=device))
    for prompt in PROMPTS:
        sampling = Sampling.of(RolloutConfig(max_completion_length=30), temperature=0.0)
        [ours] = LocalEngine(policy, load_tokenizer(BASE)).generate([Request(prompt, 0)], sampling)
        ids = torch.tensor([prompt], device=device)
        theirs = policy.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30)
        assert ours.token_ids == theirs[0, len(prompt) : len(prompt) + len(ours.token_ids)].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_waits_to_build_and_to_score_a_pass(dtype, device):
    policy = on_device(small_policy(device, dtype))
    score_all(policy)  # the first pass sets up libraries
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        figures = score_all(policy)
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert figures.over(Ranks(Accelerator(cpu=True))).tokens > 0


def test_the_memory_of_a_pass_is_what_the_plan_says(device):
    if device.type != "cuda":
        pytest.skip("a CPU has no meter for its memory")
    from transformers import AutoModelForCausalLM, Qwen2Config

    from grpo_tasks.planning.memory_plan import Groups, count_pass, meta_policy
    from grpo_tasks.policy.load import new_policy

    architecture = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=6, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151_936, tie_word_embeddings=True,
    )  # fmt: skip
    config = ModelConfig(dtype="bfloat16")
    counted = count_pass(meta_policy(architecture, config), Groups.equal(2, 300, 8, 500))
    base = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
    policy = on_device(new_policy(base.requires_grad_(False), config).train())
    batch = token_batch([[7] * 300] * 2, [[9] * 500] * 16, [0] * 8 + [1] * 8, device=device)
    for _ in range(2):  # the first pass makes the gradients
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        completion_logprobs(policy, batch, temperature=1.0).logps.sum().backward()
        torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    print(f"counted {counted.peak / 2**20:.0f} MiB, measured {measured / 2**20:.0f} MiB")
    assert 0.8 * counted.peak < measured < 1.2 * counted.peak


def train(stages, **settings):
    """A stage of three updates whose policy is on the device: its journal and its directory."""
    directory = stages.write(**settings, **ON)
    with suite_of(StageSpec.load(directory.spec)) as suite:
        trainer = Trainer(directory, suite)
        on_device(trainer.learner.model)
        trainer.train()
    lines = journal(directory)
    assert len(lines) == 3
    assert all((GPU_MEMORY in line) == (DEVICE == "cuda") for line in lines)
    return lines, directory


@pytest.mark.parametrize(
    "model",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "gradient_checkpointing": True},
        {"lora": None},
        {"dtype": "bfloat16", "lora": None},
    ],
    ids=str,
)
def test_every_precision_trains(stages, model):
    lines, _ = train(stages, model=model, max_tokens_per_microbatch="auto", beta=0.04)
    assert all(0 <= line["grad_norm"] < 100 for line in lines)
    assert any(line["grad_norm"] > 0 for line in lines)


def test_a_quantized_base_trains(stages):
    pytest.importorskip("bitsandbytes")
    train(stages, model={"dtype": "bfloat16", "quantization": "nf4"})


def test_the_merged_model_is_the_trained_policy(stages, tmp_path, device, monkeypatch):
    _, directory = train(stages)
    ref = BASE.model_copy(update={"adapter": directory.final})
    chats = [[{"role": "user", "content": f"What is {n} + 27?"}] for n in (15, 60)]
    monkeypatch.setattr(merged, "load_policy", lambda *given, **named: on_device(load_policy(*given, **named)))
    spec = MergeSpec(model=ModelConfig(), ref=ref, prompts=chats, max_new_tokens=24)
    figures = merged.merge(spec, tmp_path / "merged", device=device)
    assert figures.mean_logprob_difference <= figures.tolerance


class Single(Graphs):
    """Steps at the same places, and none of them replayed."""

    def run(self, step):
        step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_steps_draw_what_single_steps_draw_in_every_rollout(dtype, device):
    policy = load_policy(BASE, ModelConfig(dtype=dtype), device=device)
    replayed, single = (LocalEngine(policy, load_tokenizer(BASE)) for _ in range(2))
    single._graphs = Single(CudaCapture() if device.type == "cuda" else None)
    for number in range(3):
        requests = [Request(prompt[number % 2 :], 100 * number + seed) for prompt in PROMPTS for seed in range(8)]
        drawn = [engine.generate(requests, Sampling.of(RolloutConfig(max_completion_length=40))) for engine in (replayed, single)]
        assert drawn[0] == drawn[1]
    assert len(replayed._graphs._replays) == (device.type == "cuda")


def start(directory):
    return subprocess.Popen([sys.executable, "-m", "grpo_tasks.grpo", str(directory.root)])


def test_a_stage_that_is_killed_and_resumed_ends_in_the_same_bytes(stages):
    settings = {"max_steps": 20, "save_steps": 5, "beta": 0.04} | ON
    whole, killed = stages.write("whole", **settings), stages.write("killed", **settings)
    assert start(whole).wait(timeout=600) == 0
    child = start(killed)
    deadline = time.monotonic() + 600
    while not (killed.journal.exists() and len(journal(killed)) >= 7):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.kill()
    child.wait()
    assert start(killed).wait(timeout=600) == 0
    assert StageResult.load(killed.result).sha256 == StageResult.load(whole.result).sha256
    lines = journal(whole)
    assert all((GPU_MEMORY in line) == (DEVICE == "cuda") for line in lines)
    assert sum(line["reward"] for line in lines[-5:]) > sum(line["reward"] for line in lines[:5])

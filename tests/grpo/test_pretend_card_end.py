"""Resuming, merging and sampling for an evaluation on the pretend card, against the same on a CPU."""

import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from grpo_tasks.policy.load import load_tokenizer, save_trained, trainable_policy
from grpo_tasks.policy.merge import merge
from grpo_tasks.rollout.sample_table import sample_table
from grpo_tasks.rollout.spec import SampleSpec
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig
from schemas.results.model import MergeFigures, MergeSpec, ModelRef
from tests.grpo.conftest import journal
from tests.grpo.test_pretend_card import ARCHITECTURES, save_model, stage_on

CPU = torch.device("cpu")


def on_card(module, folder):
    command = [sys.executable, "-m", f"tests.grpo.{module}", str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def adapted(tmp_path):
    """A random model of that architecture, or the embedded one, with a random adapter."""

    def make(name):
        base = "embedded:base"
        if name in ARCHITECTURES:
            base = save_model(name, tmp_path)
        ref = ModelRef(path=base)
        policy = trainable_policy(ref, ModelConfig(path=base), device=CPU, seed=1)
        for parameter_name, parameter in policy.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.05)
        save_trained(policy, load_tokenizer(ref), tmp_path / "adapter")
        return ref.model_copy(update={"adapter": tmp_path / "adapter"})

    return make


def write_rows(path):
    chats = [[{"role": "user", "content": f"What is {number} + 27?"}] for number in (15, 60, 71, 8)]
    rows = {
        "prompt_id": [f"{number:016x}" for number in range(4)], "source": ["s"] * 4, "line": [1, 2, 3, 4], "prompt": chats,
        "answer": ["42"] * 4, "prompt_tokens": [9] * 4, "extra": ["{}"] * 4, "answers": [None] * 4, "task": [""] * 4,
    }  # fmt: skip
    pl.DataFrame(rows).write_parquet(path)
    return chats


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("qwen2", marks=pytest.mark.ci), *ARCHITECTURES])
def test_merging_and_sampling_on_the_card_equal_the_cpu(tmp_path, adapted, name):
    ref, chats = adapted(name), write_rows(tmp_path / "eval.parquet")
    model = ModelConfig(path=ref.path, merged_dtype="float32")
    for_merge = MergeSpec(model=model, ref=ref, prompts=chats, max_new_tokens=12)
    for_samples = SampleSpec(
        model=model,
        ref=ref,
        prompts=tmp_path / "eval.parquet",
        max_prompts=None,
        num_samples=3,
        temperature=1.0,
        greedy=True,
        rollout=RolloutConfig(max_completion_length=12, top_p=0.9),
        resources=ResourcesConfig(device="cpu"),
        seed=5,
    )
    for_merge.save(tmp_path / "merge.json")
    for_samples.save(tmp_path / "sample.json")
    on_card("work_on_card", tmp_path)
    host = merge(for_merge, tmp_path / "host", device=CPU)
    card = MergeFigures.load(tmp_path / "figures.json")
    assert card.mean_logprob_difference == pytest.approx(host.mean_logprob_difference, abs=1e-5)
    assert card.greedy_agreement == host.greedy_agreement == 1.0
    ours, theirs = (load_file(tmp_path / where / "model" / "model.safetensors") for where in ("host", "merged"))
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        torch.testing.assert_close(theirs[key], weight)
    assert pl.read_parquet(tmp_path / "samples.parquet").equals(sample_table(for_samples, tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen2", *ARCHITECTURES])
def test_a_stage_resumes_on_the_card_to_the_same_bytes(stages, tmp_path, name):
    card = stages.write("card", **stage_on(name, tmp_path) | {"max_steps": 4})
    on_card("train_on_card", card.root)
    whole, weights = journal(card), (card.final / "adapter_model.safetensors").read_bytes()
    assert min(path.name for path in card.checkpoints.iterdir()) == "step-000002"
    # As after a kill behind step 3.
    shutil.rmtree(card.final)
    card.result.unlink(missing_ok=True)
    for later in sorted(card.checkpoints.iterdir())[1:]:
        shutil.rmtree(later)
    on_card("train_on_card", card.root)
    assert (card.final / "adapter_model.safetensors").read_bytes() == weights
    assert [line["loss"] for line in journal(card)] == [line["loss"] for line in whole]

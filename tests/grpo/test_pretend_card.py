"""Stages, merging and sampling on a pretend accelerator, which refuses to mix devices as CUDA does, against the same on a CPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig, Qwen3Config

from grpo_tasks.policy.load import load_tokenizer, save_trained, trainable_policy
from grpo_tasks.policy.merge import merge
from grpo_tasks.rollout.sample_table import sample_table
from grpo_tasks.rollout.spec import SampleSpec
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig
from schemas.paths import resolve
from schemas.results.model import MergeFigures, MergeSpec, ModelRef
from tests.grpo.conftest import journal

ROOT = Path(__file__).parents[2]
WATCHED = ("reward", "loss", "kl", "entropy", "grad_norm", "completions/mean_length")
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 328,
}
ARCHITECTURES = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=16, layer_types=["sliding_attention", "full_attention"]),
}
SETTINGS = {"beta": 0.04, "max_steps": 2, "num_iterations": 2, "save_steps": 2}
LETTERS = {"letters": {"function": "tests.grpo.rewards:letters", "as_text": True}}


def save_model(name, folder):
    """A random model of that architecture with the embedded tokenizer; returns its path."""
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(ARCHITECTURES[name]).save_pretrained(folder / name)
    AutoTokenizer.from_pretrained(resolve("embedded:base")).save_pretrained(folder / name)
    return str(folder / name)


def stage_on(name, folder, **model):
    """Settings of a stage that trains a model of that architecture; qwen2 is that of the embedded one."""
    if name == "qwen2":
        return SETTINGS | {"model": model}
    path = save_model(name, folder)
    rewards = {"stage_rewards": [*LETTERS], "rewards": {"functions": LETTERS}}
    return SETTINGS | rewards | {"model": {"path": path} | model, "start": ModelRef(path=path), "length": 12}


@pytest.fixture(scope="module")
def on_card(tmp_path_factory):
    """Do on the card what a folder asks for."""
    log = tmp_path_factory.mktemp("card") / "log.txt"
    command = [sys.executable, "-m", "tests.grpo.on_card"]
    with log.open("wb") as errors:
        card = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)

    def do(folder, *options):
        print(folder, *options, file=card.stdin, flush=True)
        assert card.stdout.readline() == "0\n", log.read_text()[-3000:]

    yield do
    card.stdin.close()
    assert card.wait(60) == 0


@pytest.fixture
def both(stages, on_card):
    def train(*options, **settings):
        """The journals of the same stage, on the CPU and on the card; and the lines that waited for the card."""
        host, card = stages.write("host", **settings), stages.write("card", **settings)
        stages.resume(host)
        on_card(card.root, *options)
        return journal(host), journal(card), json.loads((card.root / "waits.json").read_text())

    return train


def assert_same(host, card):
    assert len(host) == len(card)
    for one, other in zip(card, host, strict=True):
        for name in WATCHED:
            assert one.get(name) == pytest.approx(other.get(name), rel=2e-3, abs=2e-5), name
    assert any(line["grad_norm"] > 0 for line in host)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="as it is"),
        *(
            pytest.param(settings, id=str(settings), marks=pytest.mark.long)
            for settings in (
                {"resources": {"fuse_kernels": False}, "beta": 0.0},
                {"resources": {"share_prompts": False, "fold_adapter": False}},
                {"model": {"lora": None}, "optim": "adamw_torch"},
                {"top_entropy_quantile": 0.5, "entropy_coef": 0.01, "loss_type": "dapo", "mask_truncated_completions": True},
                {"max_tokens_per_microbatch": 200, "loss_type": "bnpo", "importance_sampling_level": "sequence"},
            )
        ),
    ],
)
def test_a_stage_computes_on_the_card_what_it_computes_on_a_cpu(both, settings):
    host, card, _ = both(**SETTINGS | settings)
    assert_same(host, card)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] if name == "qwen3" else []) for name in ARCHITECTURES]
)
def test_every_architecture_runs_on_the_card(both, tmp_path, name):
    host, card, _ = both(**stage_on(name, tmp_path))
    assert_same(host, card)


@pytest.mark.long
# All weights with tied embeddings, an adapter with untied ones, and windows.
@pytest.mark.parametrize(("name", "model"), [("qwen2", {"lora": None}), ("llama", {}), ("gemma3", {})], ids=str)
def test_sharded_weights_are_gathered_updated_sampled_from_and_saved_on_the_card(both, tmp_path, name, model):
    host, card, _ = both("sharded", **stage_on(name, tmp_path, **model), resources={"fsdp": True})
    assert_same(host, card)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, {"lora": None}], ids=["adapter", "all weights"])
def test_a_card_never_holds_more_than_its_shards_and_a_layer(stages, on_card, model):
    stage = stages.write("half", model=model, resources={"fsdp": True})
    on_card(stage.root, "half")
    found = json.loads((stage.root / "half.json").read_text())
    half = found["whole"] / 2
    assert half <= found["loaded"] <= 1.01 * half
    assert found["loading"] <= 1.02 * (half + found["layer"]) < 0.9 * found["whole"]
    # A copy for servers, of which the card sees a layer at a time, twice while it is gathered.
    assert found["copy is on"] == "cpu"
    assert found["copied"] <= 1.01 * half
    assert found["copying"] <= 1.02 * (half + 2 * found["layer"])


PAGEABLE = "copy of pageable memory"
WAITS = {
    "x.sum().item()": "_local_scalar_dense",
    "bool(mask.any())": "_local_scalar_dense",
    "x.tolist()": "tolist",
    "x.cpu()": "copy to the host",
    "x[mask]": "index by a mask",
    "x.masked_select(mask)": "masked_select",
    "x.masked_scatter(mask, torch.ones(6, device=CARD, requires_grad=True)).sum().backward()": "masked_scatter_backward",
    "x.repeat_interleave(x.long())": "repeat_interleave",
    "x[torch.tensor([1, 2])]": "index by numbers of the host",
    "torch.tensor([1, 2], device=CARD)": "copy to the card",
    "torch.ones(6).to(CARD)": "copy to the card",
    "x.copy_(torch.ones(6))": "copy to the card",
    "torch.ones(6).to(CARD, non_blocking=True)": PAGEABLE,
    "x.copy_(torch.ones(6), non_blocking=True)": PAGEABLE,
    "torch.ones(6).pin_memory().to(CARD, non_blocking=True)": None,
    "x.copy_(torch.ones(6, pin_memory=True), non_blocking=True)": None,
    "x.masked_fill(mask, 0.0) + x[x.long()] + x.bfloat16() * 2": None,
    "x.__setitem__(mask, 0.0)": None,
}


@pytest.mark.slow
def test_the_card_records_what_makes_the_host_wait_as_cuda_does():
    code = (
        "from tests.grpo.pretend_card import CARD, WAITS, card\nimport json, torch\nfound = {}\nwith card():\n"
        "    x = torch.arange(6.0).to(CARD)\n    mask = x > 2\n"
        f"    for call in {list(WAITS)!r}:\n        WAITS.clear()\n        eval(call)\n"
        "        found[call] = [name for _, name in WAITS.elements()]\nprint(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {call: [name] if name else [] for call, name in WAITS.items()}


IDLES = {
    "x + x; x + x": 1,  # it has nothing to do before the first line of its work
    "x.sum().item(); x.view(2, 3); x + x; x + x": 2,
    "x.cpu()": 1,
    "x.sum().item(); x + x; torch.tensor([1, 2], device=CARD); x + x": 3,
    # A copy that is not waited for, with work behind it and without.
    "y = x.to('cpu', non_blocking=True, copy=True); x + x; y.tolist(); x + x": 1,
    "y = x.to('cpu', non_blocking=True, copy=True); y.tolist(); x + x": 2,
}


@pytest.mark.slow
def test_the_card_waits_where_the_host_has_waited_for_all_work():
    code = (
        "from tests.grpo.pretend_card import CARD, IDLES, QUEUE, card\nimport json, torch\nfound = {}\nwith card():\n"
        f"    x = torch.arange(6.0).to(CARD)\n    for calls in {list(IDLES)!r}:\n"
        "        IDLES.clear()\n        QUEUE.wait()\n        exec(calls)\n        found[calls] = IDLES.total()\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == IDLES


@pytest.mark.long
@pytest.mark.ci
def test_an_update_waits_for_the_card_only_for_its_figures(both):
    settings = {"beta": 0.04, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    _, card, waits = both(**settings)
    assert len(card) == 3
    counts = {file: sum(count for count, line, _ in waits if line.startswith(file)) for file in ("measure.py", "learner.py")}
    # The figures of all microbatches are read once, and the norm of the gradient once; nothing waits to build or to score a pass.
    assert counts == {"measure.py": 3, "learner.py": 3}
    sampling = {"decoding_loop.py", "decoding_cache.py", "local.py", "fused_decoder.py"}
    # All that is built for a pass or a step goes to the card from pinned memory.
    assert [line for _, line, operation in waits if operation == PAGEABLE] == []
    waiting = {line.partition(":")[0] for _, line, _ in waits}
    # The check against transformers' own forward pass is once in a stage, before the first one; a checkpoint takes what it saves.
    assert waiting <= {*counts, *sampling, "forward_check.py", "checkpoint.py"}


@pytest.mark.slow
def test_the_next_microbatch_is_built_before_the_host_waits_for_this_one(stages, on_card):
    settings = {"skip_dead_groups": False, "max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    directory = stages.write("card", **settings)
    on_card(directory.root)
    log = json.loads((directory.root / "log.json").read_text())
    # The check against transformers' own forward pass is a part of the first pass of a stage.
    log = [what for what in log if not what.startswith("forward_check.py")]
    places = [place for place, what in enumerate(log) if what in ("build", "pass")]
    for first in (places[0], places[8]):
        # A pass is launched, and the next microbatch is built while the card computes: nothing waits before the last one.
        assert log[first : first + 8] == ["build", "pass"] * 4
        assert log[first + 8].startswith("measure.py")


@pytest.fixture
def adapted(tmp_path):
    """A random model of that architecture, or the embedded one, with a random adapter."""

    def make(name):
        base = "embedded:base"
        if name in ARCHITECTURES:
            base = save_model(name, tmp_path)
        ref = ModelRef(path=base)
        policy = trainable_policy(ref, ModelConfig(path=base), device=torch.device("cpu"), seed=1)
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
@pytest.mark.parametrize("name", [pytest.param("qwen2", marks=pytest.mark.ci), "llama", "gemma3"])
def test_merging_and_sampling_on_the_card_equal_the_cpu(tmp_path, adapted, on_card, name):
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
    on_card(tmp_path)
    host = merge(for_merge, tmp_path / "host", device=torch.device("cpu"))
    card = MergeFigures.load(tmp_path / "figures.json")
    assert card.mean_logprob_difference == pytest.approx(host.mean_logprob_difference, abs=1e-5)
    assert card.greedy_agreement == host.greedy_agreement == 1.0
    ours, theirs = (load_file(tmp_path / where / "model" / "model.safetensors") for where in ("host", "merged"))
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        torch.testing.assert_close(theirs[key], weight)
    assert pl.read_parquet(tmp_path / "samples.parquet").equals(sample_table(for_samples, tmp_path))


@pytest.mark.long
def test_a_stage_resumes_on_the_card_to_the_same_bytes(stages, on_card):
    card = stages.write("card", **SETTINGS | {"max_steps": 4})
    on_card(card.root)
    whole, weights = journal(card), (card.final / "adapter_model.safetensors").read_bytes()
    assert min(path.name for path in card.checkpoints.iterdir()) == "step-000002"
    # As after a kill behind step 3.
    shutil.rmtree(card.final)
    card.result.unlink(missing_ok=True)
    for later in sorted(card.checkpoints.iterdir())[1:]:
        shutil.rmtree(later)
    on_card(card.root)
    assert (card.final / "adapter_model.safetensors").read_bytes() == weights
    assert [line["loss"] for line in journal(card)] == [line["loss"] for line in whole]

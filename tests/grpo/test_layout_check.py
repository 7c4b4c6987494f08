"""Which layout a stage takes: models that the packed one does not fit are found before the first pass, and trained without it."""

import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoTokenizer, Gemma2Config, Lfm2Config, Qwen2Config, Qwen2MoeConfig

from grpo_tasks.attention import shared_prompt
from grpo_tasks.grpo.policies import Policies
from grpo_tasks.grpo.ranks import Ranks
from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.forward_check import CheckRows
from grpo_tasks.policy.load import new_policy
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.paths import resolve
from schemas.results.model import ModelRef
from tests.attention.test_packed_attention import SMALL, model_of
from tests.grpo.conftest import journal
from tests.grpo.test_pretend_card import LETTERS, WATCHED

CPU = torch.device("cpu")
SIZES = SMALL | {"vocab_size": 328, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
MODELS = {
    # A short convolution mixes neighbouring tokens, whatever the attention says.
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    # Scores are capped, which torch's kernels do not do.
    "gemma2": Gemma2Config(**SIZES, head_dim=32, sliding_window=16, attn_logit_softcapping=2.0),
}
ENCODED_AGAIN = "each prompt is encoded once for every completion"
ONE = token_batch([[5, 6, 7]], [[8, 9, 10, 11]], [0], device=CPU)
"""A microbatch of one completion, whose packed row is an ordinary sequence."""


@pytest.fixture
def settings(tmp_path):
    """The settings of a stage that trains a random model of that architecture."""

    def save(name):
        folder = tmp_path / name
        model_of(MODELS[name]).save_pretrained(folder)
        AutoTokenizer.from_pretrained(resolve("embedded:base")).save_pretrained(folder)
        return {
            "model": {"path": str(folder)},
            "start": ModelRef(path=str(folder)),
            "stage_rewards": [*LETTERS],
            "rewards": {"functions": LETTERS},
            "length": 10,
            "max_steps": 2,
            "beta": 0.04,
            "num_iterations": 2,
        }

    return save


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_stage_that_cannot_share_prompts_says_so_and_trains_without(stages, settings, name):
    given = settings(name)
    with pytest.warns(UserWarning, match=ENCODED_AGAIN), pytest.warns(UserWarning, match="its own copy of its prompt"):
        _, found = stages.train("found", **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, wanted = stages.train("wanted", **given, resources={"share_prompts": False})
    lines = journal(found)
    assert [{key: line.get(key) for key in WATCHED} for line in lines] == [
        {key: line.get(key) for key in WATCHED} for line in journal(wanted)
    ]
    assert any(line["grad_norm"] > 0 for line in lines)
    # The sampler computes what the trainer computes, soft caps included.
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-4 for line in lines[:1])


def policies_of(stages, model, accelerator, **config):
    spec = StageSpec.load(stages.write(model=config).spec)
    return Policies(new_policy(model, spec.model), spec, Ranks(accelerator))


def test_one_completion_is_enough_to_find_a_leak_to_the_next(stages):
    policies = policies_of(stages, model_of(MODELS["lfm2"]), Accelerator(cpu=True), lora=None)
    with pytest.warns(UserWarning, match=f"{ENCODED_AGAIN}.*off by"):
        policies.scores(ONE)
    assert policies._layout == "plain"


def test_the_check_reaches_beyond_the_window_of_the_attention(stages, monkeypatch):
    # Its window is in its mask, which a packed row does without. The attention reads it from the config, here it does not.
    monkeypatch.setattr(shared_prompt, "_window_in_mask", lambda _: None)
    config = Qwen2MoeConfig(
        **SMALL, sliding_window=8, use_sliding_window=True, max_window_layers=2, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=32, shared_expert_intermediate_size=32,
    )  # fmt: skip
    model = model_of(config)
    assert max(map(len, CheckRows.of(model).completions)) > 8
    policies = policies_of(stages, model, Accelerator(cpu=True), lora=None)
    with pytest.warns(UserWarning, match=f"{ENCODED_AGAIN}.*off by"):
        policies.scores(ONE)


@pytest.fixture
def half_precision():
    """An accelerator that computes in bfloat16 over float32 weights, as full fine-tuning does on a GPU."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("error")
def test_all_weights_are_trained_in_the_packed_layout_under_autocast(stages, half_precision):
    policies = policies_of(stages, model_of(Qwen2Config(**SMALL)), half_precision, lora=None, dtype="bfloat16")
    scores = policies.scores(ONE)
    assert policies._layout == "packed"
    scores.logps.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in policies.model.parameters())

"""Layers with a state of their own over a packed row, against transformers' own forward pass of every completion alone."""

import copy
import warnings
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.bamba import modeling_bamba
from transformers.models.jamba import modeling_jamba
from transformers.models.qwen3_5 import modeling_qwen3_5

from grpo_tasks.attention.recurrent import RecurrentStates
from grpo_tasks.policy.load import checkpoint_layers, new_policy
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.policy.recurrent_layers import mixer_kernels, recurrent_layers, share_prompts
from schemas.config.model import ModelConfig
from schemas.errors import Notice
from schemas.results.model import ModelRef
from tests.attention.test_packed_attention import BATCHES, LATE, assert_same, results, wanted_of
from tests.zoo.build import config
from tests.zoo.kinds import ZOO
from tests.zoo.measure import scorer

HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "granitemoehybrid", "bamba", "nemotron_h", "jamba")
KINDS = ("qwen3_next", "lfm2", "bamba", "jamba")
"""One model for each kind of mixer: Gated DeltaNet, short convolution, Mamba 2, Mamba 1."""


def hybrid(name, **changes):
    """A tiny random model of layers with a state and layers with attention, whose states matter."""
    torch.manual_seed(0)
    kind, tiny = ZOO[name]
    model = AutoModelForCausalLM.from_config(config(kind, tiny | changes), dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.08)
            elif parameter_name.endswith("conv1d.bias"):
                # A bias makes something of padding.
                parameter.normal_(0, 0.5)
    return model.eval()


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_scores_as_one_completion_at_a_time(name):
    model = hybrid(name)
    batch, wanted = wanted_of(model, "mixed lengths")
    # As the trainer runs it: some mixers have another way in training.
    assert_same(results(model.train(), batch, "packed"), wanted)
    assert len(recurrent_layers(model)) >= 1


@pytest.mark.parametrize("kind", [kind for kind in BATCHES if kind != "mixed lengths"])
@pytest.mark.parametrize("name", KINDS)
def test_every_shape_of_batch_is_right(name, kind):
    model = hybrid(name)
    batch, wanted = wanted_of(model, kind)
    assert_same(results(model.train(), batch, "packed"), wanted)


@pytest.mark.parametrize(("name", "setting"), [("bamba", "mamba_proj_bias"), ("lfm2", "conv_bias"), ("jamba", "mamba_proj_bias")])
def test_the_bias_of_a_projection_makes_nothing_of_padding(name, setting):
    model = hybrid(name, **{setting: True})
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("in_proj.bias"):
                parameter.normal_(0, 0.5)
    batch, wanted = wanted_of(model, "mixed lengths")
    assert_same(results(model.train(), batch, "packed"), wanted)


@pytest.mark.parametrize("name", KINDS)
def test_a_mixer_computes_a_prompt_once_for_all_completions(name):
    model = hybrid(name)
    batch, _ = wanted_of(model, "equal lengths")
    share_prompts(model)
    [mixer, *_] = recurrent_layers(model).values()
    projection = next(child for child_name, child in mixer.named_children() if "in_proj" in child_name)
    shapes = []
    projection.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape[:2])))
    with torch.no_grad():
        completion_logprobs(model, batch, temperature=1.0)
    # Two prompts of 12 tokens, four completions of 6, whose last token predicts nothing.
    assert shapes == [(2, 12), (4, 5)]


@pytest.mark.parametrize("name", KINDS)
def test_gradient_checkpointing_changes_no_bit(name):
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        policy = new_policy(hybrid(name).requires_grad_(False), ModelConfig()).train()
        for parameter_name, parameter in policy.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.1)
        if checkpointed:
            checkpoint_layers(policy)
        batch, _ = wanted_of(hybrid("lfm2"), LATE)
        completion_logprobs(policy, batch, temperature=1.0).logps.square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in policy.named_parameters() if parameter.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert all(grad.any() for grad in gradients[0].values())


@pytest.mark.parametrize("forgotten", ["conv_states", "recurrent_states"])
def test_a_forgotten_state_shows(forgotten, monkeypatch):
    model = hybrid("qwen3_next")
    batch, wanted = wanted_of(model, "mixed lengths")
    begin = RecurrentStates.begin

    def forgetful(self, take):
        begun = begin(self, take)
        setattr(begun, forgotten, {at: torch.zeros_like(state) for at, state in getattr(begun, forgotten).items()})
        return begun

    monkeypatch.setattr(RecurrentStates, "begin", forgetful)
    with pytest.raises(AssertionError):
        assert_same(results(model, batch, "packed"), wanted)


def test_a_kernel_whose_last_state_has_no_gradient_costs_no_gradient(monkeypatch):
    scan = modeling_jamba.mamba_selective_scan

    def kernel(*args, **kwargs):
        outputs, last = scan(*args, **kwargs)
        return outputs, last.detach()

    model = hybrid("jamba")
    batch, wanted = wanted_of(model, "mixed lengths")
    monkeypatch.setattr(modeling_jamba, "mamba_selective_scan", kernel)
    assert_same(results(model, batch, "packed"), wanted)


def test_a_trainer_whose_states_are_lost_trains_in_the_slow_way(monkeypatch):
    monkeypatch.setattr(RecurrentStates, "begin", lambda *_: RecurrentStates(continues=True))
    with pytest.warns(Notice, match="encoded once for all"):
        score_once("lfm2")


KERNELS = {
    "qwen3_5_text": (modeling_qwen3_5, "torch_chunk_gated_delta_rule", "initial_state"),
    "bamba": (modeling_bamba, "mamba2_chunk_scan", "initial_states"),
}
"""Kernels that take and return a state. That of Mamba 1 does neither (`_scan`), and a short convolution has none."""
LOSES = r"encoded once for all: \w+ loses gradients at the end of a prompt"


@pytest.mark.parametrize("state", ["initial", "final"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_without_gradient_of_its_state_trains_in_the_slow_way(name, state, monkeypatch):
    module, kernel, argument = KERNELS[name]
    whole = getattr(module, kernel)

    def cut(given):
        return given.detach() if torch.is_tensor(given) else given

    def without(*args, **kwargs):
        if state == "initial":
            return whole(*args, **kwargs | {argument: cut(kwargs.get(argument))})
        found = whole(*args, **kwargs)
        return (found[0], cut(found[1])) if isinstance(found, tuple) else found

    monkeypatch.setattr(module, kernel, without)
    with pytest.warns(Notice, match=LOSES):
        score_once(name)


@pytest.mark.parametrize("name", KINDS)
def test_states_handed_over_without_gradient_lead_to_the_slow_way(name, monkeypatch):
    begin = RecurrentStates.begin
    monkeypatch.setattr(RecurrentStates, "begin", lambda self, take: begin(self, lambda state: take(state).detach()))
    with pytest.warns(Notice, match=LOSES):
        score_once(name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_states_with_their_gradient_are_no_reason_for_the_slow_way(name, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        score_once(name, dtype=dtype)


def score_once(name, **settings):
    """As a trainer's first pass, which looks for a way to compute it."""
    config = ModelConfig(path="none", **settings)
    policy = new_policy(hybrid(name).requires_grad_(False).to(getattr(torch, config.dtype)), config)
    scorer(policy, ModelRef(path="none"), config)()


def test_the_kernels_of_mixers_are_named():
    named = mixer_kernels(hybrid("qwen3_next"))
    assert "chunk_gated_delta_rule" in named
    assert "causal_conv1d_fn" in named
    if find_spec("fla") is None and find_spec("causal_conv1d") is None:
        assert "by torch, without fla" in named
        assert "by torch, without causal_conv1d" in named
    assert mixer_kernels(AutoModelForCausalLM.from_config(config(*ZOO["qwen2"]))) == ""


def test_without_a_shared_prompt_a_model_is_as_before():
    model = hybrid("bamba")
    ids = torch.arange(5, 25)[None]
    before = model(input_ids=ids).logits
    share_prompts(model)
    share_prompts(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    # A copy for sampling has mixers and hooks of its own.
    twin = copy.deepcopy(model)
    assert all(twin_mixer is not mixer for twin_mixer, mixer in zip(*map(mixers, (twin, model)), strict=True))
    assert max(len(module._forward_pre_hooks) for module in twin.modules()) == 1


def mixers(model):
    return recurrent_layers(model).values()

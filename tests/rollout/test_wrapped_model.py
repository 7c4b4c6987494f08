"""A text policy on a real vLLM server that serves a multimodal model around the same text layers.

vLLM holds the text layers of such a model under another name. It answers 200 to an adapter with the names of the text model,
loads nothing of it and samples from the base (vllm issues 34186, 48019, 49354).
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Blip2QFormerConfig, GraniteSpeechConfig, GraniteSpeechForConditionalGeneration
from transformers.models.granite_speech.configuration_granite_speech import GraniteSpeechEncoderConfig

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.load import trainable_policy
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rollout import calibration
from grpo_tasks.rollout.engine import Request, completion_seed
from grpo_tasks.rollout.vllm_engine import VllmSampler
from grpo_tasks.rollout.vllm_server import ServerModel, serving
from schemas.config.model import ModelConfig
from schemas.errors import RolloutError
from schemas.paths import resolve
from tests.rollout.servers import CONFIG, MARKS, engine_on, moved, sampling

pytestmark = MARKS
WRAPPED = CONFIG.model_copy(update={"extra_args": ["--limit-mm-per-prompt", '{"audio": 0}']})
START = "language_model.model."


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    """The embedded model as the language model of a speech model whose other parts are small and random."""
    folder, base = tmp_path_factory.mktemp("wrapped"), resolve("embedded:base")
    text = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    encoder = GraniteSpeechEncoderConfig(
        input_dim=16, num_layers=1, hidden_dim=32, feedforward_mult=2, num_heads=2, dim_head=16, output_dim=8, context_size=20,
        max_pos_emb=32, conv_kernel_size=3,
    )  # fmt: skip
    projector = Blip2QFormerConfig(
        vocab_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, encoder_hidden_size=32
    )
    config = GraniteSpeechConfig(
        text_config=text.config, encoder_config=encoder, projector_config=projector, audio_token_index=319,
        has_lora_adapter=False, tie_word_embeddings=True, window_size=5, downsample_rate=5,
    )  # fmt: skip
    model = GraniteSpeechForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(folder)
    # The names of the published Granite Speech models.
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name.replace("language_model.model.model.", START): values for name, values in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(f"{base}/{name}", folder / name)
    return folder


@pytest.fixture(scope="module")
def server(key, wrapped, tmp_path_factory):
    with serving(WRAPPED, ServerModel(wrapped, "float32", 16, cuda=False), tmp_path_factory.mktemp("vllm")) as [found]:
        yield found


@pytest.fixture(scope="module")
def plain_server(key, wrapped, tmp_path_factory):
    with serving(WRAPPED, ServerModel(wrapped, "float32", None, cuda=False), tmp_path_factory.mktemp("vllm-plain")) as [found]:
        yield found


@pytest.fixture(autouse=True)
def unknown(request):
    """Each test meets a server that has shown nothing yet."""
    for name in {"server", "plain_server"} & set(request.fixturenames):
        request.getfixturevalue(name).calibrated = None


@pytest.fixture
def new_policy(base_ref):
    """A new adapter, which is zero: the policy is the base."""
    return trainable_policy(base_ref, ModelConfig(), device=torch.device("cpu"), seed=1)


def differences(engine, policy, prompts):
    """How far the log-probabilities of what a server sampled are from those of the policy here, and from those of its base."""
    requests = [Request(prompt, completion_seed(1, index)) for index, prompt in enumerate(prompts)]
    drawn = engine.generate(requests, sampling(temperature=1.0))
    batch = token_batch(prompts, [one.token_ids for one in drawn], [*range(len(prompts))], device=torch.device("cpu"))
    given = torch.tensor([logp for one in drawn for logp in one.logprobs])
    with torch.no_grad():
        here = completion_logprobs(policy.eval(), batch, temperature=1.0).logps[batch.completion_mask]
        with policy.disable_adapter():
            base = completion_logprobs(policy, batch, temperature=1.0).logps[batch.completion_mask]
    return here - given, base - given


def assert_samples_from(engine, policy, prompts):
    here, base = differences(engine, policy, prompts)
    torch.testing.assert_close(here, torch.zeros_like(here), rtol=0, atol=1e-4)
    assert base.abs().mean() > 0.05


@pytest.mark.parametrize("merged", [False, True], ids=["adapter", "merged"])
def test_the_keys_are_written_with_the_names_of_the_servers_model(new_policy, tokenizer, prompts, tmp_path, request, merged):
    found = request.getfixturevalue("plain_server" if merged else "server")
    engine = engine_on(found, new_policy, tokenizer, tmp_path, merged=merged)
    engine.sync()
    moved(new_policy, 0.05)
    engine.sync()
    assert_samples_from(engine, new_policy, prompts)
    # Whoever is not named so would sample from the base.
    assert engine._naming == START
    engine.close()


def test_an_adapter_that_does_nothing_is_refused_at_update_0_by_name(server, new_policy, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "likely_namings", lambda *_: [None])
    engine = engine_on(server, new_policy, tokenizer, tmp_path)
    with pytest.raises(RolloutError, match="shows no shift from its base") as caught:
        engine.sync()
    assert caught.value.place == server.address
    assert "It serves a GraniteSpeechForConditionalGeneration, in whose files 21 of 21 keys match nothing" in caught.value.message
    assert "model.layers.0.mlp.down_proj" in caught.value.message
    engine.close()


def test_the_adapter_of_another_stage_is_refused_at_update_0(server, base_ref, new_policy, tokenizer, tmp_path):
    other_policy = moved(trainable_policy(base_ref, ModelConfig(), device=torch.device("cpu"), seed=2), 0.05)
    other = engine_on(server, other_policy, tokenizer, tmp_path / "other")
    other.sync()
    theirs = other._folder(other._present)
    for planted, wanted in (("calibration", "does not take over the policy"), ("000001", "does not serve the trainer's policy")):
        server.calibrated = None
        engine = engine_on(server, new_policy, tokenizer, tmp_path / planted)
        post = engine._post

        def swapped(server, path, body, *, post=post, planted=planted):
            if path == "/v1/load_lora_adapter" and planted in body["lora_name"]:
                body = body | {"lora_path": str(theirs)}
            return post(server, path, body)

        engine._post = swapped
        with pytest.raises(RolloutError, match=f"{wanted}: its shift from the base is another one"):
            engine.sync()
        engine.close()
    other.close()


def test_an_adapter_that_is_evaluated_is_served_or_refused(server, policy, tokenizer, prompts, tmp_path, monkeypatch):
    policy.save_pretrained(str(tmp_path / "adapter"))
    before = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    sampler = VllmSampler(tokenizer, None, CONFIG, [server], tmp_path / "adapter", scratch=tmp_path / "scratch")
    sampler.sync()
    assert_samples_from(sampler, moved(policy, 0.0), prompts)
    sampler.close()
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) == before
    assert not (tmp_path / "scratch").exists()
    server.calibrated = None
    monkeypatch.setattr(calibration, "likely_namings", lambda *_: [None])
    ignored = VllmSampler(tokenizer, None, CONFIG, [server], tmp_path / "adapter", scratch=tmp_path / "scratch")
    with pytest.raises(RolloutError, match="it answers as its base model does"):
        ignored.sync()
    ignored.close()

"""Added tokens: their rows start near the mean, are trained by an adapter, and end up in the merged model."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.folded_adapter import FoldedPolicy
from grpo_tasks.policy.load import load_base, load_policy, load_tokenizer, save_for_server, save_trained, trainable_policy
from grpo_tasks.policy.logprobs import OwnHead, completion_logprobs, score_tokens
from grpo_tasks.policy.merge import merge
from schemas.config.model import ModelConfig
from schemas.errors import ConfigError, ModelError
from schemas.results.model import MergeSpec, ModelRef
from tests.attention.test_packed_attention import SMALL
from tests.benchmarks.count_decode import Reads

CPU = torch.device("cpu")
TOKENS = ["<ask>", {"token": "<search>", "special": True}]


@pytest.fixture(scope="module")
def untied(tmp_path_factory, tokenizer):
    """A model whose output layer has weights of its own, with more rows than tokens, as many models have."""
    folder = tmp_path_factory.mktemp("untied")
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SMALL | {"vocab_size": 384}, tie_word_embeddings=False)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=["tied", "untied"])
def config(request, untied):
    return ModelConfig(path="embedded:base" if request.param == "tied" else untied, added_tokens=TOKENS, merged_dtype="float32")


@pytest.fixture
def ref(config):
    return ModelRef(path=config.path)


@pytest.fixture
def trained(ref, config):
    """A policy whose adapter and rows have moved."""
    policy = trainable_policy(ref, config, device=CPU, seed=1, token_seed=5)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy.eval()


def test_a_chunk_of_the_head_brings_no_numbers_to_the_device(trained):
    head, folded, hidden = OwnHead(trained), FoldedPolicy(trained), torch.randn(7, trained.config.hidden_size)
    with Reads() as reads, torch.no_grad():
        score_tokens(head, hidden, torch.zeros(7, dtype=torch.long), temperature=1.0, rows=2)
        folded.sync()
    assert reads.count == 0


def sample(ref, config):
    tokenizer = load_tokenizer(ref, config)
    return torch.tensor([tokenizer("<search>What is 3 + 4?<ask> <search>")["input_ids"]]), tokenizer


def test_new_rows_start_near_the_mean_by_the_seed_of_the_run(ref, config):
    models = [load_base(ref, config, device=CPU, token_seed=seed) for seed in (5, 5, 6)]
    ids = load_tokenizer(ref, config).convert_tokens_to_ids(["<ask>", "<search>"])
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        first, again, other = (getattr(model, layer)().weight for model in models)
        assert torch.equal(first, again)
        assert torch.equal(first[: ids[0]], other[: ids[0]])
        known = first[: ids[0]]
        for row in ids:
            assert not torch.equal(first[row], other[row])
            assert ((first[row] - known.mean(0)).abs() < 0.1 * known.std(0)).all()
        assert not torch.equal(first[ids[0]], first[ids[1]])


def test_another_model_than_that_of_the_config_keeps_its_own_tokens(base_ref, untied):
    config = ModelConfig(path=untied, added_tokens=TOKENS)
    assert "<ask>" not in load_tokenizer(base_ref, config).get_vocab()
    plain = load_base(base_ref, ModelConfig(), device=CPU)
    assert load_base(base_ref, config, device=CPU).config.vocab_size == plain.config.vocab_size


def test_a_token_starts_out_like_the_text_that_it_names(base_ref):
    like = ModelConfig(
        path=base_ref.path, added_tokens=[{"token": "<ask>", "like": "7"}, {"token": "<two>", "like": "77"}, "<mean>"]
    )
    plain, tokenizer = load_base(base_ref, ModelConfig(), device=CPU), load_tokenizer(base_ref, like)
    rows = load_base(base_ref, like, device=CPU).get_input_embeddings().weight
    seven = plain.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("7")]
    near = [
        torch.cosine_similarity(rows[tokenizer.convert_tokens_to_ids(name)], seven, dim=0)
        for name in ("<ask>", "<two>", "<mean>")
    ]
    assert near[0] > 0.99
    assert near[1] > 0.99
    assert near[2] < 0.5


def test_a_text_of_no_known_token_is_no_start(base_ref):
    config = ModelConfig(path=base_ref.path, added_tokens=["<ask>", {"token": "<more>", "like": "<ask>"}])
    with pytest.raises(ConfigError, match="no token that the model knows"):
        load_base(base_ref, config, device=CPU)


def test_tokens_get_ids_in_config_order_and_leave_the_text(ref, config):
    ids, tokenizer = sample(ref, config)
    ask, search = tokenizer.convert_tokens_to_ids(["<ask>", "<search>"])
    assert search == ask + 1 == len(tokenizer) - 1
    assert ids[0].tolist().count(search) == 2
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "What is 3 + 4?<ask> "
    assert tokenizer.eos_token == load_tokenizer(ref).eos_token


@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_only_the_rows_of_added_tokens_are_trained_in_every_layout(trained, ref, config, layout):
    ids, _ = sample(ref, config)
    rows = {name: p for name, p in trained.named_parameters() if p.requires_grad and "lora_" not in name}
    assert [len(p) for p in rows.values()] == ([2] if config.path == "embedded:base" else [2, 2])
    batch = token_batch([ids[0, :4].tolist()], [ids[0, 4:].tolist()], [0], device=CPU)
    found = completion_logprobs(trained, batch, temperature=1.0, layout=layout).logps
    wanted = trained(ids).logits[0, 3:-1].log_softmax(-1).gather(-1, ids[0, 4:, None]).squeeze(-1)
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-4)
    with trained.disable_adapter(), torch.no_grad():
        base = completion_logprobs(trained, batch, temperature=1.0, layout=layout).logps
        plain = (
            load_base(ref, config, device=CPU, token_seed=5)(ids)
            .logits[0, 3:-1]
            .log_softmax(-1)
            .gather(-1, ids[0, 4:, None])
            .squeeze(-1)
        )
    torch.testing.assert_close(base[0], plain, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(base[0], found[0], rtol=1e-4, atol=1e-4)
    parameters = list(rows.values())
    mine = torch.autograd.grad(found.sum(), parameters, retain_graph=True)
    for gradient, plain in zip(mine, torch.autograd.grad(wanted.sum(), parameters), strict=True):
        assert gradient.abs().sum() > 0
        torch.testing.assert_close(gradient, plain, rtol=1e-3, atol=1e-3)


def test_the_folded_copy_follows_the_trained_rows(trained, ref, config):
    ids, _ = sample(ref, config)
    before = trained.get_base_model().get_input_embeddings().original_module.weight.clone()
    folded = FoldedPolicy(trained)
    torch.testing.assert_close(folded.model(ids).logits, trained(ids).logits, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "trainable_tokens" in name:
                parameter.add_(1.0)
    assert not torch.allclose(folded.model(ids).logits, trained(ids).logits, atol=1e-2)
    folded.sync()
    torch.testing.assert_close(folded.model(ids).logits, trained(ids).logits, rtol=1e-4, atol=1e-3)
    assert torch.equal(trained.get_base_model().get_input_embeddings().original_module.weight, before)
    tied = folded.model.get_input_embeddings().weight is folded.model.get_output_embeddings().weight
    assert tied == trained.config.tie_word_embeddings


def test_the_adapter_holds_its_rows_and_no_other_embedding(trained, ref, config, tmp_path):
    ids, tokenizer = sample(ref, config)
    save_trained(trained, tokenizer, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {len(t) for name, t in saved.items() if "lora_" not in name} == {2}
    again = load_policy(ref.model_copy(update={"adapter": tmp_path}), config, device=CPU, token_seed=77)
    # The policy that is trained has lean layers, which round in another way.
    torch.testing.assert_close(again(ids).logits, trained(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_merged_folder_equals_base_and_adapter_and_has_the_tokens(trained, ref, config, tmp_path):
    ids, tokenizer = sample(ref, config)
    save_trained(trained, tokenizer, tmp_path / "adapter")
    chats = [[{"role": "user", "content": f"What is {n} + 27? <search>"}] for n in (15, 60)]
    spec = MergeSpec(model=config, ref=ref.model_copy(update={"adapter": tmp_path / "adapter"}), prompts=chats, max_new_tokens=12)
    figures = merge(spec, tmp_path, device=CPU)
    assert figures.merge_difference < 1e-3
    assert figures.greedy_agreement == 1.0
    model, reloaded = (kind.from_pretrained(tmp_path / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert reloaded("<search>What is 3 + 4?<ask> <search>")["input_ids"] == ids[0].tolist()
    assert "<search>" not in reloaded.decode(ids[0], skip_special_tokens=True)
    torch.testing.assert_close(model(ids).logits, trained(ids).logits, rtol=1e-3, atol=1e-3)


def test_a_folder_for_a_server_with_its_own_head_is_equal(trained, ref, config, tmp_path):
    ids, _ = sample(ref, config)
    model = FoldedPolicy(trained).model
    save_for_server(model, tmp_path / "m", untie=True)
    apart = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert not apart.config.tie_word_embeddings
    assert apart.get_input_embeddings().weight is not apart.get_output_embeddings().weight
    torch.testing.assert_close(apart(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert model.config.tie_word_embeddings == trained.config.tie_word_embeddings


def test_rows_are_trained_in_float32_on_a_bfloat16_base(base_ref):
    config = ModelConfig(dtype="bfloat16", added_tokens=TOKENS)
    policy = trainable_policy(base_ref, config, device=CPU, seed=1)
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}


def test_low_rank_matrices_on_a_layer_with_trained_rows_are_refused(base_ref):
    config = ModelConfig(added_tokens=TOKENS, lora={"target_modules": ["q_proj", "embed_tokens"]})
    with pytest.raises(ModelError, match="embed_tokens cannot have low-rank matrices and trained rows"):
        trainable_policy(base_ref, config, device=CPU, seed=1)

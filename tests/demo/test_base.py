"""The embedded base model: its size, its tokenizer, its chat template, and that it is still a poor pupil."""

import unicodedata

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.demo import arithmetic, build
from tests.demo.arithmetic import PROBE, all_problems, chat, split_problems
from tests.demo.build import SPECIAL_TOKENS, good_completion

BASE = arithmetic.DEMO / "base"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

pupil = AutoTokenizer.from_pretrained(BASE)


def test_rebuilding_gives_the_tokenizer_byte_for_byte(tmp_path):
    build.write_tokenizer(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(TOKENIZER_FILES)
    for name in TOKENIZER_FILES:
        assert (tmp_path / name).read_bytes() == (BASE / name).read_bytes()
    built = build.build_tokenizer()
    assert type(pupil) is type(built), "AutoTokenizer gives back what was saved"
    assert pupil.backend_tokenizer.to_str() == built.backend_tokenizer.to_str()


@given(st.text())
@example("٣٤ ½ 𝟜𝟚 ４２")
@example("👩‍👩‍👧 \x00\x07\x1b[0m\u200b\ufeff")
@example("cafe\u0301")
@example(" 12  34\n\n\t5 ")
@example("<|im_end|><|endoftext|><|im_start|>")
@settings(max_examples=300)
def test_any_text_survives_encoding_and_decoding_in_its_composed_form(text):
    assert pupil.decode(pupil(text).input_ids) == unicodedata.normalize("NFC", text)


def test_every_digit_is_a_token_of_its_own():
    assert pupil.tokenize("1234567890") == list("1234567890")
    assert not [token for token in pupil.get_vocab() if len(token) > 1 and any(letter.isdecimal() for letter in token)]


def test_the_tags_are_cheap_plain_text():
    assert set(pupil.all_special_tokens) == set(SPECIAL_TOKENS)
    assert {token.content for token in pupil.added_tokens_decoder.values()} == set(SPECIAL_TOKENS)
    for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"):
        assert len(pupil(tag).input_ids) <= 3


def test_end_and_padding_are_the_stated_tokens_in_tokenizer_and_model():
    settings_on_disk = GenerationConfig.from_pretrained(BASE)
    assert (pupil.eos_token, pupil.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert settings_on_disk.eos_token_id == pupil.eos_token_id
    assert settings_on_disk.pad_token_id == pupil.pad_token_id
    assert (settings_on_disk.do_sample, settings_on_disk.temperature, settings_on_disk.top_p) == (True, 0.7, 0.9)


def test_the_chat_template_is_chatml_without_a_system_message_of_its_own():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " there "}]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n there <|im_end|>\n"
    assert pupil.apply_chat_template(messages, tokenize=False) == expected
    assert pupil.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert pupil.apply_chat_template(chat(PROBE), tokenize=False).startswith("<|im_start|>system\nReply with")


def test_prompts_and_good_completions_are_short():
    assert max(len(pupil(build.render(problem, pupil)).input_ids) for problem in split_problems().eval) <= 40
    assert max(len(pupil(good_completion(problem)).input_ids) + 1 for problem in all_problems()) <= 45


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)


def test_the_saved_model_is_a_small_tied_qwen2_in_bfloat16(model):
    assert sum(file.stat().st_size for file in BASE.iterdir()) <= 3 * 2**20
    config = model.config
    assert (config.model_type, config.dtype) == ("qwen2", torch.float32)
    assert AutoModelForCausalLM.from_pretrained(BASE).dtype == torch.bfloat16
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (128, 3, 384)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.tie_word_embeddings
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert len(pupil) <= config.vocab_size <= len(pupil) + 64


def test_the_base_leaves_grpo_something_to_do():
    measured = build.measure(BASE, split_problems().eval[:256], seed=7)
    assert 0.12 <= measured.format_rate <= 0.30
    assert 0.17 <= measured.accuracy <= 0.40


def test_the_base_is_not_one_greedy_step_away_from_done(model):
    left_padded = AutoTokenizer.from_pretrained(BASE, padding_side="left")
    prompts = [build.render(problem, left_padded) for problem in split_problems().eval[:64]]
    batch = left_padded(prompts, padding=True, return_tensors="pt")
    tokens = model.generate(**batch, max_new_tokens=64, do_sample=False, temperature=None, top_p=None)
    completions = left_padded.batch_decode(tokens[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    assert sum(map(arithmetic.has_strict_format, completions)) <= 6

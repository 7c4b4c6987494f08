"""Prompts as token ids: chats by the template, plain prompts as TRL's standard format."""

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.policy.load import load_tokenizer
from schemas.errors import ModelError
from schemas.paths import resolve
from schemas.prompts import PLAIN
from schemas.results.model import ModelRef


def plain(text):
    return [{"role": PLAIN, "content": text}]


def test_a_plain_prompt_is_tokenised_as_it_stands(tokenizer):
    text = "What is 15 + 27?\n"
    assert prompt_ids(tokenizer, plain(text)) == tokenizer(text=text)["input_ids"]
    assert tokenizer.decode(prompt_ids(tokenizer, plain(text))) == text


def test_a_plain_prompt_gets_the_special_tokens_of_its_tokenizer():
    adding = AutoTokenizer.from_pretrained(resolve("embedded:base"))
    first = adding.convert_tokens_to_ids("<|im_start|>")
    marks = [("<|im_start|>", first)]
    adding.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=marks)
    assert prompt_ids(adding, plain("3 + 4")) == adding(text="3 + 4")["input_ids"]
    assert prompt_ids(adding, plain("3 + 4"))[0] == first
    # The template writes its markers itself; none is added to a chat.
    chat = [{"role": "user", "content": "3 + 4"}]
    assert prompt_ids(adding, chat)[:2].count(first) == 1


def test_a_model_without_a_template_takes_plain_prompts_and_refuses_chats(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded:base"))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    loaded = load_tokenizer(ModelRef(path=str(tmp_path)))
    assert prompt_ids(loaded, plain("3 + 4")) == tokenizer("3 + 4")["input_ids"]
    with pytest.raises(ModelError, match="no chat template"):
        prompt_ids(loaded, [{"role": "user", "content": "3 + 4"}])


def test_a_chat_is_rendered_with_the_variables_of_the_config(base_ref, tmp_path):
    tokenizer = load_tokenizer(base_ref)
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    tokenizer.save_pretrained(tmp_path)
    chat = [{"role": "user", "content": "What is 15 + 27?"}]
    made = load_tokenizer(ModelRef(path=str(tmp_path)), None, {"enable_thinking": False})
    wanted = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=False, enable_thinking=False
    )
    assert prompt_ids(made, chat) == wanted
    assert tokenizer.decode(wanted).endswith("<think></think>")

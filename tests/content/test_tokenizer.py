"""What a run's settings change about a tokenizer, with `apply_chat_template(..., **kwargs)` as the reference."""

import copy

import pytest
from transformers import AutoTokenizer

from grpo_tasks.content.tokenizer import add_tokens, prepare, set_template_defaults, stop_token_ids, with_stop_ids
from schemas.config.model import AddedToken, ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ConfigError
from schemas.paths import resolve

CHAT = [{"role": "user", "content": "What is 15 + 27?"}]
TEMPLATE = """
{%- macro end() %}{% if style.loud %}!{% endif %}{% endmacro %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{{ end() }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{{ note }}{% for word in words %}[{{ word }}]{% endfor %}{% endif %}"""


@pytest.fixture
def thinking():
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded:base"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def rendered(tokenizer, **given):
    return tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False, **given)


@pytest.mark.parametrize("opening", ["", "\n", "  \n"])
@pytest.mark.parametrize(
    "given",
    [
        {"enable_thinking": False},
        {"enable_thinking": True, "note": 'é "quoted" %} {{ x }} \\n 😀\n'},
        {"style": {"loud": True, "n": 1.5}, "words": ["a", None, False, 7]},
    ],
    ids="-".join,
)
def test_defaults_of_the_template_render_as_arguments_do(thinking, given, opening):
    thinking.chat_template = opening + TEMPLATE
    given = {"style": {}, **given}
    prepared = copy.deepcopy(thinking)
    set_template_defaults(prepared, given)
    assert rendered(prepared) == rendered(thinking, **given)
    assert rendered(prepared, enable_thinking=None, note="other") == rendered(
        thinking, **given | {"enable_thinking": None, "note": "other"}
    )


def test_a_saved_tokenizer_keeps_the_defaults_and_gets_them_once(thinking, tmp_path):
    set_template_defaults(thinking, {"style": {}, "enable_thinking": False})
    thinking.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert "</think>" in rendered(reloaded)
    set_template_defaults(reloaded, {"style": {}, "enable_thinking": False})
    assert reloaded.chat_template == thinking.chat_template
    assert "</think>" not in rendered(reloaded, enable_thinking=True)


def test_a_tokenizer_without_settings_stays_as_it_is(thinking):
    vocabulary = thinking.get_vocab()
    prepare(thinking, ModelConfig(), RolloutConfig())
    assert (thinking.chat_template, thinking.get_vocab()) == (TEMPLATE, vocabulary)


def test_added_tokens_survive_a_save_and_keep_the_special_tokens_there_are(thinking, tmp_path):
    roles = thinking.special_tokens_map
    new = add_tokens(thinking, [AddedToken(token="<ask>"), AddedToken(token="<search>", special=True), AddedToken(token="7")])
    assert new == [len(thinking) - 2, len(thinking) - 1]
    thinking.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = reloaded("a <search>b<ask>", add_special_tokens=False)["input_ids"]
    assert ids == thinking("a <search>b<ask>", add_special_tokens=False)["input_ids"]
    assert set(new) <= set(ids)
    assert reloaded.decode(ids, skip_special_tokens=True) == "a b<ask>"
    assert reloaded.special_tokens_map == roles
    assert add_tokens(reloaded, [AddedToken(token="<ask>")]) == []


def test_stop_tokens_are_named_by_id_or_by_text(thinking):
    add_tokens(thinking, [AddedToken(token="<search>", special=True)])
    number = thinking.convert_tokens_to_ids("<search>")
    assert stop_token_ids(thinking, ["<search>", 5]) == {number, 5}
    assert with_stop_ids(RolloutConfig(stop_token_ids=["<search>", 5]), thinking).stop_token_ids == [5, number]
    [space] = thinking.encode(" ", add_special_tokens=False)
    assert stop_token_ids(thinking, [" "]) == {space}
    with pytest.raises(ConfigError, match="no token '<other>'") as caught:
        stop_token_ids(thinking, ["<other>"])
    assert "model.added_tokens" in caught.value.fix

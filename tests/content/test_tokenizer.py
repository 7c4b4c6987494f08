"""What a run's settings change about a tokenizer, with `apply_chat_template(..., **kwargs)` as the reference."""

import copy
from datetime import datetime

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from grpo_tasks.content.tokenizer import add_tokens, prepare, set_system_prompt, set_template_defaults, stop_token_ids
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


LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}Today Date: {{ date_string }}"
)
FORMATS = ("%Y-%m-%d", "%d %B %Y", "%A, %-d %b %y %%", "%d/%m/%Y %H:%M", "%j %F %D")


@pytest.mark.parametrize(
    "template", [LLAMA, *(f"{{{{ strftime_now({form!r}) }}}}" for form in FORMATS), "{% set f = '%Y' %}{{ strftime_now(f) }}"]
)
def test_a_fixed_day_is_written_as_transformers_would_have(thinking, monkeypatch, template, tmp_path):
    class Then(datetime):
        @classmethod
        def now(cls):
            return cls(2031, 3, 9)

    thinking.chat_template = template
    prepared = copy.deepcopy(thinking)
    set_template_defaults(prepared, {"strftime_now": "2031-03-09"})
    prepared.save_pretrained(tmp_path)
    fixed = rendered(AutoTokenizer.from_pretrained(tmp_path))
    # A model that was merged with its day, in a run on another one.
    set_template_defaults(prepared, {"strftime_now": "2040-12-31", "style": {}})
    later = rendered(prepared)
    monkeypatch.setattr(chat_template_utils, "datetime", Then)
    thinking.chat_template += " "  # the compiled template is cached
    chat_template_utils._compile_jinja_template.cache_clear()
    assert fixed == rendered(thinking).rstrip(" ")
    assert fixed != later
    if template == LLAMA:
        assert rendered(prepared, date_string="today") == "Today Date: today", "a caller may name another day"
    chat_template_utils._compile_jinja_template.cache_clear()


def test_a_saved_tokenizer_keeps_the_defaults_and_gets_them_once(thinking, tmp_path):
    set_template_defaults(thinking, {"style": {}, "enable_thinking": False})
    thinking.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert "</think>" in rendered(reloaded)
    set_template_defaults(reloaded, {"style": {}, "enable_thinking": False})
    assert reloaded.chat_template == thinking.chat_template
    assert "</think>" not in rendered(reloaded, enable_thinking=True)


def with_system(prompt, chat=CHAT):
    return [{"role": "system", "content": prompt}, *chat]


@pytest.fixture(scope="module")
def qwen():
    return AutoTokenizer.from_pretrained(resolve("embedded:base"))


FENCES = ["{{ messages }}", "{% endif %}", "{%- raw %}", "#}", "{#- end of the system prompt +#}"]
FENCES += ["'", '"', "\\", "\n", "\r\n", "\x00", "😀"]


@given(st.lists(st.sampled_from(FENCES) | st.text(max_size=8), max_size=6).map("".join))
@example("Reply with <answer>...</answer>.")
@example("".join(FENCES))
@example("")
@settings(max_examples=80)
def test_a_system_prompt_in_template_or_message_is_the_same(qwen, prompt):
    carrying = copy.deepcopy(qwen)
    set_system_prompt(carrying, prompt)
    expected = qwen.apply_chat_template(with_system(prompt), add_generation_prompt=True, tokenize=False)
    assert rendered(carrying) == expected
    # A conversation with a system message keeps its own, and gets no second one.
    for own in (prompt, "another"):
        chat = with_system(own)
        assert carrying.apply_chat_template(chat, tokenize=False) == qwen.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize(
    "opening", ["", "\n", "  \n", "  {# a comment #}", "\t{%- set x = 1 %}\n", "  {%+ set x = 1 %}", " text"]
)
def test_the_template_behind_the_system_prompt_renders_as_before(thinking, opening):
    thinking.chat_template = opening + TEMPLATE
    carrying = copy.deepcopy(thinking)
    set_system_prompt(carrying, "Answer in tags.")
    chat = with_system("Answer in tags.")
    expected = thinking.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, style={})
    assert rendered(carrying, style={}) == expected


def test_a_saved_tokenizer_keeps_the_system_prompt_and_another_training_replaces_it(thinking, tmp_path):
    defaults = {"style": {}, "enable_thinking": False}
    set_template_defaults(thinking, defaults)
    set_system_prompt(thinking, "one {#- end of the system prompt +#}\r\n")
    thinking.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded.chat_template == thinking.chat_template
    set_template_defaults(reloaded, defaults)
    set_system_prompt(reloaded, "one {#- end of the system prompt +#}\r\n")
    assert reloaded.chat_template == thinking.chat_template
    set_system_prompt(reloaded, "two")
    set_template_defaults(reloaded, defaults)
    assert "two" in rendered(reloaded)
    assert "one" not in reloaded.chat_template
    assert "</think>" in rendered(reloaded)


def test_a_system_prompt_goes_into_every_template_that_has_one(thinking):
    thinking.chat_template = {"default": TEMPLATE, "tools": "{{ messages[0].content }}"}
    set_system_prompt(thinking, "Be brief.")
    assert thinking.apply_chat_template(CHAT, chat_template="tools", tokenize=False) == "Be brief."
    thinking.chat_template = None
    set_system_prompt(thinking, "Be brief.")
    assert thinking.chat_template is None


def test_a_run_with_tools_renders_the_models_template_for_them(thinking):
    shows = "{{ tools[0].function.name }}:{{ messages[0].content }}"
    thinking.chat_template = {"default": TEMPLATE, "tool_use": shows}
    tools, prepared = [{"type": "function", "function": {"name": "add"}}], copy.deepcopy(thinking)
    set_template_defaults(prepared, {"tools": tools})
    assert rendered(prepared) == rendered(thinking, tools=tools) == "add:What is 15 + 27?"
    vocabulary, template = thinking.get_vocab(), thinking.chat_template
    prepare(thinking, ModelConfig(), RolloutConfig())
    assert (thinking.chat_template, thinking.get_vocab()) == (template, vocabulary), "without settings it stays as it is"


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
    [space] = thinking.encode(" ", add_special_tokens=False)
    assert stop_token_ids(thinking, [" "]) == {space}
    with pytest.raises(ConfigError, match="no token '<other>'") as caught:
        stop_token_ids(thinking, ["<other>"])
    assert "model.added_tokens" in caught.value.fix

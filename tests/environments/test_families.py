"""Calls of every family, against what others write and read: chat templates of published models, and transformers' own parser."""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_template_utils import render_jinja_template
from trl import chat_template_utils as published

from grpo_tasks.environments.calls import MAX_ERROR_CHARS, MOST_CALLS, Call, read_turn
from grpo_tasks.environments.checker import Checker
from grpo_tasks.environments.families import CallFields, call_format_of, family_of, write_call
from schemas.errors import ConfigError

TYPES = {"a": "integer", "b": "number", "c": "boolean", "d": "string", "e": "array", "f": "object"}
SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}}
TOOL = {"type": "function", "function": {"name": "work", "description": "Works.", "parameters": SCHEMA}}
OTHER = {
    "type": "function",
    "function": {"name": "rest", "description": "Rests.", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [TOOL, OTHER]
ARGUMENTS = {"a": 7, "b": 1.5, "c": True, "d": "12", "e": [1, "x"], "f": {"k": None}}
MISTRAL = (
    "{{ bos_token }}{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]{%- else %}{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    "{%- endfor %}</s>{% endif %}{%- endfor %}"
)
"""As Mistral writes calls since its tokenizer 11. TRL has no template of Mistral."""
LISTED = MISTRAL.replace(
    "{%- for call in m.tool_calls or [] %}[TOOL_CALLS]", "[TOOL_CALLS] [{%- for call in m.tool_calls or [] %}"
).replace(
    "{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{%- endfor %}",
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "abcdefghi"}'
    "{{ ', ' if not loop.last }}{%- endfor %}]",
)
TEMPLATES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_5_think": "xml",
    "qwen3_5_nothink": "xml",
    "nemotron_3_nano": "xml",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "llama3_1": "llama",
    "llama3_2": "llama",
}


def template_of(name):
    own = {"mistral": MISTRAL, "mistral_listed": LISTED}
    return own[name] if name in own else getattr(published, f"{name}_chat_template")


def written_by(template, *calls):
    """What a chat template writes behind the words of a turn with these calls."""
    turn = {"role": "assistant", "content": "I work.", "tool_calls": [{"type": "function", "function": call} for call in calls]}
    chat = [{"role": "user", "content": "Work."}, turn]
    [text], _ = render_jinja_template([chat], chat_template=template, tools=TOOLS, bos_token="<s>")
    # Some write no words beside a call, or write them behind it.
    _, found, behind = text.rpartition("I work.")
    return behind if found and "work" in behind else re.split(r"<\|end_header_id\|>\n\n|<\|turn>model\n", text)[-1]


def test_the_chat_templates_of_published_models_name_their_format():
    assert {name: family_of(template_of(name)) for name in TEMPLATES} == TEMPLATES
    assert {family_of(template_of(name)) for name in ("mistral", "mistral_listed")} == {"mistral"}
    for name in ("gemma4", "lfm2_2_5"):
        with pytest.raises(ConfigError, match="is not read"):
            call_format_of("auto", template_of(name))


@pytest.mark.parametrize("name", [*TEMPLATES, "mistral", "mistral_listed"])
def test_what_a_chat_template_writes_is_read(name):
    template = template_of(name)
    once = family_of(template) in ("llama", "harmony")
    calls = [{"name": "work", "arguments": ARGUMENTS}, *([] if once else [{"name": "rest", "arguments": {}}])]
    turn = read_turn(written_by(template, *calls), call_format_of("auto", template), tools=TOOLS, starts_inside=False)
    assert [(call.name, call.arguments, call.error) for call in turn.calls] == [
        (call["name"], call["arguments"], None) for call in calls
    ]
    assert all(Checker(TOOLS).check(call).error is None for call in turn.calls)


RESPONSES = {
    "qwen3": published.qwen3_template,
    "qwen3_5_think": published.qwen3_5_template,
    "nemotron_3_nano": published.nemotron_3_template,
    "glm4moe": published.glm4moe_template,
    "gptoss": published.gptoss_template,
    "gemma4": published.gemma4_template,
}


@pytest.mark.parametrize(("name", "response_template"), RESPONSES.items())
def test_a_tokenizers_response_template_reads_as_transformers_does(name, response_template):
    """Nothing else is needed: here too for a family that has no name."""
    own = call_format_of("auto", template_of(name), response_template)
    assert isinstance(own, CallFields)
    text = written_by(template_of(name), {"name": "work", "arguments": {"a": 7, "d": "twelve", "e": [1]}})
    wanted = parse_response(text, response_template, prefix="", tools=TOOLS)["tool_calls"]
    assert [one["function"]["name"] for one in wanted] == ["work"]
    for call_format in (own, family_of(template_of(name))):
        if call_format is not None:
            turn = read_turn(text, call_format, tools=TOOLS, starts_inside=False)
            assert turn.message()["tool_calls"] == wanted


FREE = st.text(st.characters(codec="utf-8"))
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<>[]"), max_size=30)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


def arguments_of(texts):
    kinds = {"a": st.integers(), "b": NUMBERS, "c": st.booleans(), "d": texts, "e": st.lists(texts | st.integers()),
             "f": st.dictionaries(texts, texts | NUMBERS)}  # fmt: skip
    return st.fixed_dictionaries({}, optional=kinds)


@settings(max_examples=50, deadline=None)
@given(
    arguments_of(PLAIN),
    arguments_of(FREE | st.sampled_from(["</tool_call>", "<|call|>", "[TOOL_CALLS]", "<tool_call>", "</think>"])),
)
def test_what_is_written_is_read_again(plain, free):
    """In formats of JSON whatever the texts hold; in the others, where text is not escaped, unless they hold a tag."""
    for call_format in ("hermes", "harmony", "mistral", "llama", "json", "xml", "glm"):
        given = plain if call_format in ("xml", "glm") else free
        text = write_call("work", given, call_format)
        for written in (text, f"<think>\nhm</think>\n{text}"):
            assert read_turn(written, call_format, tools=TOOLS, starts_inside=False).calls == (Call("work", given),)


XML = "<tool_call>\n<function=work>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "call_format", "said"),
    [
        ("<tool_call>\n<parameter=a>1</parameter></function></tool_call>", "xml", "the call has no name"),
        ('<tool_call>{"name": "work"}</tool_call>', "xml", "the call is not closed"),
        ("<tool_call>\n<function=work>\n<parameter=d>\nhalf", "xml", "the call is not closed"),
        (f"<tool_call>\n<function=work>\n<parameter=d>\nhalf\n{XML}", "xml", "the call is not closed"),
        (XML.replace("7", "x" * 300_000), "xml", "262,144 are the limit"),
        (XML.replace("=a", "=f").replace("7", '{"k": NaN}'), "xml", "not JSON compliant"),
        (XML.replace("=a", "=e").replace("7", "[" * 100_000), "xml", "nested too deeply"),
        ("<tool_call><arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "glm", "the call has no name"),
        ("<tool_call>work<arg_key>a</arg_key><arg_value>1", "glm", "the call is not closed"),
        ("<|channel|>commentary to=functions.work<|message|>{<|call|>", "harmony", "not valid JSON"),
        ("<|channel|>commentary to=functions.work<|message|>[1]<|call|>", "harmony", "the arguments are not a JSON object"),
        ("[TOOL_CALLS]work[ARGS]{oops", "mistral", "not valid JSON"),
        ("[TOOL_CALLS][ARGS]{}", "mistral", "not valid JSON"),
        ('[TOOL_CALLS] ["work"]', "mistral", "a call is a JSON object"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_call_with_an_error(text, call_format, said):
    first, *more = read_turn(text, call_format, tools=TOOLS, starts_inside=False).calls
    assert said in first.error
    assert len(first.error) <= MAX_ERROR_CHARS
    assert [one.error for one in more] == ([None] if XML in text else [])


def test_white_space_of_a_value_and_a_lost_closing_tag_change_nothing():
    code = "\n  if a:\n\treturn b  \n\n"
    turn = read_turn(write_call("work", {"d": code}, "xml").removesuffix("</tool_call>"), "xml", tools=TOOLS)
    assert turn.calls == (Call("work", {"d": code}),)


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>analysis<|message|>CALL<|end|>",
        "<|channel|>analysis<|message|>CALL",
        "<|channel|>final<|message|>CALL<|return|>",
    ],
)
def test_a_call_in_another_channel_does_not_count(text):
    call = write_call("work", {}, "harmony")
    assert read_turn(text.replace("CALL", call), "harmony").calls == ()
    assert len(read_turn(f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{call}", "harmony").calls) == 1


def with_calls(**field):
    return {"start_anchor": "<a>", "fields": {"tool_calls": {"content": "json", **field}}}


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (with_calls(open_pattern="(", close="x"), "invalid open_pattern"),
        (with_calls(opens="x"), "unknown keys"),
        (with_calls(close="x"), "no field of calls has an opening"),
        ({"fields": {"tool_calls": {"open": "x"}}}, "start_anchor"),
        (with_calls(open="x", content="xml-inline", content_args={"tag_pattern": "("}), "invalid open_pattern"),
        (with_calls(open="x", content="kv-lines", content_args={"value_parser": {"name": "xml-inline"}}), "pattern inside"),
        (with_calls(open="x", content_args=[1]), "has no attribute"),
    ],
)
def test_a_damaged_response_template_is_refused(damaged, said):
    with pytest.raises(ConfigError, match=said) as refused:
        call_format_of("auto", "<tool_call>", damaged)
    assert refused.value.place == "interaction.call_format"
    assert call_format_of("hermes", "", damaged) == "hermes"
    # One that knows no calls names no format.
    assert call_format_of("auto", "<tool_call>", {"fields": {"content": {}}}) == "hermes"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"open_pattern": r"(?:x|xx)+$"},
        {"open": "<", "close_pattern": r"(?:x|xx)+$"},
        {"open": "<", "close": ">", "content": "xml-inline", "content_args": {"tag_pattern": r"(?P<key>(?:x|xx)+)(?P<value>)$"}},
    ],
)
def test_a_strangers_pattern_that_never_ends_costs_a_turn_its_calls(fields, monkeypatch):
    monkeypatch.setattr("grpo_tasks.environments.calls.READ_S", 0.3)
    own = call_format_of("auto", "", with_calls(**fields))
    began = time.process_time()
    [call] = read_turn(f"<{'x' * 5_000}!>", own).calls
    assert "cannot be read within 0.3 s" in call.error
    assert time.process_time() - began < 5.0


HOSTILE = [
    "<tool_call>" * 90_000,
    "<tool_call><function=f>" * 40_000,
    "<tool_call><function=f><parameter=a>" * 25_000,
    "<tool_call><function=f>" + "<parameter=a>" * 20_000 + "</function></tool_call>",
    "<tool_call><function=f>" + "<parameter=" * 20_000 + "</function></tool_call>",
    "<tool_call><function=f><parameter=a>" + "\n" * 250_000 + "</function></tool_call>",
    XML * 14_000,
    "<function=" * 90_000,
    "<tool_call>" + " " * 1_000_000,
    "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 8_000 + "</tool_call>",
    "[TOOL_CALLS]" * 80_000,
    "[TOOL_CALLS]f[ARGS]{" * 45_000,
    "<|channel|>analysis" * 50_000,
    "<|channel|>commentary to=functions.f<|message|>{}" * 20_000,
    "<|channel|>commentary" + " " * 1_000_000,
]


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:24])
@pytest.mark.parametrize("call_format", ["xml", "glm", "harmony", "mistral"])
def test_a_million_hostile_characters_are_read_in_bounded_time(text, call_format):
    began = time.process_time()
    turn = read_turn(text, call_format, tools=TOOLS)
    # Linear time is below two seconds, quadratic time would be minutes.
    assert time.process_time() - began < 10.0
    assert len(turn.calls) <= MOST_CALLS
    assert not any("cannot be read within" in (call.error or "") for call in turn.calls)


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=work>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "a</arg_key>",
     "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "work", "to=functions.", "<|channel|>", "commentary", "analysis",
     "<|message|>", "<|call|>", "<|end|>", "<think>", "</think>", "{", "}", "[", "]", '"', "\ud800", "\n", "NaN", "9" * 5000]
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, max_size=30).map("".join), st.sampled_from(["xml", "glm", "harmony", "mistral", *RESPONSES]))
def test_no_text_makes_the_reader_fail(text, call_format):
    if call_format in RESPONSES:
        call_format = call_format_of("auto", "", RESPONSES[call_format])
    for call in map(Checker(TOOLS).check, read_turn(text, call_format, tools=TOOLS).calls):
        json.dumps([call.name, dict(call.arguments), call.error], allow_nan=False)
        (call.name + (call.error or "")).encode()

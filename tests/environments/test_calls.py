"""What counts as a call of a turn, and what a hostile turn can do: nothing."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_tasks.environments.calls import MOST_CALLS, Call, read_turn, spoken
from grpo_tasks.environments.checker import Checker
from grpo_tasks.environments.families import call_format_of, write_call
from schemas.errors import ConfigError

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "nullable": True}, "nullable": {"type": "string"}},
            "required": ["a"],
        },
    },
}

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
TEXTS = st.text() | st.sampled_from(["</tool_call>", "<tool_call>", "<think>", "</think>", "<|im_end|>", "<|python_tag|>", '"}}'])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=4)
PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "add", "arguments": {"a": 1}}', "{", "}", '"', "\\", "[",
     "]", ";", "<|python_tag|>", "<|im_end|>", "\n", "x", '{"name"', "\ud800", "NaN", "1e999", "9" * 5000, "[" * 100_000]
)  # fmt: skip


def hermes(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@settings(max_examples=50)
@given(NAMES, ARGUMENTS, st.booleans())
def test_an_honest_call_is_read_as_it_was_written(name, arguments, escaped):
    """Whatever is in its arguments: markers of calls, of reasoning and of the chat."""
    for call_format in ("hermes", "llama", "json"):
        written = write_call(name, arguments, call_format)
        assert read_turn(written, call_format, starts_inside=False).calls == (Call(name, arguments),)
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=escaped)
    llama = json.dumps({"name": name, "parameters": arguments}, ensure_ascii=escaped)
    call = Call(name, arguments)
    assert read_turn(f"Let me see.\n<tool_call>\n{text}\n</tool_call><|im_end|>\n", "hermes", starts_inside=False).calls == (
        call,
    )
    assert read_turn(f"<think>a</think>\n<tool_call>{text}</tool_call>", "hermes").calls == (call,)
    assert read_turn(f"{llama}<|eot_id|>", "llama", starts_inside=False).calls == (call,)
    assert read_turn(f"<|python_tag|>{llama}<|eom_id|>", "llama", starts_inside=False).calls == (call,)
    assert read_turn(f"<think>a</think>{text}", "json").calls == (call,)


@settings(max_examples=100)
@given(st.lists(PIECES, max_size=30).map("".join) | st.text(), st.sampled_from(["hermes", "llama", "json"]),
       st.sampled_from([None, True, False]))  # fmt: skip
def test_no_text_makes_the_reader_fail(text, call_format, starts_inside):
    turn = read_turn(text, call_format, starts_inside=starts_inside, reasoning=("think", "reasoning"))
    checker = Checker([ADD])
    for call in turn.calls:
        checked = checker.check(call)
        assert checked.error is None or len(checked.error) <= 700
        assert checked.error is not None or checked.arguments.keys() <= {"a", "b", "nullable"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 90_000,
        "<tool_call>{" * 80_000,
        '<tool_call>{"' * 70_000,
        '<tool_call>{"a": "' * 50_000,
        '<tool_call>{"name": "add", "arguments": {"a": "' + "x" * 1_000_000,
        "<think>" * 140_000,
        "<think></think>" * 60_000 + "<tool_call>",
        "</think>" * 120_000 + hermes("add", {"a": 1}),
        "[" * 1_000_000,
        '{"name": "add", "parameters": ' + "[" * 1_000_000,
        "<|im_end|>" * 100_000,
        " " * 1_000_000 + "<tool_call>",
        '{"a":1};' * 100_000,
        '{"name": "add"};' * 60_000,
        "<tool_call>{}</tool_call>" * 40_000,
    ],
    ids=lambda text: text[:24],
)
@pytest.mark.parametrize("call_format", ["hermes", "llama", "json"])
def test_a_million_hostile_characters_are_read_in_bounded_time(text, call_format):
    began = time.process_time()
    turn = read_turn(text, call_format)
    # Two orders of magnitude above what it takes; quadratic time would be minutes.
    assert time.process_time() - began < 10.0
    assert len(turn.calls) <= MOST_CALLS


@pytest.mark.parametrize(
    "text",
    [
        "<think>" + hermes("add", {"a": 1}) + "</think>",
        "<think>" + hermes("add", {"a": 1}),
        "<think><think></think>" + hermes("add", {"a": 1}) + "</think>",
        "I call " + hermes("add", {"a": 1}) + "</think> done",
        "<reasoning>" + hermes("add", {"a": 1}) + "</reasoning>",
        '<think>{"name": "add", "arguments": {"a": 1}}',
    ],
)
@pytest.mark.parametrize("call_format", ["hermes", "json"])
def test_a_call_inside_a_reasoning_block_does_not_count(text, call_format):
    turn = read_turn(text, call_format, reasoning=("think", "reasoning"))
    assert turn.calls == ()
    assert turn.content == text


def test_a_prompt_that_opens_reasoning_makes_the_turn_reasoning():
    call = hermes("add", {"a": 1})
    assert read_turn(call, "hermes", starts_inside=True).calls == ()
    assert len(read_turn(f"hm</think>{call}", "hermes", starts_inside=True).calls) == 1
    assert len(read_turn(f"{call} </think>", "hermes", starts_inside=False).calls) == 1


def test_only_its_own_tag_closes_the_block_that_the_prompt_has_opened():
    call, tags = hermes("add", {"a": 1}), ("think", "reasoning")
    for inside in (f"</reasoning>{call}", f"<reasoning>hm</reasoning>{call}"):
        assert read_turn(inside, "hermes", reasoning=tags, starts_inside=True).calls == ()
    assert len(read_turn(f"<reasoning>hm</reasoning></think>{call}", "hermes", reasoning=tags, starts_inside=True).calls) == 1


def test_several_calls_keep_their_order_and_the_text_around_them():
    text = f"First{hermes('add', {'a': 1})} then {hermes('add', {'a': 2})}<|im_end|>"
    turn = read_turn(text, "hermes")
    assert turn.content == "First then"
    assert [call.arguments for call in turn.calls] == [{"a": 1}, {"a": 2}]
    assert turn.message() == {
        "role": "assistant",
        "content": "First then",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": number}}} for number in (1, 2)],
    }
    pair = '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'
    assert [call.arguments for call in read_turn(pair, "llama").calls] == [{"a": 1}, {"a": 2}]
    several = json.dumps([{"name": "add", "arguments": {"a": one}} for one in (1, 2)])
    assert [call.arguments for call in read_turn(several, "json").calls] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "not valid JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not a JSON number"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "a number is not finite"),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', "the call has no name"),
        ('<tool_call>["add"]</tool_call>', "a call is a JSON object"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments are not a JSON object"),
        ('<tool_call>{"name": "add"} and more</tool_call>', "expected </tool_call>"),
        ('<tool_call>{"name": "add", "arguments": ' + "[" * 100_000, "nested too deeply"),
        ('<tool_call>{"name": "add", "arguments": {"a": "' + "x" * 1_000_000 + '"}}</tool_call>', "262,144 are the limit"),
        ("<tool_call>\n", "not valid JSON"),
    ],
    ids=lambda text: text[:40],
)
def test_a_call_that_cannot_be_read_is_a_call_with_an_error(text, said):
    (call,) = read_turn(text, "hermes").calls
    assert call.error is not None
    assert said in call.error


def test_a_broken_call_does_not_hide_the_next_one():
    turn = read_turn(f"<tool_call>{{oops</tool_call>{hermes('add', {'a': 2})}", "hermes")
    assert [call.error is None for call in turn.calls] == [False, True]


@pytest.mark.parametrize("text", ["", "42", '{"a": 1}', '{"name": "Bob", "age": 3}', "[1, 2]", '{"name": "add"} is a call', "{"])
@pytest.mark.parametrize("call_format", ["llama", "json"])
def test_an_answer_that_is_json_is_no_call(text, call_format):
    turn = read_turn(text, call_format)
    assert not [call for call in turn.calls if call.error is None and call.name != "add"]
    assert turn.calls == () or "is a call" in text


@pytest.mark.parametrize("text", ['{"name": "Paris"}', '{"id": 1, "name": "Paris"}', '[{"name": "Paris"}]', '{"name": "Paris", '])
@pytest.mark.parametrize("call_format", ["llama", "json"])
def test_a_name_alone_is_an_answer_unless_a_tool_has_it(text, call_format):
    assert read_turn(text, call_format, tools=[ADD]).calls == ()
    assert len(read_turn(text.replace("Paris", "add"), call_format, tools=[ADD]).calls) == 1


@pytest.mark.parametrize(
    "text", ['{"type": "function", "function": {"name": "sub"}}', '{"name": "sub", "arguments": {', "<|python_tag|>{}"]
)
@pytest.mark.parametrize("call_format", ["llama", "json"])
def test_what_is_meant_as_a_call_is_one_whatever_its_name(text, call_format):
    assert len(read_turn(text, call_format, tools=[ADD]).calls) == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (Call("sub", {}), "there is no tool sub; tools: add"),
        (Call("add", {}), "'a' is a required property"),
        (Call("add", {"a": "1"}), "a: '1' is not of type 'integer'"),
        (Call("add", {"a": 1, "c": 2}), "add has no argument c; arguments: a, b, nullable"),
        (Call("add", {"a": "x" * 100_000}), "is not of type 'integer'"),
        (Call("add", {"a": 1, "nullable": None}), "None is not of type 'string'"),
    ],
)
def test_arguments_that_do_not_fit_the_schema_are_refused_shortly(call, said):
    checked = Checker([ADD]).check(call)
    assert checked.error is not None
    assert said in checked.error
    assert len(checked.error) < 500


def test_an_optional_argument_may_be_null():
    assert Checker([ADD]).check(Call("add", {"a": 1, "b": None})).error is None


def test_the_chat_template_names_the_format():
    assert call_format_of("auto", "{% if tools %}return <tool_call>{...}</tool_call>{% endif %}") == "hermes"
    assert call_format_of("auto", '{% if tools %}{"name": name, "parameters": ...}{% endif %}') == "llama"
    assert call_format_of("auto", "{{ tools }}") == "json"
    assert call_format_of("llama", "") == "llama"
    with pytest.raises(ConfigError, match="does not show tools"):
        call_format_of("auto", "{{ messages }}")
    with pytest.raises(ConfigError, match=r"<\|tool_call, which is not read"):
        call_format_of("auto", "{{ tools }} <|tool_call|>[NAME]")


def test_the_end_marks_of_a_turn_are_no_text():
    assert spoken("up<|im_end|>\n") == "up"
    assert spoken("up\n") == "up\n"
    assert spoken("<|im_end|> up") == "<|im_end|> up"

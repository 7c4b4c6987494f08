"""The tokens of a conversation with calls, in the chat templates of published models: what a template writes, once."""

from copy import deepcopy

import pytest
from trl import chat_template_utils as published

from grpo_tasks.content.tokenizer import set_template_defaults
from grpo_tasks.rollout.conversations import TurnTokens

MISTRAL = (
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{- raise_exception('ids have nine characters') }}{%- endif %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{%- elif m.tool_calls %}{%- for call in m.tool_calls %}{%- if call.id is not defined or call.id | length != 9 %}"
    "{{- raise_exception('ids have nine characters') }}{%- endif %}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}{%- endfor %}{{- eos_token }}"
    "{%- else %}{{- m.content + eos_token }}{%- endif %}{%- endfor %}"
)
"""As Mistral writes and refuses: calls and answers carry an id. TRL has no template of Mistral."""
NAMES = ("qwen2_5", "qwen3_5_think", "glm4moe", "gptoss", "llama3_1", "mistral")
ENDS = {"qwen2_5": "<|im_end|>", "qwen3_5_think": "<|im_end|>", "glm4moe": "<|observation|>", "gptoss": "<|call|>",
        "llama3_1": "<|eot_id|>", "mistral": "<|im_end|>"}  # fmt: skip
SPECIAL = [
    "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|channel|>", "<|message|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]  # fmt: skip


@pytest.fixture
def tokenizer_of(tokenizer):
    def make(name):
        made = deepcopy(tokenizer)
        made.add_tokens(SPECIAL, special_tokens=True)
        made.chat_template = MISTRAL if name == "mistral" else getattr(published, f"{name}_chat_template")
        return made

    return make


def turn_of(number, words=""):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": number}}}
    return {"role": "assistant", "content": words, "tool_calls": [call]}, {
        "role": "tool",
        "name": "add",
        "content": f"{number} more",
    }


@pytest.mark.parametrize("name", NAMES)
def test_five_turns_of_calls_are_the_text_of_the_chat_template(tokenizer_of, name):
    """Each turn is written as the template writes it, and only what stands between two turns is added."""
    made = tokenizer_of(name)
    tokens, chat = TurnTokens(made), [{"role": "user", "content": "Count."}]

    def text(messages, *, opened):
        linked = [dict(one) for one in messages]
        for one in linked:
            if one["role"] == "tool":
                one["tool_call_id"] = "0" * 9
            elif "tool_calls" in one:
                one["tool_calls"] = [{**call, "id": "0" * 9} for call in one["tool_calls"]]
        return made.apply_chat_template(linked, add_generation_prompt=opened, tokenize=False)

    ids = tokens.prompt(chat)
    for number in range(5):
        turn, answer = turn_of(number, f"<think>\nIt is {number}.\n</think>\n\n" if name == "qwen3_5_think" else "")
        before = text(chat, opened=True)
        # GLM's template writes the end of a turn with calls only where an answer follows.
        after = text([*chat, turn, answer], opened=False)
        assert after.startswith(before)
        written = after[len(before) :].partition(ENDS[name])
        ids += made("".join(written[:2]), add_special_tokens=False)["input_ids"]
        assert tokens.closed(ids)
        said = tokens.after(chat, turn, [answer], closed=True)
        ids += said[1:] if said[:1] == ids[-1:] else said
        chat += [turn, answer]
    assert made.decode(ids) == text(chat, opened=True)
    assert ("It is 0." in made.decode(ids)) == (name == "qwen3_5_think"), "reasoning stays where nobody asks anything new"


@pytest.mark.parametrize(("settings", "same"), [({}, False), ({"preserve_thinking": True}, True)])
def test_sampled_reasoning_stays_where_a_template_would_strip_it(tokenizer_of, settings, same):
    """A client of the deployed model has the same history only where its template keeps reasoning."""
    made = tokenizer_of("qwen3_6")
    set_template_defaults(made, settings)
    tokens, chat = TurnTokens(made), [{"role": "user", "content": "Guess."}]
    sampled = "It is 7.\n</think>\n\n7"
    turn, answer = {"role": "assistant", "content": f"<think>\n{sampled}"}, {"role": "user", "content": "Lower."}
    ids = tokens.prompt(chat) + made(f"{sampled}<|im_end|>", add_special_tokens=False)["input_ids"]
    ids += tokens.after(chat, turn, [answer], closed=True)
    assert "It is 7." in made.decode(ids)
    shown = made.apply_chat_template([*chat, turn, answer], add_generation_prompt=True, tokenize=False)
    assert (made.decode(ids) == shown) == same


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_could_not_be_read_is_answered_in_every_family(tokenizer_of, name):
    """Without a name it is no call of the message, and some templates refuse an answer to nothing."""
    made = tokenizer_of(name)
    turn = {"role": "assistant", "content": "I try."}
    for closed in (True, False):
        said = TurnTokens(made).after([{"role": "user", "content": "Count."}], turn, [turn_of(1)[1]], closed=closed)
        text = made.decode(said)
        assert "1 more" in text
        assert "I try." not in text
        assert "unknown" not in text or name == "gptoss"

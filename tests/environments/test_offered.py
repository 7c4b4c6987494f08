"""Prompts show the tools wherever they are rendered."""

from copy import deepcopy

import pytest

from grpo_tasks.content.tokenizer import prompt_ids, set_template_defaults
from grpo_tasks.environments.contract import with_tools
from schemas.config.rollout import RolloutConfig

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers: \"a\" and 'b' {{ b }}",
        "parameters": {"type": "object", "properties": {"a": {"type": "number", "default": None}}, "required": ["a"]},
    },
}
SHOWS = "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif -%}"
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def offering(tokenizer):
    made = deepcopy(tokenizer)
    made.chat_template = SHOWS + made.chat_template
    set_template_defaults(made, with_tools(RolloutConfig(), [ADD]).chat_template_kwargs)
    return made


def test_a_prompt_is_that_of_apply_chat_template_with_these_tools(tokenizer, offering):
    plain = deepcopy(tokenizer)
    plain.chat_template = SHOWS + plain.chat_template
    wanted = plain.apply_chat_template(CHAT, tools=[ADD], add_generation_prompt=True, tokenize=False)
    assert '"name": "add"' in wanted
    assert offering.decode(prompt_ids(offering, CHAT)) == wanted
    assert offering.apply_chat_template(CHAT, tools=[], add_generation_prompt=True, tokenize=False) == tokenizer.decode(
        prompt_ids(tokenizer, CHAT)
    )


def test_without_tools_nothing_changes():
    rollout = RolloutConfig(chat_template_kwargs={"enable_thinking": False})
    assert with_tools(rollout, []) is rollout
    assert with_tools(rollout, [ADD]).chat_template_kwargs == {"enable_thinking": False, "tools": [ADD]}

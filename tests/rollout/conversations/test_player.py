"""What plays the conversations of a process: real tools, and the words of the policy as the model's template leaves them."""

import pytest

from grpo_tasks.policy.load import load_tokenizer
from grpo_tasks.rollout.conversations.player import opened_reasoning, player
from schemas.config.completion import CompletionConfig
from schemas.config.model import ModelConfig
from schemas.config.rollout import InteractionConfig, RolloutConfig
from schemas.results.model import ModelRef
from tests.rollout.tool_model import CALL, TOOLS, write_model


@pytest.fixture
def answered(tmp_path, monkeypatch):
    """What the tools answer to a first turn of the policy of a model whose template begins the turn so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tools.py").write_text(TOOLS, encoding="utf-8")

    def answer(text, *, opening="", completion=None):
        folder = write_model(tmp_path / "model", opening=opening)
        config = InteractionConfig(tools=["my_tools:add"], workers=1)
        settings = (config, ModelRef(path=str(folder)), ModelConfig(), RolloutConfig())
        with player(*settings, completion=completion or CompletionConfig()) as found:
            found.environments.begin([(0, {"messages": [{"role": "user", "content": "1 + 2?"}]}, 1)])
            (observed,) = found.environments.answer([(0, text)])
        return [message["content"] for message in observed.messages]

    return answer


@pytest.mark.long
@pytest.mark.ci
def test_a_call_is_executed_behind_the_reasoning_and_never_inside_it(answered):
    assert answered(f"<reasoning>hm</reasoning>{CALL}") == ["3"]
    assert answered(f"<reasoning>{CALL}</reasoning>") == []
    assert answered(f"<reasoning>{CALL}") == []
    assert answered(f"<think>{CALL}</think>") == []
    # The name of the block is that of the config.
    plan = CompletionConfig(tags={"reasoning": "plan"})
    assert answered(f"<plan>{CALL}</plan>", completion=plan) == []
    assert answered(f"<reasoning>{CALL}</reasoning>", completion=plan) == ["3"]


@pytest.mark.long
def test_a_template_that_opens_the_reasoning_makes_what_is_written_first_reasoning(answered):
    for opening, tag in (("<think>\n", "think"), ("<reasoning>", "reasoning")):
        assert answered(CALL, opening=opening) == []
        assert answered(f"{CALL}</{tag}>", opening=opening) == []
        assert answered(f"hm</{tag}>{CALL}", opening=opening) == ["3"]
    # A block that the template opens and closes itself, as Qwen3 does without thinking.
    assert answered(CALL, opening="<think>\n\n</think>\n\n") == ["3"]


def test_only_the_beginning_of_the_turn_opens_a_block(tmp_path):
    said = "{{- '<|im_start|>system\\nThink inside <think>.<|im_end|>\\n' -}}"
    tokenizer = load_tokenizer(ModelRef(path=str(write_model(tmp_path / "model", before=said))))
    assert "<think>" in tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert opened_reasoning(tokenizer, ("think",)) is None
    opened = load_tokenizer(ModelRef(path=str(write_model(tmp_path / "opened", before=said, opening="<think>"))))
    assert opened_reasoning(opened, ("reasoning", "think")) == "think"

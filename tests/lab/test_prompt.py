"""The report of the lab shows a prompt as the model reads it. The reference is transformers' own rendering."""

import shutil
from importlib.resources import files

import pytest
from transformers import AutoTokenizer

from grpo_tasks.lab.report import prompt_markdown
from grpo_tasks.steps.probe_rewards import _first_prompt
from schemas.config.load import load_config

THINKING = """\
{%- for message in messages %}{% set content = message.content %}<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


@pytest.fixture
def thinking(tmp_path):
    """The tokenizer of the embedded model with a chat template that has a setting."""
    shutil.copytree(str(files("grpo_tasks.demo") / "base"), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(THINKING)
    return tmp_path / "model"


@pytest.mark.parametrize(("given", "said"), [({}, "not set"), ({"enable_thinking": False}, "false")])
def test_the_first_prompt_stands_as_the_model_reads_it(thinking, make_row, given, said):
    config = load_config("demo", [f"model.path={thinking}", f"rollout.chat_template_kwargs={given}"])
    row = make_row(1)
    shown = _first_prompt(config, [row])
    chat = [dict(message) for message in row.messages]
    tokenizer = AutoTokenizer.from_pretrained(thinking)
    wanted = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **given)
    assert shown == prompt_markdown(wanted, [f"`enable_thinking: {said}`"])
    assert ("</think>" in shown) == bool(given)


def test_a_template_without_settings_has_no_line_about_them(make_row):
    assert "rollout.chat_template_kwargs" not in _first_prompt(load_config("demo"), [make_row(1)])

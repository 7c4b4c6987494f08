"""The report of the lab shows a prompt as the model reads it. The reference is transformers' own rendering."""

import runpy
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers.utils import get_json_schema
from trl import chat_template_utils as published

from grpo_tasks.lab.report import prompt_markdown
from grpo_tasks.steps.probe_rewards import _first_prompt
from schemas.config.load import load_config

CALCULATOR = Path(__file__).resolve().parents[2] / "examples" / "calculator"
THINKING = """\
{%- for message in messages %}{% set content = message.content %}<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


@pytest.fixture
def model_with(tmp_path):
    """Make the embedded model with another chat template."""

    def make(template):
        shutil.copytree(str(files("grpo_tasks.demo") / "base"), tmp_path / "model")
        (tmp_path / "model" / "chat_template.jinja").write_text(template)
        return tmp_path / "model"

    return make


@pytest.mark.parametrize(("given", "said"), [({}, "not set"), ({"enable_thinking": False}, "false")])
def test_the_first_prompt_stands_as_the_model_reads_it(model_with, make_row, given, said):
    thinking = model_with(THINKING)
    config = load_config("demo", [f"model.path={thinking}", f"rollout.chat_template_kwargs={given}"])
    row = make_row(1)
    shown = _first_prompt(config, row.messages)
    chat = [dict(message) for message in row.messages]
    tokenizer = AutoTokenizer.from_pretrained(thinking)
    wanted = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **given)
    assert shown == prompt_markdown(wanted, [f"`enable_thinking: {said}`"])
    assert ("</think>" in shown) == bool(given)


def test_a_template_without_settings_has_no_line_about_them(make_row):
    assert "rollout.chat_template_kwargs" not in _first_prompt(load_config("demo"), make_row(1).messages)


@pytest.mark.parametrize(
    ("family", "effort", "written"),
    [("gptoss", "high", "Reasoning: high\n"), ("qwen3_8", "low", "Reasoning effort is set to low.")],
)
def test_the_reasoning_effort_of_the_config_stands_in_the_prompt(model_with, make_row, family, effort, written):
    model = model_with(getattr(published, f"{family}_chat_template"))
    settings, chat = [f"model.path={model}"], make_row(1).messages
    shown = _first_prompt(load_config("demo", settings), chat)
    assert written not in shown
    assert "`reasoning_effort: not set`" in shown
    shown = _first_prompt(load_config("demo", [*settings, f"rollout.chat_template_kwargs={{reasoning_effort: {effort}}}"]), chat)
    assert written in shown
    assert f'`reasoning_effort: "{effort}"`' in shown


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3_5_think", "gptoss"])
def test_the_prompt_of_the_calculator_shows_its_tool(model_with, tmp_path, monkeypatch, family):
    model = model_with(getattr(published, f"{family}_chat_template"))
    shutil.copytree(CALCULATOR, tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    config = load_config("config.yaml", [f"model.path={model}", "interaction.call_format=auto"])
    chat = [{"role": "system", "content": "Calculate with a tool."}, {"role": "user", "content": "What is 651 * 474?"}]
    shown = _first_prompt(config, chat)
    tool = get_json_schema(runpy.run_path("calculator.py")["calculate"])
    wanted = AutoTokenizer.from_pretrained(model).apply_chat_template(
        chat, tools=[tool], add_generation_prompt=True, tokenize=False
    )
    assert "Calculates an expression of whole numbers." in shown
    assert shown.endswith(prompt_markdown(wanted, []).partition("reads it\n\n")[2])

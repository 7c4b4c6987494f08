"""A chat template, a tokenizer and a header that never end, or take all memory, are refused; what ends is rendered alike."""

import json
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from flows import preflight
from grpo_tasks.content import limited_model as room
from grpo_tasks.content.limited_model import check_model_files, limited_model, limited_templates
from grpo_tasks.content.tokenizer import RefusedError, rendered_all
from grpo_tasks.data.chat_tokens import load_counter
from grpo_tasks.rollout.conversations import TurnTokens, player
from schemas.config.completion import CompletionConfig
from schemas.config.load import load_config
from schemas.config.model import ModelConfig
from schemas.config.rollout import InteractionConfig, RolloutConfig
from schemas.errors import ModelError
from schemas.paths import resolve
from schemas.results.model import ModelRef, StructureSpec
from tests.grpo.conftest import stages
from tests.rollout.tool_model import TOOLS, write_model
from tests.supervised.conftest import sums
from tests.zoo import build as zoo
from tests.zoo.kinds import ZOO

__all__ = ["stages", "sums"]

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
LOOPED = "{% for m in messages %}{% if 'LOOP' in m.content %}" + NESTED + "{% endif %}{% endfor %}"
LARGE = "{% set big = namespace(text='x' * 999999) %}{% for a in range(30) %}{% set big.text = big.text ~ big.text %}{% endfor %}"
CHATS = [
    [{"role": "user", "content": "What is 1 + 1?"}],
    [{"role": "system", "content": "é 🙂\n"}, {"role": "user", "content": "<|im_end|> {{ 7 * 7 }}"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": ""}],
    [{"role": "tool", "content": "c"}],
]
SPECIAL = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{{ add_generation_prompt }}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}{{ messages[0].content }}"
FAULTY = "{{ 1 / (messages | length - 1) }}"


@pytest.fixture
def folder(tmp_path):
    """A model folder of a stranger, with the demo's files."""
    made = tmp_path / "model"
    shutil.copytree(resolve("embedded:base"), made)
    return made


@pytest.fixture
def short(monkeypatch):
    """Shorten a limit. Not for what has to end: a new process takes seconds on a busy machine."""
    return lambda name, value: monkeypatch.setattr(room, name, value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "limit", "reason"),
    [(NESTED, ("CHECK_S", 10.0), "did not end within 10 s"), (LARGE, ("MEMORY_BYTES", 2**30), "took more than 1 GiB of memory")],
)
def test_a_template_without_an_end_is_refused_before_this_process_loads_it(folder, short, template, limit, reason):
    (folder / "chat_template.jinja").write_text(template)
    short(*limit)
    with pytest.raises(ModelError, match=reason) as refused:
        load_counter(ModelConfig(path=str(folder)))
    assert refused.value.place == f"model.path: {folder}"


def test_a_tokenizer_that_multiplies_each_letter_is_refused(folder, short):
    short("CHECK_S", 10.0)
    short("MEMORY_BYTES", 2**30)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000}] * 4,
    }
    path.write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ModelError, match=r"did not end within 10 s|took more than 1 GiB|ended the process"):
        check_model_files(str(folder), None)


@pytest.mark.slow
@pytest.mark.parametrize("header", [b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", b"version https://git-lfs"])
def test_a_damaged_header_of_weights_is_named_with_its_file(folder, header):
    (folder / "model.safetensors").write_bytes(header)
    with pytest.raises(ModelError, match="the weights cannot be read") as refused:
        check_model_files(str(folder), None)
    assert refused.value.place == str(folder / "model.safetensors")


@pytest.mark.slow
def test_a_template_that_loops_for_one_row_is_refused(folder, short):
    (folder / "chat_template.jinja").write_text("{% if 'LOOP' in messages[0].content %}" + NESTED + "{% endif %}{{ messages }}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with limited_templates(str(folder)):
        assert isinstance(rendered_all(tokenizer, CHATS[:1], opened=True)[0], str)
        short("RENDER_S", 2.0)
        with pytest.raises(ModelError, match="the chat template did not end within 2 s"):
            rendered_all(tokenizer, [[{"role": "user", "content": "LOOP"}]], opened=True)
        short("RENDER_S", 90.0)
        assert isinstance(rendered_all(tokenizer, CHATS[:1], opened=True)[0], str), "a new process goes on"


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, SPECIAL, STRICT, FAULTY])
def test_what_the_process_renders_is_what_transformers_renders(folder, template):
    tokenizer = AutoTokenizer.from_pretrained(folder, bos_token="<bos>")
    tokenizer.chat_template = template or tokenizer.chat_template
    for opened in (True, False):
        with limited_templates(str(folder)):
            found = rendered_all(tokenizer, CHATS, opened=opened)
        for chat, text in zip(CHATS, found, strict=True):
            if isinstance(text, RefusedError):
                with pytest.raises(Exception, match=r"user first|division by zero"):
                    tokenizer.apply_chat_template(chat, add_generation_prompt=opened, tokenize=False)
            else:
                assert text == tokenizer.apply_chat_template(chat, add_generation_prompt=opened, tokenize=False)


def test_a_model_that_ships_with_the_project_needs_no_process():
    check_model_files("embedded:base", None)
    with limited_templates("embedded:base"):
        assert limited_model() is None


def looping(folder):
    """The template never ends where a message says LOOP."""
    path = folder / "chat_template.jinja"
    path.write_text(LOOPED + path.read_text())
    return str(folder)


def test_a_demonstration_for_which_the_template_never_ends_stops_the_stage(folder, sums, short):
    short("RENDER_S", 5.0)
    sums.rewrite(lambda number, extra: extra | ({"solution": "LOOP"} if number == 3 else {}))
    path = looping(folder)
    with pytest.raises(ModelError, match="the chat template did not end within 5 s"):
        sums.train(model={"path": path}, start=ModelRef(path=path))


@pytest.mark.slow
def test_words_of_a_conversation_for_which_the_template_never_ends_are_refused(tmp_path, monkeypatch, short):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tools.py").write_text(TOOLS, encoding="utf-8")
    path = str(write_model(tmp_path / "model", before=LOOPED))
    config = InteractionConfig(tools=["my_tools:add"], workers=1)
    with player(config, ModelRef(path=path), ModelConfig(path=path), RolloutConfig(), completion=CompletionConfig()) as found:
        turns, question = TurnTokens(found.tokenizer), [{"role": "user", "content": "Hi"}]
        assert turns.prompt(question)
        short("RENDER_S", 2.0)
        with pytest.raises(ModelError, match="the chat template did not end within 2 s"):
            turns.after(question, {"role": "assistant", "content": "x"}, [{"role": "user", "content": "LOOP"}], closed=True)


@pytest.mark.long
@pytest.mark.ci
def test_a_config_of_endless_layers_is_refused_by_time_and_by_memory(folder, monkeypatch, tmp_path):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**7, "layer_types": None}))
    config = load_config("demo", [f"model.path={folder}", "model.lora.target_modules=[q_proj]"])
    monkeypatch.setattr(preflight, "STRUCTURE_S", 3.0)
    with pytest.raises(ModelError, match="did not end within 3 s"):
        preflight.check_structure(config, hub=False)
    StructureSpec(path=str(folder), revision="main", lora=config.model.lora, longest=10).save(tmp_path / "spec.json")
    code = "import sys; from pathlib import Path; from grpo_tasks.policy import structure; structure.MEMORY_BYTES = 2**27; "
    done = subprocess.run(
        [sys.executable, "-c", code + "structure.main(Path(sys.argv[1]))", tmp_path], capture_output=True, text=True, check=False
    )
    assert "takes more than 0.125 GiB without its weights" in done.stderr


@pytest.mark.long
@pytest.mark.ci
def test_a_vision_tower_of_endless_layers_is_refused_too(tmp_path):
    config = zoo.config(*ZOO["qwen3_5"])
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    # Loading takes the text tower out of it, and looks at the whole class before.
    config.vision_config.depth = 10**7
    config.save_pretrained(tmp_path)
    StructureSpec(path=str(tmp_path), revision=None, lora=None, longest=10).save(tmp_path / "spec.json")
    code = "import sys; from pathlib import Path; from grpo_tasks.policy import structure; structure.MEMORY_BYTES = 2**27; "
    done = subprocess.run(
        [sys.executable, "-c", code + "structure.main(Path(sys.argv[1]))", tmp_path], capture_output=True, text=True, check=False
    )
    assert "takes more than 0.125 GiB without its weights" in done.stderr

"""Prompt lengths are those of the trainer's own tokenisation, counted without torch."""

import copy
import subprocess
import sys

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.data.chat_tokens import TokenCounter, load_counter
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.errors import ConfigError, ModelError
from schemas.paths import resolve
from schemas.tables import MESSAGES

TEMPLATES = {
    "trims": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}",
    "depends on a word": "{{ 'think: ' if '27' not in messages[-1].content }}{{ messages[-1].content }}",
    "drops thinking": "{% for m in messages %}[{{ m.role }}] {{ m.content.split('</think>')[-1] }}\n{% endfor %}",
    "no special tokens": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
    "doubles": "{% for m in messages %}{{ m.content }} {{ m.content }}{% endfor %}",
    "refuses system": "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[-1].content }}",
}

SHAPES = [
    [{"role": "user", "content": "What is 15 + 27?"}],
    [{"role": "user", "content": "  blanks </think> around \n"}],
    [{"role": "system", "content": "be short"}, {"role": "user", "content": "a “quote” ﷺ"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}],
]


def with_template(counter, template):
    tokenizer = copy.deepcopy(counter.tokenizer)
    tokenizer.chat_template = template
    return TokenCounter(tokenizer)


def column(chats):
    return pl.Series("prompt", chats, dtype=MESSAGES)


def test_count_is_the_number_of_tokens_the_trainer_gets(counter):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve("embedded:base"))
    wanted = [len(prompt_ids(tokenizer, messages)) for messages in SHAPES]
    assert counter.count(SHAPES) == wanted
    assert counter.count_column(column(SHAPES)).to_list() == wanted


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_column_is_rendered_as_each_chat_is(counter, template):
    other = with_template(counter, template).template
    assert other.render_column(column(SHAPES)).to_list() == [other.render_all([chat])[0] for chat in SHAPES]


@settings(max_examples=50)
@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=5), st.none() | st.text(max_size=20))
def test_any_text_is_rendered_and_counted_the_same_either_way(counter, texts, system):
    opening = [] if system is None else [{"role": "system", "content": system}]
    chats = [[*opening, {"role": "user", "content": text}] for text in texts]
    assert counter.template.render_column(column(chats)).to_list() == counter.template.render_all(chats)
    assert counter.count_column(column(chats)).to_list() == counter.count(chats)


def test_many_different_system_messages_are_rendered_like_one(counter):
    chats = [[{"role": "system", "content": f"you are {n}"}, {"role": "user", "content": "q"}] for n in range(40)]
    assert counter.template.render_column(column(chats)).to_list() == counter.template.render_all(chats)


def test_refused_and_absent_chats_have_no_count(counter):
    counts = with_template(counter, TEMPLATES["refuses system"]).count_column(column([*SHAPES, None])).to_list()
    assert [count is None for count in counts] == [False, False, True, False, True]
    assert counter.count_column(column([]), limit=5).to_list() == []
    with pytest.raises(ModelError, match="refuses"):
        with_template(counter, TEMPLATES["refuses system"]).count(SHAPES)


@settings(max_examples=60)
@given(st.lists(st.text(max_size=80), min_size=1, max_size=6), st.integers(1, 120))
def test_upper_bound_is_never_below_the_count_and_hides_no_long_prompt(counter, texts, limit):
    chats = column([[{"role": "system", "content": "be short"}, {"role": "user", "content": text}] for text in texts])
    exact, bound = counter.count_column(chats), counter.count_column(chats, limit=limit)
    assert (bound >= exact).all()
    assert ((exact > limit) == (bound > limit)).all()
    assert ((bound == exact) | (bound <= limit)).all()


def test_stop_string_the_tokenizer_cannot_produce_is_refused(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "yes": 1, "no": 2}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    counter = load_counter(ModelConfig(path=str(tmp_path)))
    assert counter.can_produce("yes")
    with pytest.raises(ConfigError, match="cannot produce '</answer>'"):
        counter.check_stops(RolloutConfig(stop=["</answer>"]))


def test_only_stop_strings_and_ids_of_the_tokenizer_pass(counter):
    stops, size = ["</answer>", "<|im_end|>", "<|endoftext|>", "\n\n", "∑"], len(counter.tokenizer)
    counter.check_stops(RolloutConfig(stop=stops, stop_token_ids=[size - 1]))
    with pytest.raises(ConfigError, match=f"no token {size}"):
        counter.check_stops(RolloutConfig(stop_token_ids=[size]))


def test_a_folder_without_tokenizer_or_chat_template_is_an_error(tmp_path, counter):
    with pytest.raises(ModelError) as caught:
        load_counter(ModelConfig(path=str(tmp_path)))
    assert str(tmp_path) in caught.value.place
    bare = copy.deepcopy(counter.tokenizer)
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="chat template"):
        load_counter(ModelConfig(path=str(tmp_path)))


@pytest.mark.slow
def test_counting_and_judging_import_no_torch_no_orchestrator_no_tracker():
    code = """
import sys
import grpo_tasks.data.sources, grpo_tasks.data.judge, grpo_tasks.data.validation, grpo_tasks.data.table
from grpo_tasks.data.chat_tokens import load_counter
from schemas.config.model import ModelConfig
load_counter(ModelConfig()).count([[{"role": "user", "content": "q"}]])
print(sorted({"torch", "prefect", "mlflow", "datasets"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def searching(counter):
    """A tokenizer with an added special token."""
    tokenizer = copy.deepcopy(counter.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<search>"]})
    return TokenCounter(tokenizer)


def test_an_added_special_token_passes_and_removes_no_other_marker(counter, searching):
    searching.check_stops(RolloutConfig(stop=["<search>", "</a><search>\n", "</answer>"]))
    assert set(searching.special_tokens) == {*counter.special_tokens, "<search>"}
    assert "<|im_start|>" in counter.special_tokens


def test_a_stop_string_inside_a_searched_special_token_is_refused(searching):
    searching.check_stops(RolloutConfig(stop=["search", "im_end"]))
    with pytest.raises(ConfigError, match=r"'im_end' is part of the special token '<\|im_end\|>'"):
        searching.check_stops(RolloutConfig(stop=["<search>", "im_end"]))

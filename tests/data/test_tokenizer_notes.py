"""What validation says about a tokenizer or template that is not as most are."""

from contextlib import nullcontext

import polars as pl
import pytest

from grpo_tasks.data.sources import load_sources
from grpo_tasks.data.validation import Origin, validate_rows
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, DataError
from tests.variants import BOS, END, NO_END, NO_OPENING, NO_SYSTEM, START, TEMPLATE, variant

ROWS = [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(20)]
STRINGS = [{"prompt": f"{BOS}{START}user\n{row['question']}{END}\n", "answer": row["answer"]} for row in ROWS]
DAY = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
FIXED = {"chat_template_kwargs": {"strftime_now": "2031-03-09"}}


@pytest.fixture
def notes(write, tmp_path, monkeypatch):
    """The warnings of a validation with a variant of the embedded model.

    Its files are read in this process: the one with limits (tests/content/test_limited_model.py) takes three seconds
    to start.
    """
    monkeypatch.setattr("grpo_tasks.data.validation.limited_templates", nullcontext)
    monkeypatch.setattr("grpo_tasks.data.chat_tokens.check_model_files", lambda *_: None)

    def validate(rows, rollout=None, **model):
        data = {"train": [{"path": write(*rows)}], "eval_fraction": 0.2} | model.pop("data", {})
        sections = {"rollout": rollout or {}, "model": {"path": str(variant(tmp_path / "model", **model))}}
        config = RunConfig(data=data, stages=[{"name": "s", "rewards": ["format"]}], seed=1, **sections)
        said = []
        origin = Origin("k", tmp_path, 0.0, load_sources(config.data, directory=tmp_path))
        validate_rows(tmp_path / "rows.parquet", config, origin, warn=said.append)
        report = (tmp_path / "report.md").read_text()
        assert all(f"**Warning**: {sentence}" in report for sentence in said)
        return said

    return validate


@pytest.mark.parametrize(
    ("rows", "model", "says"),
    [
        (ROWS, {}, []),
        (STRINGS, {}, []),
        (STRINGS, {"before": (BOS,)}, [f"20 prompts begin with {BOS}, which the tokenizer writes before any text"]),
        (STRINGS, {"behind": (END,)}, [f"the tokenizer writes {END} behind any text; prompts have none"]),
        (STRINGS, {"before": (BOS,), "behind": (END,)}, ["20 prompts begin with", "behind any text"]),
        (ROWS, {"before": (BOS,), "template": "{{ bos_token }}" + TEMPLATE, "bos": BOS}, []),
        (ROWS, {"before": (BOS,)}, [f"begins a text with {BOS}, the chat template does not"]),
        (ROWS, {"eos": BOS}, [f"ends a turn with {END}, which is neither the tokenizer's EOS nor in the generation config"]),
        (STRINGS, {"eos": BOS}, [f"ends a turn with {END}"]),
        (ROWS, {"eos": BOS, "generation_eos": [316, 318]}, []),
        (ROWS, {"template": NO_OPENING}, ["has no generation prompt: a prompt ends before '<|im_start|>assistant'"]),
        (ROWS, {"template": NO_END}, [f"no end token: completions end at {END}, which this template never writes"]),
        (ROWS, {"template": NO_END, "eos": None}, ["nothing ends a completion but its length"]),
        (STRINGS, {"template": None, "eos": None}, ["nothing ends a completion but its length"]),
        (STRINGS, {"template": None}, []),
        (ROWS, {"template": NO_END, "rollout": {"stop": ["\n\n"]}}, []),
        (ROWS, {"template": NO_END, "eos": None, "rollout": {"stop_token_ids": [5]}}, []),
        (ROWS, {"template": DAY}, ["the chat template writes the day on which it is rendered"]),
        (ROWS, {"template": DAY, "rollout": FIXED}, ["writes a date into every prompt: 09 Mar 2031 (the day that the runs"]),
        (
            ROWS,
            {"template": "{% set today = '26 Jul 2024' %}Today Date: {{ today }} " + TEMPLATE},
            ["26 Jul 2024 (a variable or a text"],
        ),
        # Nothing is missing where the answer follows the question without a header, as in Llama 2's.
        (ROWS, {"template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"}, []),
    ],
)
def test_each_peculiarity_is_said_once_with_what_was_done(notes, rows, model, says):
    found = notes(rows, **model)
    assert len(found) == len(says)
    for sentence, expected in zip(found, says, strict=True):
        assert expected in sentence


def test_a_template_that_refuses_the_system_role_names_the_system_prompt(notes):
    with pytest.raises(ConfigError, match="System role not supported") as caught:
        notes(ROWS, template=NO_SYSTEM, data={"system_prompt": "Be brief."})
    assert caught.value.place == "data.system_prompt"
    assert "{question}" in caught.value.fix


def test_rows_that_a_template_refuses_show_its_own_message(notes, tmp_path):
    chats = [
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["question"]}],
            "answer": row["answer"],
        }
        for row in ROWS
    ]
    with pytest.raises(DataError, match="System role not supported") as caught:
        notes(chats, template=NO_SYSTEM)
    assert "template_refused" in caught.value.message
    quarantine = pl.read_parquet(tmp_path / "quarantine.parquet")
    assert quarantine["value"].unique().to_list() == ["the chat template refuses the messages: System role not supported"]
    (tmp_path / "model").rename(tmp_path / "other")
    # A template that fails instead of refusing.
    with pytest.raises(DataError, match="can only concatenate str"):
        notes(chats, template="{{ 'a' + messages | length }}")

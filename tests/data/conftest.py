"""Fixtures of the data tests: a real tokenizer and real files."""

import copy

import orjson
import polars as pl
import pytest

from grpo_tasks.data.chat_tokens import TokenCounter, load_counter
from grpo_tasks.data.judge import judge
from grpo_tasks.data.sources import ROWS, load_sources
from schemas.config.model import ModelConfig
from schemas.config.run import RunConfig

TURN_LIMIT = "{%- if messages|length > 4 -%}{{ raise_exception('too many turns') }}{%- endif -%}"
STAGE = {"name": "format", "rewards": ["format"]}


@pytest.fixture(scope="session")
def counter():
    return load_counter(ModelConfig())


@pytest.fixture(scope="session")
def strict(counter):
    """The demo's tokenizer with a template that, like some, refuses chats it does not like."""
    tokenizer = copy.deepcopy(counter.tokenizer)
    tokenizer.chat_template = TURN_LIMIT + str(tokenizer.chat_template)
    return TokenCounter(tokenizer)


@pytest.fixture
def write(tmp_path):
    """Writes rows (dicts, or bytes as they are) as a JSONL file and returns its path."""

    def write_rows(*rows, name="rows.jsonl"):
        lines = [row if isinstance(row, bytes) else orjson.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_bytes(b"\n".join(lines) + b"\n")
        return str(path)

    return write_rows


@pytest.fixture
def verdict_on(tmp_path, counter):
    """Loads and judges data sources; keyword arguments are the sections of a config."""

    def judge_sources(data, count=counter, **sections):
        config = RunConfig.model_validate({"data": data, "stages": [STAGE], **sections})
        load_sources(config.data, directory=tmp_path)
        rows = pl.read_parquet(tmp_path / ROWS)
        return judge(rows, config=config, counter=count, markers=count.special_tokens)

    return judge_sources


@pytest.fixture
def judged(write, verdict_on):
    """The verdict on the rows of a file; keyword arguments are held-out rows, and settings of the section data."""

    def judge_rows(*rows, held=(), **data):
        held_out = {"eval": [{"path": write(*held, name="held.jsonl")}]} if held else {}
        return verdict_on({"train": [{"path": write(*rows)}], **held_out, **data})

    return judge_rows

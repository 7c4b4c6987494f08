"""Where a row stands is said in the unit of its file: a line, a record or a row."""

import json

import pytest

from grpo_tasks.content.places import parse_place, row_place, unit_of


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unit_of.cache_clear()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("rows.jsonl", b'{"a": 1}\n', "rows.jsonl:7"),
        ("rows.csv", b"a,b\n", "rows.csv:7"),
        ("lines.json", b'{"a": 1}\n{"a": 2}\n', "lines.json:7"),
        ("array.json", b'\n [{"a": 1},\n {"a": 2}]', "array.json, record 7"),
        ("utf16.json", json.dumps([{"a": "ä"}]).encode("utf-16"), "utf16.json, record 7"),
        ("marked.JSON", b'\xef\xbb\xbf[{"a": 1}]', "marked.JSON, record 7"),
        ("rows.parquet", b"PAR1", "rows.parquet, row 7"),
        ("gone.json", None, "gone.json:7"),
        ("openai/gsm8k", None, "openai/gsm8k, row 7"),
    ],
)
def test_a_place_names_lines_records_and_rows_as_what_they_are(here, name, content, place):
    if content is not None:
        (here / name).write_bytes(content)
    assert row_place(name, 7) == place
    assert parse_place(place) == parse_place(f"{name}:7") == (name, 7)


def test_a_prompt_id_is_no_place():
    assert parse_place("0123abcd4567ef89") == ("0123abcd4567ef89", 0)
    assert parse_place("rows.jsonl:x") == ("rows.jsonl:x", 0)

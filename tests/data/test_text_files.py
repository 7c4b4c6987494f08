"""Text files as people have them: other delimiters, other encodings, arrays. The report names what was found."""

import csv
import json

import polars as pl
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from grpo_tasks.data.sources import load_sources
from grpo_tasks.data.validation import Origin, report_data
from schemas.config.data import DataConfig
from schemas.errors import DataError

DELIMITERS = (",", ";", "\t", "|")
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "cp1252")


def read(path, **source):
    out = path.parent / "out"
    out.mkdir(exist_ok=True)
    loaded = load_sources(DataConfig.model_validate({"train": [{"path": str(path), **source}]}), directory=out)
    rows = pl.read_parquet(loaded.path).select("question", "answer", "extra").rows()
    return [(question, answer, json.loads(extra)) for question, answer, extra in rows], loaded.sources[0]


cells = st.text(st.characters(codec="cp1252", exclude_characters="\x00\r"), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=5), delimiter=st.sampled_from(DELIMITERS), data=st.data()
)
def test_csv_in_any_delimiter_and_encoding_reads_back_the_same(tmp_path, rows, delimiter, data):
    encoding = data.draw(st.sampled_from(ENCODINGS))
    path = tmp_path / "rows.csv"
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([("question", "answer", "note"), *rows])
    raw = path.read_bytes()
    # Text such as "Ã©" in cp1252 has the bytes of "é" in UTF-8; no reader can tell them apart.
    assume(encoding != "cp1252" or raw.isascii() or not _has_utf8(raw))
    found, source = read(path)
    assert found == [(question, answer, {"note": note}) for question, answer, note in rows]
    assert source.delimiter == delimiter
    assert source.encoding == ("utf-8" if encoding == "cp1252" and raw.isascii() else encoding)
    assert read(path, encoding=encoding, delimiter=delimiter)[0] == found


def _has_utf8(raw):
    return any(not char.isascii() and char != "\ufffd" for char in raw.decode(errors="replace"))


def test_tsv_is_read_by_its_suffix(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("question\tanswer\nWhat, then?\t4\n")
    assert read(path)[0] == [("What, then?", "4", {})]


def test_delimiter_is_the_one_by_which_the_header_has_the_configured_columns(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("question,answer,a;b;c;d\nq,1,x\n")
    assert read(path)[0] == [("q", "1", {"a;b;c;d": "x"})]


def test_configured_encoding_that_does_not_fit_is_an_error_with_the_fix(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes("question,answer\ncafé,1\n".encode("cp1252"))
    with pytest.raises(DataError, match="not ascii text") as caught:
        read(path, encoding="ascii")
    assert "encoding" in caught.value.fix


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "cp1252"])
def test_jsonl_in_another_encoding_keeps_its_lines(tmp_path, encoding):
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"question": "café", "answer": "1"}\n\n{"question": "où", "answer": "2"}\n'.encode(encoding))
    loaded, source = read(path, **({} if encoding == "utf-16" else {"encoding": encoding}))
    assert [question for question, _, _ in loaded] == ["café", "où"]
    assert (source.encoding, source.unit) == (encoding, "line")
    assert pl.read_parquet(tmp_path / "out" / "rows.parquet")["line"].to_list() == [1, 3]


def test_report_names_encoding_delimiter_and_what_numbers_count(tmp_path, verdict_on):
    table, array = tmp_path / "rows.csv", tmp_path / "rows.json"
    table.write_bytes("question;answer\nVoilà?;1\n".encode("cp1252"))
    array.write_text(json.dumps([{"question": "one", "answer": "1"}, {"question": "two", "answer": None}], indent=1))
    verdict = verdict_on({"train": [{"path": str(table)}, {"path": str(array)}]})
    sources = [read(path)[1] for path in (table, array)]
    report_data(verdict, Origin("k", tmp_path, 0.0, sources))
    text = (tmp_path / "report.md").read_text()
    assert "| line | cp1252, semicolons |" in text
    assert "| record | utf-8 |" in text
    assert "rows.json, record 2" in text

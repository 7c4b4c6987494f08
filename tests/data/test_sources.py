"""Reading never refuses a row and never loses a line number; only a file as a whole can be an error."""

import csv
import json
from datetime import date

import polars as pl
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from grpo_tasks.data.jsonl import parse_line
from grpo_tasks.data.sources import ROWS, load_sources
from grpo_tasks.data.validation import Origin, report_data
from schemas.config.data import DataConfig
from schemas.errors import DataError
from schemas.tables import Raw

GOOD = {"question": "What is 1 + 1?", "answer": "2"}


def load(directory, path, **settings):
    source = {"path": path, **{key: settings.pop(key) for key in ("format", "max_rows", "split") if key in settings}}
    loaded = load_sources(DataConfig.model_validate({"train": [source], **settings}), directory=directory)
    rows = pl.read_parquet(directory / ROWS)
    assert sum(one.rows for one in loaded) == rows.height
    return Raw.validate(rows)


def faults(rows):
    return {line: [fault["rule"] for fault in found or []] for line, found in rows.select("line", "faults").iter_rows()}


def test_jsonl_row_keeps_line_and_other_columns(tmp_path, write):
    rows = load(tmp_path, write(GOOD, b"", {**GOOD, "level": 3, "tags": ["a"]}, GOOD), max_rows=2)
    assert rows["line"].to_list() == [1, 3]
    assert rows["question"].to_list() == ["What is 1 + 1?"] * 2
    assert json.loads(rows["extra"][1]) == {"level": 3, "tags": ["a"]}
    assert rows["split"].to_list() == ["train", "train"]


def test_chat_prompt_takes_precedence_over_question(tmp_path, write):
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    rows = load(tmp_path, write({**GOOD, "prompt": prompt}))
    assert rows["messages"].to_list() == [prompt]
    assert rows["question"].to_list() == [None]
    assert json.loads(rows["extra"][0]) == {"question": "What is 1 + 1?"}


BROKEN = {
    "truncated": (b'{"question": "What is', "unreadable_line"),
    "NUL": (b'{"question": "a\x00b", "answer": "1"}', "unreadable_line"),
    "latin-1": ('{"question": "caf\xe9", "answer": "1"}'.encode("latin-1"), "encoding"),
    "array": (b"[1, 2]", "not_an_object"),
    "number": (b"7", "not_an_object"),
    "lone surrogate": (b'{"question": "\\ud800", "answer": "1"}', "unreadable_line"),
    "NaN": (b'{"question": "q", "answer": NaN}', "unreadable_line"),
    "2,000 brackets": (b'{"question": "q", "answer": "1", "x": ' + b"[" * 2000 + b"]" * 2000 + b"}", "unreadable_line"),
    "300 brackets": (b'{"question": "q", "answer": "1", "x": ' + b"[" * 300 + b"]" * 300 + b"}", "unreadable_line"),
    "duplicate key": (b'{"question": "q", "answer": "1", "answer": "2"}', "duplicate_key"),
    "duplicate key, escaped": (b'{"question": "q", "answer": "1", "\\u0061nswer": "2"}', "duplicate_key"),
    "duplicate key and escaped colon": (b'{"question": "\\u003A", "answer": "1", "answer": "2"}', "duplicate_key"),
    "duplicate key inside": (b'{"question": "q", "answer": "1", "x": {"a": 1, "a": 2}}', "duplicate_key"),
    "10 MB line": (b'{"question": "' + b"x" * 10_000_000 + b'", "answer": "1"}', "line_too_long"),
    "no message list": (b'{"prompt": 3, "answer": "1"}', "prompt_not_list"),
    "message of a number": (b'{"prompt": [{"role": "user", "content": 3}], "answer": "1"}', "message_shape"),
    "message is text": (b'{"prompt": ["q"], "answer": "1"}', "message_shape"),
    "message with more": (b'{"prompt": [{"role": "user", "content": "q", "name": "x"}], "answer": "1"}', "message_extra_keys"),
    "no question": (b'{"answer": "1"}', "prompt_missing"),
    "question is a list": (b'{"question": ["q"], "answer": "1"}', "question_not_text"),
    "answer is a list of lists": (b'{"question": "q", "answer": [["1"]]}', "answer_type"),
    "answer is a list with null": (b'{"question": "q", "answer": ["1", null]}', "answer_type"),
}


@pytest.mark.parametrize(("line", "rule"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_line_is_a_faulty_row_among_good_ones(tmp_path, write, line, rule):
    rows = load(tmp_path, write(GOOD, line, GOOD))
    assert faults(rows) == {1: [], 2: [rule], 3: []}
    assert rows["question"][2] == "What is 1 + 1?"


def test_text_like_a_duplicate_key_and_a_null_key_are_accepted(tmp_path, write):
    like = {"question": '"answer": "answer" : x', "answer": "1", "x": [{"a": 1}, {"a": 2}]}
    absent = {"prompt": [{"role": "user", "content": "q", "name": None}], "answer": "1"}
    assert faults(load(tmp_path, write(like, absent))) == {1: [], 2: []}


def test_numbers_come_through_exactly(tmp_path, write):
    lines = [f'{{"question": "q", "answer": {number}}}'.encode() for number in ("51.0", "3", "1e22", str(2**80), "-0.1")]
    assert load(tmp_path, write(*lines))["answer"].to_list() == ["51.0", "3", "1" + "0" * 22, str(2**80), "-0.1"]


def test_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"question": "q", "answer": "1"}\r\n' * 2)
    assert faults(load(tmp_path, str(path))) == {1: [], 2: []}


def test_json_array_is_read_by_position(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GOOD, 3, GOOD], indent=1))
    assert faults(load(tmp_path, str(path))) == {1: [], 2: ["not_an_object"], 3: []}


def test_csv_rows_keep_their_first_line_despite_line_breaks(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffquestion,answer,note\n"two\nlines, ""quoted""",1,\nq,2,x\n', newline="")
    rows = load(tmp_path, str(path))
    assert rows.select("line", "question", "answer").rows() == [(2, 'two\nlines, "quoted"', "1"), (4, "q", "2")]
    assert json.loads(rows["extra"][1]) == {"note": "x"}


def test_broken_csv_lines_are_rows_with_faults(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'question,answer\nq,1\nq\nq,1,2\ncaf\xe9,1\n"q"x,1\n,5\ncaf\xc3\xa9,3\n')
    found = faults(load(tmp_path, str(path)))
    assert found == {
        2: [],
        3: ["cell_count"],
        4: ["cell_count"],
        5: ["encoding"],
        6: ["unreadable_line"],
        7: ["prompt_missing"],
        8: [],
    }


def test_chat_prompt_in_a_csv_cell_is_read_as_json(tmp_path):
    path = tmp_path / "rows.csv"
    pl.DataFrame({"prompt": ['[{"role": "user", "content": "q"}]', "[{"], "answer": [1, 2]}).write_csv(path)
    rows = load(tmp_path, str(path))
    assert rows["messages"].to_list() == [[{"role": "user", "content": "q"}], None]
    assert faults(rows) == {2: [], 3: ["prompt_not_list"]}


def test_parquet_rows_are_numbered_from_one(tmp_path):
    path = tmp_path / "rows.parquet"
    frame = pl.DataFrame({"prompt": [[{"content": "q", "role": "user"}], None], "answer": [51.0, 2.5], "level": [1, None]})
    frame.write_parquet(path)
    folder = tmp_path / "out"
    folder.mkdir()
    rows = load(folder, str(path))
    assert rows["messages"].to_list() == [[{"role": "user", "content": "q"}], None]
    assert faults(rows) == {1: [], 2: ["prompt_missing"]}
    assert rows["answer"].to_list() == ["51.0", "2.5"]


def test_hub_layout_is_read_through_datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "test.jsonl").write_text("\n".join(json.dumps({**GOOD, "n": n}) for n in range(3)))
    rows = load(tmp_path, str(folder), format="hub", split="test", max_rows=2)
    assert rows.select("line", "question", "extra").rows() == [(1, "What is 1 + 1?", '{"n":0}'), (2, "What is 1 + 1?", '{"n":1}')]


UNREADABLE = {
    "empty": ("rows.jsonl", b"", "empty"),
    "blank": ("rows.jsonl", b"\n \n", "no rows"),
    "broken UTF-16": ("rows.csv", b"\xff\xfeq\0,\0a\0\n", "not utf-16 text"),
    "gzip": ("rows.jsonl", b"\x1f\x8b\x08\x00", "gzip"),
    "Parquet as JSONL": ("rows.jsonl", b"PAR1xxxx", "Parquet"),
    "picture": ("rows.jsonl", b"\x89PNG\r\n\x1a\n\x00\x00", "no line of the file can be read"),
    "broken array": ("rows.json", b'[{"question": "q"},', "array is invalid"),
    "broken Parquet": ("rows.parquet", b"PAR1" + b"\0" * 20, "cannot be read as Parquet"),
    "open quote": ("rows.csv", b'question,answer\nq,1\n"q,2\nq,3\n', "never closed"),
    "column twice": ("rows.csv", b"question,answer,answer\nq,1,2\n", "twice"),
    "header only": ("rows.csv", b"question,answer\n", "no rows"),
    "unknown suffix": ("rows.txt", b"x", "format"),
}


@pytest.mark.parametrize(("name", "content", "message"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_unreadable_file_is_an_error_that_names_it_and_leaves_nothing(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, str(tmp_path / name))
    assert name in caught.value.place
    assert caught.value.fix
    assert [path.name for path in tmp_path.iterdir()] == [name]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10**6), content=st.binary(min_size=1, max_size=40), cut=st.booleans())
def test_damage_in_a_parquet_file_raises_no_other_error(tmp_path, position, content, cut):
    path = tmp_path / "rows.parquet"
    pl.DataFrame([{**GOOD, "day": date(2020, 1, 1), "tags": ["é"]}] * 30).write_parquet(path, compression="uncompressed")
    intact = path.read_bytes()
    position %= len(intact)
    path.write_bytes(intact[:position] if cut else intact[:position] + content + intact[position + len(content) :])
    (tmp_path / "out").mkdir(exist_ok=True)
    error = None
    try:
        load(tmp_path / "out", str(path))
    except DataError as caught:
        error = caught
    assert error is not None or not cut
    assert error is None or (str(path) in error.place and error.fix)


def test_open_quote_is_reported_with_the_line_it_opens_on(tmp_path):
    (tmp_path / "rows.csv").write_text('question,answer\nq,1\n"q,2\nq,3\n')
    with pytest.raises(DataError) as caught:
        load(tmp_path, str(tmp_path / "rows.csv"))
    assert caught.value.place.endswith("rows.csv:3")


def test_missing_column_or_file_is_an_error_with_the_nearest_name(tmp_path, write):
    for row, fix in (
        ({"Question": "q"}, "data.question_column: Question"),
        ({"input": "q"}, "data.question_column to one of them"),
    ):
        with pytest.raises(DataError, match="the columns are") as caught:
            load(tmp_path, write(row))
        assert fix in caught.value.fix
    write(GOOD, name="train.jsonl")
    with pytest.raises(DataError, match="no such file") as caught:
        load(tmp_path, str(tmp_path / "trian.jsonl"))
    assert "train.jsonl" in caught.value.fix


lines = st.one_of(
    st.binary(max_size=60).map(lambda raw: raw.replace(b"\n", b" ")),
    st.dictionaries(
        st.sampled_from(["question", "answer", "prompt", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["role", "content"]), inner),
        ),
    ).map(lambda row: json.dumps(row).encode()),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(lines, max_size=8))
def test_every_line_that_is_not_blank_becomes_a_row_whatever_it_contains(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([json.dumps(GOOD).encode(), *content]))
    rows = load(tmp_path, str(path))
    kept = [number for number, line in enumerate(content, 2) if line.strip()]
    assert rows["line"].to_list() == [1, *kept]
    assert (tmp_path / ROWS).exists()


keys = st.sampled_from(["a", "b:", '"', "\\u0061", "\\u003a", "answer"])
texts = st.text(st.sampled_from('a:"\\{} '), max_size=4)


@st.composite
def objects(draw, depth=2):
    """JSON that no library would write: duplicate or escaped keys, unusual whitespace."""

    def value():
        kind = draw(st.integers(0, 3 if depth else 1))
        if kind > 1:
            return draw(objects(depth - 1)) if kind == 2 else "[" + draw(objects(depth - 1)) + "]"
        return json.dumps(draw(texts)).replace(":", draw(st.sampled_from([":", "\\u003a", "\\u003A"]))) if kind else "1"

    blank = st.sampled_from(["", " ", "\r", "\t"])
    pairs = []
    for key in draw(st.lists(keys, max_size=4)):
        name = key if key.startswith("\\u") else json.dumps(key)[1:-1]
        pairs.append(f'"{name}"{draw(blank)}:{draw(blank)}{value()}')
    return "{" + ",".join(pairs) + "}"


@given(text=objects())
def test_duplicate_keys_are_found_at_any_depth_and_in_any_spelling(text):
    duplicates = []

    def note(pairs):
        duplicates.append(len({key for key, _ in pairs}) < len(pairs))
        return dict(pairs)

    json.loads(text, object_pairs_hook=note)
    found = [fault.rule for fault in parse_line(1, text.encode(), answer_column="answer").faults]
    assert found == (["duplicate_key"] if any(duplicates) else [])


DELIMITERS = (",", ";", "\t", "|")
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "cp1252")


def read(path, **source):
    out = path.parent / "out"
    out.mkdir(exist_ok=True)
    loaded = load_sources(DataConfig.model_validate({"train": [{"path": str(path), **source}]}), directory=out)
    rows = pl.read_parquet(out / ROWS).select("question", "answer", "extra").rows()
    return [(question, answer, json.loads(extra)) for question, answer, extra in rows], loaded[0]


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


def test_delimiter_is_the_one_by_which_the_header_has_the_configured_columns(tmp_path):
    path = tmp_path / "rows.tsv"
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

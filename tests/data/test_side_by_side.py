"""A file read in spans by several processes gives what one reader gives: the same rows, lines, faults, in the same order."""

from collections.abc import Callable
from pathlib import Path

import polars as pl
import psutil
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_tasks.data import jsonl, load
from grpo_tasks.data.jsonl import line_spans, read_jsonl, read_span
from grpo_tasks.data.parts import Part, read_parts
from grpo_tasks.data.records import Columns
from grpo_tasks.data.side_by_side import read_parts_side_by_side
from schemas.config.data import DataConfig
from schemas.errors import DataError


def readers() -> list[psutil.Process]:
    """The processes that read spans; others of this process belong to other tests."""
    children = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "grpo_tasks.data.serve_spans" in child.cmdline()]


COLUMNS = Columns("question", "prompt", "answer")
GOOD = {"question": "What is 1 + 1?", "answer": "2", "level": 3}
CHAT = {"prompt": [{"role": "user", "content": "q\n" * 30}], "answer": 2.5}
ROWS = [
    GOOD,
    b"",
    CHAT,
    b'{"question": "What is',
    "é".encode("latin-1"),
    b"   ",
    {"answer": [1]},
    b'{"a": "' + b"x" * 4_200_000 + b'"}',
] * 9


def _data(path: str) -> DataConfig:
    return DataConfig.model_validate({"train": [{"path": path}]})


def _one_table(parts: list[Part]) -> pa.Table:
    return pa.concat_tables([part.table for part in parts]).combine_chunks()


@pytest.mark.parametrize("processes", [1, 3])
def test_several_readers_give_what_one_gives(
    tmp_path: Path, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    path = write(*ROWS)
    place = {"side": "train", "source": path}
    alone = list(read_parts(read_jsonl(Path(path), answer_column="answer"), COLUMNS, **place))
    monkeypatch.setattr(jsonl, "SPAN_BYTES", 1000)
    together = list(read_parts_side_by_side(Path(path), COLUMNS, **place, processes=processes))
    assert len(together) > 3 * processes
    assert _one_table(together).equals(_one_table(alone))
    seen = together[0].seen
    for part in together[1:]:
        seen.add(part.seen)
    assert seen == alone[0].seen
    assert not readers()


lines = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b'{"question": "q", "answer": "1"}', b"{}", b"[1]", b"\r", b" ", b"\xef\xbb\xbf{}", b"\n"]),
)


@given(lines=st.lists(lines, max_size=30), bom=st.booleans(), end=st.sampled_from([b"", b"\n", b"\n\n"]), span=st.integers(1, 80))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_spans_together_are_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[bytes], bom: bool, end: bytes, span: int
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * bom + b"#" + b"\n".join(lines) + end)
    monkeypatch.setattr(jsonl, "SPAN_BYTES", span)
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 30)
    spans = list(line_spans(path))
    apart = [record for one in spans for record in read_span(path, one, answer_column="answer")]
    assert apart == list(read_jsonl(path, answer_column="answer"))
    assert spans[-1].end == path.stat().st_size


def test_big_file_is_read_by_several_processes_and_gives_the_same_table(
    tmp_path: Path, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(*[{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(5000)])
    alone = load.load_sources(_data(path), directory=tmp_path)
    rows = pl.read_parquet(alone.path)
    monkeypatch.setattr(load, "BIG", 1)
    monkeypatch.setattr(load, "num_processes", lambda: 2)
    monkeypatch.setattr(jsonl, "SPAN_BYTES", 10_000)
    together = load.load_sources(_data(path), directory=tmp_path)
    assert together.sources == alone.sources
    assert pl.read_parquet(together.path).equals(rows)


def test_missing_column_is_told_from_all_parts(
    tmp_path: Path, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(*[{"Question": "q", "answer": "1"}] * 500)
    monkeypatch.setattr(load, "BIG", 1)
    monkeypatch.setattr(load, "num_processes", lambda: 2)
    monkeypatch.setattr(jsonl, "SPAN_BYTES", 1000)
    with pytest.raises(DataError, match="no row has a column question or prompt"):
        load.load_sources(_data(path), directory=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_reader_that_is_killed_is_told_and_leaves_nothing(
    tmp_path: Path, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(*[GOOD] * 5000)
    monkeypatch.setattr(jsonl, "SPAN_BYTES", 1000)
    parts = read_parts_side_by_side(Path(path), COLUMNS, side="train", source=path, processes=2)
    next(parts)
    readers()[0].kill()
    with pytest.raises(DataError, match="ended with code -9"):
        list(parts)
    assert not readers()


def test_readers_end_with_whoever_reads(tmp_path: Path, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "SPAN_BYTES", 1000)
    path = write(*[GOOD] * 5000)
    parts = read_parts_side_by_side(Path(path), COLUMNS, side="train", source=path, processes=2)
    next(parts)
    assert len(readers()) == 2
    parts.close()
    assert not readers()

"""Chunks of a file that several processes read are those of one reader: the same rows, lines and faults, in the same order."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import psutil
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_tasks.data import jsonl, sources
from grpo_tasks.data.chunks import read_chunks, read_chunks_in_parallel
from grpo_tasks.data.jsonl import line_spans, read_jsonl, read_span
from grpo_tasks.data.records import Columns
from schemas.config.data import DataConfig
from schemas.errors import DataError


def workers_of(process):
    """The processes that read spans; other children belong to other tests."""
    children = [child for child in process.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "--multiprocessing-fork" in child.cmdline()]


def workers():
    return workers_of(psutil.Process())


ROOT = Path(__file__).resolve().parents[2]
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
    {"answer": [1], "prompt": "a string"},
    {"answer": ["a", 2], "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]},
    b'{"a": "' + b"x" * 4_200_000 + b'"}',
] * 9


def _data(path):
    return DataConfig.model_validate({"train": [{"path": path}]})


def _one_table(chunks):
    return pa.concat_tables([chunk.table for chunk in chunks]).combine_chunks()


@pytest.mark.slow
def test_several_workers_read_what_one_reader_reads(write, monkeypatch):
    path = write(*ROWS)
    origin = {"split": "train", "source": path}
    alone = list(read_chunks(read_jsonl(Path(path), answer_column="answer"), COLUMNS, **origin))
    monkeypatch.setattr(jsonl, "SPAN_BYTES", 1000)
    together = list(read_chunks_in_parallel(Path(path), COLUMNS, **origin, workers=3))
    assert len(together) > 9
    assert _one_table(together).equals(_one_table(alone))
    summary = together[0].summary
    for chunk in together[1:]:
        summary.add(chunk.summary)
    assert summary == alone[0].summary
    assert not workers()


lines = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b'{"question": "q", "answer": "1"}', b"{}", b"[1]", b"\r", b" ", b"\xef\xbb\xbf{}", b"\n"]),
)


@given(lines=st.lists(lines, max_size=30), bom=st.booleans(), end=st.sampled_from([b"", b"\n", b"\n\n"]), span=st.integers(1, 80))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_spans_together_are_the_file(tmp_path, monkeypatch, lines, bom, end, span):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * bom + b"#" + b"\n".join(lines) + end)
    monkeypatch.setattr(jsonl, "SPAN_BYTES", span)
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 30)
    spans = list(line_spans(path))
    apart = [record for one in spans for record in read_span(path, one, answer_column="answer")]
    assert apart == list(read_jsonl(path, answer_column="answer"))
    assert spans[-1].end == path.stat().st_size


def test_big_file_is_read_by_several_processes_and_gives_the_same_table(tmp_path, write, monkeypatch):
    path = write(*[{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(5000)])
    alone = sources.load_sources(_data(path), directory=tmp_path)
    rows = pl.read_parquet(tmp_path / sources.ROWS)
    monkeypatch.setattr(sources, "PARALLEL_FROM_BYTES", 1)
    monkeypatch.setattr(sources, "num_workers", lambda: 2)
    monkeypatch.setattr(jsonl, "SPAN_BYTES", 10_000)
    together = sources.load_sources(_data(path), directory=tmp_path)
    assert together == alone
    assert pl.read_parquet(tmp_path / sources.ROWS).equals(rows)
    unnamed = write(*[{"Question": "q", "answer": "1"}] * 500, name="unnamed.jsonl")
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="no row has a column question or prompt"):
        sources.load_sources(_data(unnamed), directory=tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_workers_end_when_one_is_killed_or_reading_stops_early(write, monkeypatch):
    path = write(*[GOOD] * 5000)
    monkeypatch.setattr(jsonl, "SPAN_BYTES", 1000)
    for killed in (True, False):
        chunks = read_chunks_in_parallel(Path(path), COLUMNS, split="train", source=path, workers=2)
        next(chunks)
        assert len(workers()) == 2
        if killed:
            workers()[0].kill()
            with pytest.raises(DataError, match="a process that was reading the file was killed"):
                list(chunks)
        chunks.close()
        assert not workers()


SCRIPT = """
import sys
from pathlib import Path
from grpo_tasks.data import jsonl
from grpo_tasks.data.chunks import read_chunks_in_parallel
from grpo_tasks.data.records import Columns
print("started", flush=True)
jsonl.SPAN_BYTES = 1000
chunks = read_chunks_in_parallel(
    Path(sys.argv[1]), Columns("question", "prompt", "answer"), split="train", source="rows", workers=2
)
first = next(chunks)
print("reading", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
print(sum(chunk.summary.rows for chunk in [first, *chunks]))
"""


@pytest.mark.slow
def test_a_script_without_main_guard_runs_once_and_shadows_nothing(tmp_path, write):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "multiprocessing.py").write_text("raise SystemExit('the wrong module')")
    command = [sys.executable, str(tmp_path / "script.py"), write(*[GOOD] * 3000), "read"]
    # The grandparent's pid, as a step inherits it: a worker must compare itself with its own parent.
    environment = os.environ | {"GRPO_PARENT_PID": str(os.getpid()), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.stderr, done.stdout.split()) == ("", ["started", "reading", "3000"])


@pytest.mark.slow
def test_workers_die_with_their_parent(tmp_path, write):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), write(*[GOOD] * 3000), "wait"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as script:
        assert script.stdout is not None
        assert [script.stdout.readline(), script.stdout.readline()] == ["started\n", "reading\n"]
        readers = workers_of(psutil.Process(script.pid))
        assert len(readers) == 2
        script.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(readers, timeout=20)
    assert not alive
    assert len(gone) == 2

"""Every source of a config -> `rows.parquet` (schemas/tables.py Raw): all rows, the broken ones with their faults.

    DataSource --jsonl, tabular--> Record --chunks--> row group of rows.parquet

Streams: memory holds a few chunks of rows, not the file. Validates no row; the only errors are about whole files.
"""

import difflib
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import orjson
import pyarrow.parquet as pq

from grpo_tasks.content.hashes import file_sha256
from grpo_tasks.content.places import Unit, holds_array
from grpo_tasks.data.chunks import (
    PARALLEL_FROM_BYTES,
    RAW_ARROW,
    Chunk,
    ScanSummary,
    no_garbage_collection,
    num_workers,
    read_chunks,
    read_chunks_in_parallel,
)
from grpo_tasks.data.jsonl import UTF8, encoding_of, open_as_utf8, read_jsonl
from grpo_tasks.data.records import Columns, Fields, Record
from grpo_tasks.data.tabular import csv_delimiter, csv_encoding, read_csv, read_hub, read_parquet
from grpo_tasks.kit.files import replacing
from schemas.config.data import DataConfig, DataSource, template_columns
from schemas.errors import DataError
from schemas.paths import is_local, resolve, why_not_a_file
from schemas.results.data import SourceFile

ROWS = "rows.parquet"
_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}

Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The sources that were read, and the table of their rows."""

    sources: list[SourceFile]
    path: Path
    """rows.parquet"""

    @property
    def rows(self) -> int:
        """Number of rows over all sources."""
        return sum(source.rows for source in self.sources)


def load_sources(data: DataConfig, *, directory: Path) -> SourceRows:
    """Read all sources into `directory`/rows.parquet.

    Raises:
        DataError: a source is missing, unreadable, empty, or has none of the configured columns; no file is left behind then.
    """
    sources = []
    with (
        replacing(directory / ROWS) as unfinished,
        no_garbage_collection(),
        pq.ParquetWriter(unfinished, RAW_ARROW, compression="lz4") as writer,
    ):
        for split, source in _sources(data):
            sources.append(_load(source, split, data=data, writer=writer))
    return SourceRows(sources, directory / ROWS)


def source_format(source: DataSource) -> str:
    """jsonl, csv, parquet or hub; raises `DataError` for a local file whose suffix is unknown."""
    if source.format != "auto":
        return source.format
    path = Path(resolve(source.path))
    known = _FORMATS.get(path.suffix.lower())
    if known:
        return known
    if is_local(source.path):
        raise DataError(
            f"the suffix {path.suffix!r} belongs to no known format" if path.suffix else "the file name has no suffix",
            place=source.path,
            fix="set format: jsonl, csv, parquet or hub",
        )
    return "hub"


def _sources(data: DataConfig) -> Iterator[tuple[Split, DataSource]]:
    yield from (("train", source) for source in data.train)
    yield from (("eval", source) for source in data.eval)


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the bytes of a source are to be read."""

    format: str
    encoding: str = ""
    delimiter: str = ""
    unit: Unit = "row"


def _load(source: DataSource, split: Split, *, data: DataConfig, writer: pq.ParquetWriter) -> SourceFile:
    columns = _columns(data, source)
    layout = _layout(source, columns)
    path = Path(resolve(source.path))
    before = None if layout.format == "hub" else _stamp(path)
    summary, rows_digest = ScanSummary(), hashlib.sha256()
    with ThreadPoolExecutor(1) as pool:
        # hashlib releases the interpreter lock, so the file is hashed while it is read.
        file_digest = None if layout.format == "hub" else pool.submit(file_sha256, path)
        for chunk in _chunks(source, split, layout, columns=columns, rows_digest=rows_digest):
            writer.write_table(chunk.table)
            summary.add(chunk.summary)
        sha256 = file_digest.result() if file_digest else rows_digest.hexdigest()
    if source.sha256 is not None and (sha256 != source.sha256 or _stamp(path) != before):
        # The key of the run, and of this step, is that of the other contents.
        raise DataError(
            "the file has changed since this run started", place=source.path, fix="start the run again when the file is complete"
        )
    summary.check(source.path, columns)
    return SourceFile(
        path=source.path,
        split=split,
        rows=summary.rows,
        sha256=sha256,
        encoding=layout.encoding,
        delimiter=layout.delimiter,
        unit=layout.unit,
        columns=summary.columns,
        with_answer=summary.with_answer,
        from_messages=summary.from_messages,
    )


def _stamp(path: Path) -> tuple[int, int, int, int]:
    """It changes with every ordinary write, and when another file takes the name."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _columns(data: DataConfig, source: DataSource) -> Columns:
    return Columns(
        question=data.question_column,
        prompt=data.prompt_column,
        answer=data.answer_column,
        task=None if source.task else data.task_column,
        only_task=source.task or "",
        template=source.question or data.question,
        rename={**data.rename, **source.rename} or None,
    )


def _layout(source: DataSource, columns: Columns) -> _Layout:
    file_format = source_format(source)
    if file_format == "hub":
        return _Layout("hub")
    path = Path(resolve(source.path))
    _check_file(path, source)
    if file_format == "parquet":
        return _Layout("parquet")
    if file_format == "csv":
        encoding = source.encoding or csv_encoding(path)
        wanted = [columns.original(name) for name in (columns.question, columns.prompt, columns.answer, columns.task)]
        wanted += [columns.original(name) for name in template_columns(columns.template)] if columns.template else []
        return _Layout("csv", encoding, source.delimiter or csv_delimiter(path, encoding, wanted), "line")
    encoding = source.encoding or encoding_of(path)
    if path.suffix.lower() != ".json":
        return _Layout("jsonl", encoding, unit="line")
    with open_as_utf8(path, encoding) as file:
        return _Layout("jsonl", encoding, unit="record" if holds_array(path, file) else "line")


def _chunks(
    source: DataSource, split: Split, layout: _Layout, *, columns: Columns, rows_digest: "hashlib._Hash"
) -> Iterator[Chunk]:
    path = Path(resolve(source.path))
    if layout.format == "hub":
        records = _hashed(read_hub(source, resolve(source.path)), rows_digest)
    else:
        workers = num_workers()
        # A JSON array has no line structure to cut at, and the first max_rows rows need no second reader.
        can_cut = layout.format == "jsonl" and layout.unit == "line" and layout.encoding in UTF8 and source.max_rows is None
        if can_cut and workers > 1 and path.stat().st_size >= PARALLEL_FROM_BYTES:
            return read_chunks_in_parallel(path, columns, split=split, source=source.path, workers=workers)
        records = _file_records(path, layout, columns)
    return read_chunks(islice(records, source.max_rows), columns, split=split, source=source.path)


def _file_records(path: Path, layout: _Layout, columns: Columns) -> Iterator[Record]:
    if layout.format == "csv":
        return read_csv(path, delimiter=layout.delimiter, encoding=layout.encoding)
    if layout.format == "parquet":
        return read_parquet(path)
    return read_jsonl(path, answer_column=columns.original(columns.answer), encoding=layout.encoding)


def _hashed(records: Iterator[Record], digest: "hashlib._Hash") -> Iterator[Record]:
    for record in records:
        digest.update(orjson.dumps(record.fields, default=str, option=orjson.OPT_SORT_KEYS) + b"\n")
        yield record


def _check_file(path: Path, source: DataSource) -> None:
    reason = why_not_a_file(path)
    if reason:
        names = [file.name for file in path.parent.iterdir()] if reason == "no such file" and path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        fix = f"did you mean {path.parent / near[0]}?" if near else "paths are relative to the working directory"
        raise DataError(reason, place=source.path, fix=fix)
    if path.stat().st_size == 0:
        raise DataError("the file is empty", place=source.path, fix="add rows, or remove the source from the config")
    try:
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"the file cannot be opened: {error.strerror}", place=source.path, fix="check its permissions") from error


def preview(source: DataSource, limit: int) -> list[Fields]:
    """The first readable records of a file with all their columns, at most `limit`; empty for a hub data set.

    Raises:
        DataError: the file is missing, empty or unreadable.
    """
    columns = Columns("question", "prompt", "answer")
    layout = _layout(source, columns)
    if layout.format == "hub":
        return []
    records = _file_records(Path(resolve(source.path)), layout, columns)
    # A file of broken lines only must not be read to its end.
    readable = (record.fields for record in islice(records, 10 * limit) if record.fields is not None)
    return list(islice(readable, limit))

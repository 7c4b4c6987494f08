"""Every source of a config -> `rows.parquet` in the shape of schemas/tables.py Raw: all rows, the broken ones with their faults.

    source --reader--> Record --read_row--> Row --raw_table--> row group of rows.parquet

Streams: memory holds one batch of rows, not the file. Judges nothing; the only errors are about whole files.
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
from grpo_tasks.data.columnar import read_hub, read_parquet
from grpo_tasks.data.delimited import read_csv
from grpo_tasks.data.jsonl import read_jsonl
from grpo_tasks.data.parts import Part, no_cycle_search, read_parts
from grpo_tasks.data.raw_table import RAW_ARROW
from grpo_tasks.data.records import Columns, Record
from grpo_tasks.data.seen import Seen
from grpo_tasks.data.side_by_side import BIG, num_processes, read_parts_side_by_side
from schemas.config.data import DataConfig, DataSource
from schemas.errors import DataError
from schemas.paths import is_local, resolve, why_not_a_file
from schemas.results import SourceFile

ROWS = "rows.parquet"
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}

Side = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load_sources` read and where it put the rows."""

    sources: list[SourceFile]
    path: Path
    """rows.parquet"""

    @property
    def rows(self) -> int:
        """Rows of all sources together."""
        return sum(source.rows for source in self.sources)


def load_sources(data: DataConfig, *, directory: Path) -> Loaded:
    """Read all sources into `directory`/rows.parquet.

    Raises:
        DataError: a source is missing, unreadable, empty, or has none of the configured columns; nothing is left behind then.
    """
    part = directory / f"{ROWS}.part"
    sources = []
    try:
        with no_cycle_search(), pq.ParquetWriter(part, RAW_ARROW, compression="lz4") as writer:
            for side, source in _sides(data):
                sources.append(_load(source, side, data=data, writer=writer))
        part.replace(directory / ROWS)
    finally:
        part.unlink(missing_ok=True)
    return Loaded(sources, directory / ROWS)


def source_kind(source: DataSource) -> str:
    """How a source is read: jsonl, csv, parquet or hub; raises `DataError` when its name does not tell."""
    if source.format != "auto":
        return source.format
    path = Path(resolve(source.path))
    kind = _FORMATS.get(path.suffix.lower())
    if kind:
        return kind
    if is_local(source.path):
        raise DataError(
            f"the ending {path.suffix!r} does not tell the format",
            place=source.path,
            fix="set format: jsonl, csv, parquet or hub",
        )
    return "hub"


def _sides(data: DataConfig) -> Iterator[tuple[Side, DataSource]]:
    yield from (("train", source) for source in data.train)
    yield from (("eval", source) for source in data.eval)


def _load(source: DataSource, side: Side, *, data: DataConfig, writer: pq.ParquetWriter) -> SourceFile:
    columns = Columns(data.question_column, data.prompt_column, data.answer_column)
    seen, rows_digest = Seen(), hashlib.sha256()
    with ThreadPoolExecutor(1) as pool:
        file_digest = None if source_kind(source) == "hub" else pool.submit(file_sha256, Path(resolve(source.path)))
        for part in _parts(source, side, columns=columns, rows_digest=rows_digest):
            writer.write_table(part.table)
            seen.add(part.seen)
        sha256 = file_digest.result() if file_digest else rows_digest.hexdigest()
    seen.check(source.path, columns)
    return SourceFile(path=source.path, side=side, rows=seen.rows, sha256=sha256)


def _parts(source: DataSource, side: Side, *, columns: Columns, rows_digest: "hashlib._Hash") -> Iterator[Part]:
    path, kind = Path(resolve(source.path)), source_kind(source)
    if kind == "hub":
        records = _digested(read_hub(source, resolve(source.path)), rows_digest)
    else:
        _check_file(path, source)
        processes = num_processes()
        apart = kind == "jsonl" and path.suffix != ".json" and source.max_rows is None
        if apart and processes > 1 and path.stat().st_size >= BIG:
            return read_parts_side_by_side(path, columns, side=side, source=source.path, processes=processes)
        records = _records(path, kind, columns)
    return read_parts(islice(records, source.max_rows), columns, side=side, source=source.path)


def _records(path: Path, kind: str, columns: Columns) -> Iterator[Record]:
    if kind == "csv":
        return read_csv(path)
    return read_parquet(path) if kind == "parquet" else read_jsonl(path, answer_column=columns.answer)


def _digested(records: Iterator[Record], digest: "hashlib._Hash") -> Iterator[Record]:
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
        raise DataError("the file is empty", place=source.path, fix="give it rows or take it out of the config")
    try:
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"the file cannot be opened: {error.strerror}", place=source.path, fix="check its permissions") from error

"""Every source of a config -> `rows.parquet` in the shape of schemas/tables.py Raw: all rows, the broken ones with their faults.

    source --reader--> Record --read_row--> Row --RawWriter--> row group of rows.parquet

Streams: memory holds one batch of rows, not the file. Judges nothing; the only errors are about whole files.
"""

import difflib
import gc
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import orjson

from grpo_tasks.data.columnar import read_hub, read_parquet
from grpo_tasks.data.delimited import read_csv
from grpo_tasks.data.jsonl import read_jsonl
from grpo_tasks.data.raw_writer import RawWriter
from grpo_tasks.data.records import Record, read_row
from schemas.config import DataConfig, DataSource
from schemas.errors import DataError
from schemas.paths import resolve
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
        with _no_cycle_search(), RawWriter(part) as writer:
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
    if path.exists():
        raise DataError(
            f"the ending {path.suffix!r} does not tell the format",
            place=source.path,
            mend="set format: jsonl, csv, parquet or hub",
        )
    return "hub"


@dataclass(slots=True)
class _Seen:
    """Which columns a source has, told from its rows."""

    data: DataConfig
    readable: int = 0
    with_prompt: int = 0
    with_answer: int = 0
    columns: dict[str, None] = field(default_factory=dict)

    def note(self, record: Record) -> None:
        if record.fields is None:
            return
        if not self.readable:
            self.columns.update(dict.fromkeys(str(key) for key in record.fields))
        self.readable += 1
        self.with_prompt += self.data.prompt_column in record.fields or self.data.question_column in record.fields
        self.with_answer += self.data.answer_column in record.fields

    def check(self, source: DataSource, rows: int) -> None:
        if not rows:
            raise DataError("the source holds no rows", place=source.path, mend="give it rows or take it out of the config")
        if not self.readable:
            raise DataError(
                "no line of the file can be read", place=source.path, mend="check the file, or set the source's format"
            )
        if not self.with_prompt:
            raise self._missing(source, "question_column", "prompt_column")
        if not self.with_answer:
            raise self._missing(source, "answer_column")

    def _missing(self, source: DataSource, *settings: str) -> DataError:
        wanted = [str(getattr(self.data, setting)) for setting in settings]
        lower = {name.lower(): name for name in self.columns}
        near = [lower[hit] for name in wanted for hit in difflib.get_close_matches(name.lower(), lower, n=1)]
        guess = f"data.{settings[0]}: {near[0]}" if near else f"data.{settings[0]} to one of them"
        return DataError(
            f"no row has a column {' or '.join(wanted)}; there are: {', '.join(self.columns)}",
            place=source.path,
            mend=f"set {guess}",
        )


def _sides(data: DataConfig) -> Iterator[tuple[Side, DataSource]]:
    yield from (("train", source) for source in data.train)
    yield from (("eval", source) for source in data.eval)


@contextmanager
def _no_cycle_search() -> Iterator[None]:
    """Rows hold no cycles; searching a million of them for some took a fifth of the reading time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load(source: DataSource, side: Side, *, data: DataConfig, writer: RawWriter) -> SourceFile:
    seen, rows = _Seen(data), 0
    kind = source_kind(source)
    rows_digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as pool:
        file_digest = None if kind == "hub" else pool.submit(_digest, source)
        for record in islice(_records(source, kind, data), source.max_rows):
            rows += 1
            seen.note(record)
            if kind == "hub":
                rows_digest.update(orjson.dumps(record.fields, default=str, option=orjson.OPT_SORT_KEYS) + b"\n")
            writer.add(read_row(record, data), side=side, source=source.path, line=record.line)
        sha256 = file_digest.result() if file_digest else rows_digest.hexdigest()
    seen.check(source, rows)
    return SourceFile(path=source.path, side=side, rows=rows, sha256=sha256)


def _digest(source: DataSource) -> str:
    with Path(resolve(source.path)).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _records(source: DataSource, kind: str, data: DataConfig) -> Iterator[Record]:
    if kind == "hub":
        return read_hub(source, resolve(source.path))
    path = Path(resolve(source.path))
    _check_file(path, source)
    if kind == "csv":
        return read_csv(path)
    return read_parquet(path) if kind == "parquet" else read_jsonl(path, answer_column=data.answer_column)


def _check_file(path: Path, source: DataSource) -> None:
    if not path.is_file():
        names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        mend = f"did you mean {path.parent / near[0]}?" if near else "paths are relative to the working directory"
        raise DataError("it is a folder, not a file" if path.is_dir() else "no such file", place=source.path, mend=mend)
    if path.stat().st_size == 0:
        raise DataError("the file is empty", place=source.path, mend="give it rows or take it out of the config")
    try:
        path.open("rb").close()
    except OSError as error:
        raise DataError(
            f"the file cannot be opened: {error.strerror}", place=source.path, mend="check its permissions"
        ) from error

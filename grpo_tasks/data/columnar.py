"""Parquet files and hub data sets -> records, numbered from 1. `datasets` is imported for hub ids only."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_tasks.data.records import Record
from schemas.config.data import DataSource
from schemas.errors import DataError

_BATCH = 4096


def read_parquet(path: Path) -> Iterator[Record]:
    """Records of a Parquet file; raises `DataError` when it is none, or broken."""
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(number, fields)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"not readable as Parquet: {error}",
            place=f"{path}, after row {number}",
            fix="write the file again, or set the source's format",
        ) from error


def read_hub(source: DataSource, path: str) -> Iterator[Record]:
    """Records of one split of a hub data set (or of a local folder in the hub's layout).

    Raises:
        DataError: the data set, its configuration or split is unknown or cannot be reached.
    """
    from datasets import load_dataset

    try:
        # No code of the data set's own is run: datasets 4 and later have no scripts.
        dataset = load_dataset(path, source.name, split=source.split, revision=source.revision)
    except Exception as error:  # datasets raises what its readers and the network raise
        raise DataError(
            f"the hub data set cannot be loaded: {shorten_lines(error)}",
            place=f"{source.path} (name {source.name}, split {source.split})",
            fix="check the id, data.*.name and data.*.split; a local file needs its ending (.jsonl, .csv, .parquet)",
        ) from error
    number = 0
    for table in dataset.with_format("arrow").iter(_BATCH):
        for fields in table.to_pylist():
            number += 1
            yield Record(number, fields)


def shorten_lines(error: Exception) -> str:
    """The first line of an exception's text, with its type."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"

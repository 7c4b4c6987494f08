"""The files of a data source, in the order in which they are read.

    data.csv                 a file, also packed: data.csv.gz, data.jsonl.zst
    parts/train-*.parquet    a pattern, sorted by name; ** matches folders
    parts                    a folder: every data file below it; where names tell splits apart, those of source.split
    saved                    what save_to_disk of a Dataset or DatasetDict wrote: its Arrow files

Each file is read as a source of its own, so its rows have its name and their own numbers. No data file is opened here, and
nothing that a folder holds is executed.
"""

import glob
import os
import re
from itertools import islice
from pathlib import Path

import orjson

from grpo_tasks.content.hashes import digest_of, file_sha256, folder_sha256
from schemas.config.data import DataSource
from schemas.errors import DataError
from schemas.paths import EMBEDDED, is_local, resolve

PACKINGS = {".gz": "gzip", ".zst": "zstd"}
FORMATS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow",
}  # fmt: skip
MAX_FILES = 10_000
MAX_SEEN = 50_000
"""Files and folders below a folder that is named as a source: a whole disk takes minutes."""
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
"""JSON files that describe a data set and hold no rows."""
_SPLITS = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
}  # fmt: skip
"""Words in names of files, and the split that each means, as in the library datasets."""
_SPLIT_WORD = re.compile(rf"(?:^|[-._/ ])({'|'.join(_SPLITS)})(?=[-._/ 0-9])")


def unpacked_name(path: Path) -> Path:
    """The name of a file without .gz or .zst."""
    return path.with_suffix("") if path.suffix.lower() in PACKINGS else path


def format_of(path: Path) -> str | None:
    """The format that a file's name tells, packed or not; None for a name that tells none."""
    return FORMATS.get(unpacked_name(path).suffix.lower())


def is_pattern(path: str) -> bool:
    """Whether a path stands for the files that match it. A file may have such a name."""
    return glob.has_magic(path) and not path.startswith(EMBEDDED) and not is_local(path)


def shards_of(source: DataSource) -> list[DataSource]:
    """One source for each file; the source itself for a single file and a data set of the hub, whether it exists or not.

    `DataError` where a pattern matches no file, or a folder holds none, files of several formats, or not the split.
    """
    names = list(source.locked_files) or _names(source)
    if names == [source.path]:
        return [source]
    locked = source.locked_files
    shards = [source.model_copy(update={"path": name}) for name in names]
    return [one.locked({one.path: locked[one.path]}) if locked else one for one in shards]


def shards_sha256(source: DataSource) -> str:
    """SHA-256 (hex) of the file, or over names and contents of several; empty for a data set of the hub."""
    paths = ((one, Path(resolve(one.path))) for one in shards_of(source))
    found = [
        (one.path, one.sha256 or (file_sha256 if path.is_file() else folder_sha256)(path))
        for one, path in paths
        if one.sha256 or path.exists()
    ]
    return (
        digest_of(found) if len(found) > 1 or (found and found[0][0] != source.path) else "".join(sha256 for _, sha256 in found)
    )


def _names(source: DataSource) -> list[str]:
    folder = Path(resolve(source.path))
    if is_pattern(source.path):
        names = sorted(name for name in glob.iglob(source.path, recursive=True) if not os.path.isdir(name))  # noqa: PTH112, PTH207
        if not names:
            fix = f"paths are relative to the working directory, {Path.cwd()}"
            raise DataError("no file matches the pattern", place=source.path, fix=fix)
        return _limited(names, source)
    if source.format == "hub" or not folder.is_dir():
        return [source.path]
    if (folder / "dataset_dict.json").is_file():
        splits = _description(folder / "dataset_dict.json", "splits", source)
        if source.split not in splits:
            known = f"the data set has no split {source.split}"
            raise DataError(known, place=source.path, fix=f"set the source's split: {' or '.join(splits)}")
        folder = folder / source.split
    if (folder / "state.json").is_file():
        listed = _description(folder / "state.json", "_data_files", source)
        return _limited([str(Path(source.path) / folder.relative_to(resolve(source.path)) / name) for name in listed], source)
    return _of_folder(folder, source)


def _of_folder(folder: Path, source: DataSource) -> list[str]:
    unlisted = list[OSError]()
    walk = os.walk(folder, onerror=unlisted.append)
    seen = list(islice((Path(place, name) for place, folders, files in walk for name in [*folders, *files]), MAX_SEEN + 1))
    if len(seen) > MAX_SEEN:
        what = f"the folder holds more than {MAX_SEEN:,} files and folders"
        raise DataError(what, place=source.path, fix="name a folder of data files, or a pattern such as data/*.parquet")
    broken = next((error for error in unlisted if not isinstance(error, PermissionError)), None)
    if broken is not None:
        # Its rows would be missing without a word.
        fix = "check the disk, or name the files with a pattern such as data/*.parquet"
        raise DataError(f"a folder cannot be listed: {broken.strerror}", place=str(broken.filename), fix=fix) from broken
    below = [path.relative_to(folder) for path in sorted(seen)]
    found = [path for path in below if format_of(path) and not _hidden(path) and path.name not in _DESCRIPTIONS]
    if source.format != "auto":
        found = [path for path in found if format_of(path) == source.format]
    if not found:
        fix = "name a data file, a pattern such as data/*.parquet, or the id of a data set of the hub"
        raise DataError("the folder holds no data file", place=source.path, fix=fix)
    splits = {path: _split_of(path) for path in found}
    known = sorted({split for split in splits.values() if split})
    if len(known) > 1 or (known and source.split not in ("train", *known)):
        wanted = _SPLITS.get(source.split, source.split)
        if wanted not in known or None in splits.values():
            loose = next((str(path) for path, split in splits.items() if split is None), "")
            what = f", and {loose} belongs to none" if loose else ""
            raise DataError(
                f"the folder holds files of the splits {', '.join(known)}{what}",
                place=source.path,
                fix=f"name the files by a pattern, for example {Path(source.path) / f'*{known[0]}*'}, or set the source's split",
            )
        found = [path for path in found if splits[path] == wanted]
    formats = sorted({str(format_of(path)) for path in found})
    if len(formats) > 1:
        example = Path(source.path) / f"*{unpacked_name(found[0]).suffix}"
        fix = f"set the source's format, or name the files by a pattern, for example {example}"
        raise DataError(f"the folder holds files of several formats: {', '.join(formats)}", place=source.path, fix=fix)
    return _limited([str(Path(source.path) / path) for path in found], source)


def _split_of(path: Path) -> str | None:
    # The name of the file decides before those of its folders.
    words = _SPLIT_WORD.findall(path.name.lower()) or _SPLIT_WORD.findall(f"{path.parent.as_posix().lower()}/")
    return _SPLITS[words[-1]] if words else None


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _description(file: Path, key: str, source: DataSource) -> list[str]:
    """The names in a list of a saved data set; each is a name inside the folder."""
    try:
        described = orjson.loads(file.read_bytes())
        listed = [one["filename"] if isinstance(one, dict) else one for one in described[key]]
        if not listed or any(not isinstance(name, str) or Path(name).name != name for name in listed):
            raise ValueError(f"{key} lists no names")
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{file.name} does not describe a saved data set: {type(error).__name__}: {error}"
        raise DataError(what[:300], place=source.path, fix="save the data set again with save_to_disk") from error
    return listed


def _limited(names: list[str], source: DataSource) -> list[str]:
    if len(names) > MAX_FILES:
        raise DataError(
            f"the source has {len(names):,} files, more than {MAX_FILES:,}",
            place=source.path,
            fix="name a folder or a pattern with fewer files, or join them",
        )
    return names

"""What runs, caches and servers have left on this disk, and its removal (`grpo clean`).

    OUTPUT_DIR/NAME/                      run         all that one config has written
    OUTPUT_DIR/NAME/STEP/LABEL-KEY/       superseded  finished, and the same step has finished later with other inputs
    .../LABEL-KEY.damaged-N, .X.part      remains     copies of damaged stages, files that a killed process left
    models, champions, downloads          cache       registered models on this disk; they are fetched again when they are needed
    .grpo/*.log, hashes of large files    cache

Nothing is removed that a process uses or that a person still has to decide about. A registered model needs none of this: MLflow
has its files. Folders that no run has made are neither listed nor touched.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

import psutil

from grpo_tasks.content.hashes import cache_folder
from grpo_tasks.kit.files import is_unfinished, remove
from grpo_tasks.kit.lock import file_lock
from grpo_tasks.operating.servers import FOLDER, Stack
from grpo_tasks.processes.child import RESULT
from grpo_tasks.running.step import LOCKS
from grpo_tasks.tracking.registry import PENDING, standings
from schemas.config.operations import TrackingConfig
from schemas.errors import TrackingError, UserError
from schemas.results.publication import Publication

Kind = Literal["run", "superseded", "remains", "cache"]
CACHES = ("models", "champions", "downloads")
_OF_A_STEP = re.compile(r"(.+)-[0-9a-f]{16}")
_DAMAGED = re.compile(r"(.+)-[0-9a-f]{16}\.damaged-\d+")
_LONGEST = 4_096
"""Characters of a path."""
_UNKNOWN = "MLflow cannot be asked about the model that it made"


@dataclass(frozen=True, slots=True)
class Found:
    """A folder or file that `grpo clean` can remove as a whole."""

    kind: Kind
    path: Path
    size_bytes: int
    used: float
    """When something in it was written last, in seconds since the epoch."""
    note: str = ""
    keep: str = ""
    """Why it stays, whatever is selected."""
    by_name: str = ""
    """Why it stays unless it is named."""
    run: Path | None = None
    """Folder of the run that it belongs to."""


@dataclass(frozen=True, slots=True)
class _Published:
    """What a run has registered."""

    versions: list[str]
    """NAME/VERSION of each model."""
    unreadable: str = ""
    """A result that would say more of them, and cannot be read."""


class _InUseError(Exception):
    """Somebody else has the lock."""


def find(runs: Path, workdir: Path, tracking: TrackingConfig) -> list[Found]:
    """Everything below a folder of runs, the caches of this user, and what `grpo up` left in a working directory."""
    folders = sorted(path for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    of_runs = [folder for folder in folders if (folder / LOCKS).is_dir()]
    made = {folder: _published(folder) for folder in of_runs}
    standing: dict[str, str] | None = {}
    if any(published.versions for published in made.values()):
        try:
            standing = standings(tracking)
        except TrackingError:
            standing = None
    words = _words_of_processes()
    found = [one for folder in of_runs for one in _of_run(folder, made[folder], standing, words)]
    busy = next((one.keep for one in found if one.kind == "run" and one.keep.startswith("in use")), "")
    caches = [folder for folder in folders if folder.name in CACHES and folder not in of_runs]
    found += [_measured("cache", path, keep=busy or _used_by_process(path, words)) for path in caches]
    running = ", ".join(Stack(workdir).running())
    keep = f"in use by {running}" if running else ""
    found += [_measured("cache", log, note="of grpo up", keep=keep) for log in sorted((workdir / FOLDER).glob("*.log*"))]
    if (hashes := cache_folder()).is_dir():
        found.append(_measured("cache", hashes, note="hashes of large files", keep=busy))
    return found


def check_names(names: Sequence[str], found: Sequence[Found]) -> None:
    """`UserError` for a name that is that of no run here."""
    known = sorted({one.run.name for one in found if one.run is not None})
    for name in names:
        if not any(fnmatch(run, name) for run in known):
            here = f"the runs here are {', '.join(known[:12])}" if known else "there are no runs here"
            raise UserError(f"no such run: {name}", fix=f"{here}; name one, not a path, or another folder with --runs")


def select(
    found: Sequence[Found], *, names: Sequence[str] = (), kinds: Sequence[Kind] = (), older_than_s: float = 0.0
) -> list[Found]:
    """Runs of these names (`*` stands for anything; none: all of this age), or with `kinds` only these parts of them.

    What has to stay is listed too, with the reason in `keep`.
    """
    latest = time.time() - older_than_s
    chosen = []
    for one in found:
        named = one.run is not None and any(fnmatch(one.run.name, name) for name in names)
        if one.used <= latest and one.kind in (kinds or ("run",)) and (named or not names):
            chosen.append(one if named else replace(one, keep=one.keep or one.by_name))
    return chosen


def delete(chosen: Sequence[Found]) -> list[Found]:
    """Remove what has no reason to stay; returns what was removed, without what has come into use since."""
    removed = []
    for one in chosen:
        with suppress(_InUseError):
            if one.keep:
                continue
            with nullcontext() if one.run is None else _alone(one.run):
                _remove_below(one.path)
            removed.append(one)
    return removed


def _remove_below(path: Path) -> None:
    """Remove a path; of the folder of a run its locks last, one of which is held."""
    if path.is_dir():
        for below in path.iterdir():
            if below.name != LOCKS:
                remove(below)
    if path.is_dir() and (path / LOCKS).is_dir():
        shutil.rmtree(path / LOCKS)
        # A run that has begun meanwhile has written something.
        with suppress(OSError):
            path.rmdir()
    else:
        remove(path)


def _of_run(
    folder: Path, published: _Published, standing: dict[str, str] | None, words: Sequence[tuple[int, Path]]
) -> Iterator[Found]:
    """The folder of a run, and what could go without the rest."""
    try:
        with _alone(folder):
            keep = _used_by_process(folder, words)
    except _InUseError as holder:
        keep = f"in use by {holder}"
    versions = published.versions
    known = {version: standing[version] for version in versions if version in standing} if standing is not None else {}
    waits = next((f"{version} {PENDING}" for version, what in known.items() if PENDING in what), "")
    stood = ", ".join(f"{version} ({what})" for version, what in known.items())
    doubt = f"{published.unreadable} cannot be read, and a model that it names may wait for approval"
    doubts = [doubt] if published.unreadable else []
    note = [f"made {', '.join(versions)}"] if versions else []
    unfinished = [path.parent for path in folder.glob("train_stage/*/checkpoints") if not (path.parent / RESULT).exists()]
    note += [f"can resume {', '.join(stage.name.rpartition('-')[0] for stage in unfinished)}"] if unfinished else []
    yield _measured(
        "run",
        folder,
        note="; ".join(note),
        keep=keep or waits or (_UNKNOWN if versions and standing is None else ""),
        by_name="; ".join([*([f"made {stood}"] if stood else []), *doubts]),
        run=folder,
    )
    # The runs of a sweep share these folders, and each needs its own.
    older = [] if (folder / "sweeps").is_dir() else list(_older(folder))
    # Without the result a later call would take the run for one that has published nothing.
    yield from (_measured("superseded", path, keep=keep or waits, by_name="".join(doubts), run=folder) for path in older)
    for path in [*folder.iterdir(), *(below for step in folder.iterdir() if step.is_dir() for below in step.iterdir())]:
        if _DAMAGED.fullmatch(path.name) or is_unfinished(path.name):
            yield _measured("remains", path, keep=keep, run=folder)
        elif path.name in CACHES and path.parent == folder:
            yield _measured("cache", path, keep=keep, run=folder)


def _older(folder: Path) -> Iterator[Path]:
    """Finished results of steps that have finished again since, with other inputs."""
    finished: dict[tuple[str, str], list[tuple[int, Path]]] = {}
    for result in folder.glob(f"*/*/{RESULT}"):
        if label := _OF_A_STEP.fullmatch(result.parent.name):
            same = finished.setdefault((result.parent.parent.name, label[1]), [])
            same.append((result.stat().st_mtime_ns, result.parent))
    for same in finished.values():
        yield from (path for _, path in sorted(same)[:-1])


def _published(folder: Path) -> _Published:
    """What the results of a run's step publish_model say; one may be damaged, or written by another version of this program."""
    made, unreadable = set(), ""
    for result in sorted(folder.glob(f"publish_model/*/{RESULT}")):
        try:
            published = Publication.load(result)
            made.add((published.model_name, int(published.model_version)))
        except (ValueError, OSError, UserError):
            unreadable = str(result.relative_to(folder))
    return _Published([f"{name}/{number}" for name, number in sorted(made)], unreadable)


def _measured(kind: Kind, path: Path, *, note: str = "", keep: str = "", by_name: str = "", run: Path | None = None) -> Found:
    size, used, seen = 0, 0.0, set[tuple[int, int]]()
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        with suppress(OSError):
            status = file.lstat()
            # A lock is written whenever somebody asks for it.
            if stat.S_ISDIR(status.st_mode) or LOCKS in file.parts:
                continue
            used = max(used, status.st_mtime)
            size += 0 if (status.st_dev, status.st_ino) in seen else status.st_size
            seen.add((status.st_dev, status.st_ino))
    used = used or path.lstat().st_mtime
    return Found(kind, path, size, used, note, keep, by_name, run)


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Hold the lock that every run in the folder shares; `_InUseError` where one does."""

    def refuse(holder: str) -> None:
        raise _InUseError(holder)

    with file_lock(run / LOCKS / "folder", holder="grpo clean", on_wait=refuse):
        yield


def _words_of_processes() -> list[tuple[int, Path]]:
    """Every argument of another process that may be a path, with the number of the process."""
    words = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error, OSError, ValueError):
            here = Path(process.cwd())
            given = [] if process.pid == os.getpid() else process.info["cmdline"] or []
            words += [(process.pid, (here / word).resolve()) for word in given if 0 < len(word) < _LONGEST]
    return words


def _used_by_process(folder: Path, words: Sequence[tuple[int, Path]]) -> str:
    """A stage that was started by hand and a server of models hold no lock, but name the folder."""
    whole = folder.resolve()
    return next((f"in use by process {pid}" for pid, word in words if word.is_relative_to(whole)), "")

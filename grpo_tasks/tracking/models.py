"""Registered models on this disk. Every file is verified; a folder holds the complete model or does not exist.

An interrupted download leaves DIR.part. The next download keeps the files in it that are complete.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from grpo_tasks.content.hashes import digest_of, file_sha256, files_below
from grpo_tasks.kit.progress import Count
from grpo_tasks.tracking.registry import ADAPTER_HASH, CHAMPION, SHA_TAG, find_version, hash_of, run_of, version_or_none
from grpo_tasks.tracking.store import Store, open_store
from schemas.config.operations import TrackingConfig
from schemas.errors import ModelError, StoreAwayError, TrackingError
from schemas.results.model import ModelRef

FOLDER = "model"
"""Folder of an artifact with the files of the merged model."""
ADAPTER = "adapter"
"""Artifact path of an adapter: in the run of its stage, and next to the model that it was merged into."""
ORIGIN = "grpo.json"
"""File that `grpo download` adds to a model's folder: its lineage."""
Manifest = dict[str, dict[str, str | int]]
"""By file name: SHA-256 and size in bytes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Champion:
    """The version that carries the alias `champion`."""

    version: str
    sha256: str
    """Over all files of its model folder, as in `MergeProof`; empty for a version that this project did not publish."""
    run_id: str


def current_champion(store: Store, name: str) -> Champion | None:
    """The current champion of a registered model; None when there is no such model or no alias."""
    found = store.call(lambda client: version_or_none(client, name, alias=CHAMPION))
    if found is None:
        return None
    return Champion(version=str(found.version), sha256=found.tags.get(SHA_TAG, ""), run_id=found.run_id or "")


def check_champion(name: str, tracking: TrackingConfig) -> None:
    """Raise `ModelError`, before anything is trained, where a new model could not be compared with the champion."""
    store = open_store(tracking)
    champion = current_champion(store, name)
    if champion is not None:
        with _comparable(name, champion):
            read_manifest(store, find_version(f"{name}/{champion.version}", tracking))


def fetch_champion(name: str, tracking: TrackingConfig, directory: Path) -> tuple[Champion, ModelRef] | None:
    """The current champion and its verified files below `directory`, fetched once per version; None when there is no champion."""
    champion = current_champion(open_store(tracking), name)
    if champion is None:
        return None
    with _comparable(name, champion):
        return champion, download_model(f"models:/{name}/{champion.version}", tracking, directory)


@contextmanager
def _comparable(name: str, champion: Champion) -> Iterator[None]:
    """Say of an error that it concerns the champion, and how runs of this model go on."""
    try:
        yield
    except StoreAwayError:
        raise
    except (ModelError, TrackingError) as error:
        said = f"a new model cannot be compared with the champion of {name}, version {champion.version}: {error.message}"
        other = f"make another version the champion (grpo rollback {name} --to VERSION)"
        fix = f"{other}, or compare with the base alone (grpo run CONFIG --no-champion)"
        raise type(error)(said, place=error.place, fix=fix) from error


def download_model(uri: str, tracking: TrackingConfig, directory: Path) -> ModelRef:
    """The model of NAME@ALIAS or NAME/VERSION below `directory`, verified (`fetch_version`) and fetched once per version."""
    version = find_version(uri, tracking)
    # The run id is in the name because two stores may both have a version 3 of the same model name.
    target = directory / f"{version.name}-{version.version}-{(version.run_id or 'none')[:8]}"
    folder = fetch_version(version, tracking, target, ours=True)
    return ModelRef(path=str(folder), sha256=version.tags[SHA_TAG])


def download_adapter(reference: str, tracking: TrackingConfig, directory: Path) -> Path:
    """The adapter that a version was merged from, below `directory`, verified and fetched once; else `ModelError`."""
    version = find_version(reference, tracking)
    store, run_id = open_store(tracking), version.run_id or ""
    experiment = run_of(store, version).info.experiment_id if run_id else ""
    name, sha256 = f"version {version.version} of {version.name}", hash_of(version, ADAPTER_HASH)
    target = directory / f"{version.name}-{version.version}-{run_id[:8] or 'none'}-adapter"
    weights = target / "adapter_model.safetensors"
    if weights.is_file() and file_sha256(weights) == sha256:
        return target
    shutil.rmtree(target, ignore_errors=True)
    ours = f"tags.`mlflow.parentRunId` = '{run_id}' and tags.`{SHA_TAG}` = '{sha256}'"
    stages = store.call(lambda client: client.search_runs([experiment], ours)) if run_id and sha256 else []
    with tempfile.TemporaryDirectory() as folder:
        found = filter(None, (store.download(run.info.run_id, ADAPTER, Path(folder)) for run in stages))
        if adapter := next(found, None):
            shutil.copytree(adapter, target)
    if not target.exists():
        raise ModelError(f"{name} has no adapter", place=store.uri, fix=f"it is complete: grpo download {reference} DIR")
    if not weights.is_file() or file_sha256(weights) != sha256:
        raise ModelError(f"the adapter of {name} differs from what was recorded (other SHA-256)", place=store.uri)
    return target


def fetch_version(version: ModelVersion, tracking: TrackingConfig, target: Path, *, ours: bool = False) -> Path:
    """Download the files of a version into `target`. Tag, manifest and every file must agree, else `ModelError`.

    With `ours` the folder belongs to the pipeline: when a file in it differs, the model is fetched again instead of refused.
    """
    store = open_store(tracking)
    manifest = read_manifest(store, version)
    if target.exists() and any(target.iterdir()):
        faults = _faults(target, manifest)
        if not faults:
            return target
        if not ours:
            raise ModelError("the folder holds other files", place=str(target), fix="name a new folder, or empty this one")
        _log.warning("%s: %s differs from what was published; downloading the model again", target, faults[0])
        shutil.rmtree(target)
    incomplete = target.with_name(target.name + ".part")
    incomplete.mkdir(parents=True, exist_ok=True)
    # What an interrupted download left: complete files stay, incomplete and unknown ones are fetched again or removed.
    missing = _faults(incomplete, manifest)
    count = Count(f"downloading {version.name} version {version.version}", len(missing), "files")
    for name in missing:
        if name in manifest:
            _fetch(store, version, name, incomplete)
        else:
            (incomplete / name).unlink()
        count.add()
    if wrong := _faults(incomplete, manifest):
        raise ModelError(
            f"{wrong[0]} differs from what was published (other SHA-256)",
            place=str(incomplete),
            fix="download again; if the error stays, the file in the store was changed",
        )
    # An empty folder in the way would stop the rename, which makes all files appear at once.
    if target.exists():
        target.rmdir()
    incomplete.replace(target)
    return target


def _faults(folder: Path, manifest: Manifest) -> list[str]:
    """Names of files that are missing or differ, and of files that the manifest does not list."""
    found = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
    wrong = [
        name
        for name, entry in manifest.items()
        if name not in found or found[name].stat().st_size != entry["size"] or file_sha256(found[name]) != entry["sha256"]
    ]
    return wrong + sorted(found.keys() - manifest.keys() - {ORIGIN})


def _fetch(store: Store, version: ModelVersion, name: str, folder: Path) -> None:
    """Download one file into `folder`. It arrives in another folder and is moved: a kill leaves no incomplete file behind."""
    incoming = folder / ".incoming"
    uri = f"models:/{version.name}/{version.version}/{FOLDER}/{name}"

    def load(_: MlflowClient) -> str:
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir()
        return str(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(incoming)))

    arrived = Path(store.call_globally(load))
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    arrived.replace(folder / name)
    shutil.rmtree(incoming)


def manifest_path(sha256: str) -> str:
    """Artifact path, in the parent run, of the manifest of a merged model."""
    return f"publication/manifest-{sha256[:16]}.json"


def manifest_of(folder: Path) -> Manifest:
    """SHA-256 and size of every file of a model folder."""
    files = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
    return {name: {"sha256": file_sha256(path), "size": path.stat().st_size} for name, path in files.items()}


def manifest_sha256(manifest: Manifest) -> str:
    """The model's SHA-256, equal to `folder_sha256` of a folder with exactly the files of the manifest."""
    return digest_of((name, str(entry["sha256"])) for name, entry in manifest.items())


def read_manifest(store: Store, version: ModelVersion) -> Manifest:
    """The manifest of a version from the store. Raises `ModelError` where there is none, or it contradicts the registry's tag."""
    sha256 = version.tags.get(SHA_TAG, "")
    of = f"version {version.version} of {version.name}"
    if not version.run_id or not sha256:
        raise ModelError(
            f"{of} has no manifest: it was not published by this project",
            place=store.uri,
            fix=f"mlflow artifacts download -u models:/{version.name}/{version.version}",
        )
    run, path = run_of(store, version), manifest_path(sha256)
    text = store.read(run.info.run_id, path)
    if text is None:
        raise ModelError(
            f"{of} has no manifest any more: it is not where MLflow has left it",
            place=f"{run.info.artifact_uri}/{path}",
            fix="put the artifacts back, or run its config again, which uploads them",
        )
    manifest = parse_manifest(text)
    if manifest is None or manifest_sha256(manifest) != sha256:
        raise ModelError(
            f"the manifest of {of} does not agree with the registry (tag {SHA_TAG})",
            place=f"{store.uri}, run {version.run_id}, {path}",
            fix="do not use this version: its manifest or its tag was changed; publish the model again",
        )
    return manifest


def parse_manifest(text: str) -> Manifest | None:
    """The manifest in a text; None when it is none. Raises `ModelError` where a file name leads out of the model's folder."""
    try:
        manifest: Manifest = json.loads(text)
        [(bytes.fromhex(str(entry["sha256"])), int(entry["size"])) for entry in manifest.values()]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    for name in manifest:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ModelError(f"the manifest names a file outside the model: {name}", fix="do not use this model")
    return manifest

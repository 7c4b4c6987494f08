"""A registered model on this disk: every file checked against the manifest of its publication, whole or not there at all.

    version -> manifest (file -> SHA-256, size) -> DIR.part, file by file -> all verified -> DIR

A download that broke off leaves DIR.part; the next one keeps the files in it that are whole.
"""

import json
import logging
import shutil
from pathlib import Path, PurePosixPath

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from grpo_tasks.content.hashes import digest_of, file_sha256, files_below
from grpo_tasks.tracking.store import Store, open_store
from schemas.config.operations import TrackingConfig
from schemas.errors import ModelError

FOLDER = "model"
"""Where MLflow keeps the files of a transformers model."""
ORIGIN = "grpo.json"
"""File beside a downloaded model: its lineage."""

_log = logging.getLogger(__name__)


Manifest = dict[str, dict[str, str | int]]
"""By file: its SHA-256 and its size in bytes."""


def manifest_path(sha256: str) -> str:
    """Artifact of the parent run with the manifest of a merged model."""
    return f"publication/manifest-{sha256[:16]}.json"


def manifest_of(folder: Path) -> Manifest:
    """SHA-256 and size of every file of a model folder."""
    names = [(path, path.relative_to(folder).as_posix()) for path in files_below(folder)]
    return {name: {"sha256": file_sha256(path), "size": path.stat().st_size} for path, name in names}


def manifest_sha256(manifest: Manifest) -> str:
    """The model's SHA-256 as `folder_sha256` gives it for the files of the manifest."""
    return digest_of((name, str(entry["sha256"])) for name, entry in manifest.items())


def fetch_version(version: ModelVersion, tracking: TrackingConfig, target: Path, *, ours: bool = False) -> Path:
    """The files of a version in `target`. The one way in which a registered model gets onto this disk.

    The registry's tag, the manifest in the store and every file have to agree. `ours` says that the folder is the pipeline's own:
    when a file in it differs, the model is fetched again instead of being refused.

    Raises:
        ModelError: `target` holds something else, there is no manifest, or something is not what was published.
        TrackingError: the store cannot be reached; calling again resumes the download.
    """
    store = open_store(tracking)
    manifest = read_manifest(store, version)
    if target.exists() and any(target.iterdir()):
        faults = _faults(target, manifest)
        if not faults:
            return target
        if not ours:
            raise ModelError("the folder holds something else", place=str(target), fix="name a new folder, or empty this one")
        _log.warning("%s: %s is not what was published; fetching the model again", target, faults[0])
        shutil.rmtree(target)
    part = target.with_name(target.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    for name in _faults(part, manifest):
        if name in manifest:
            _fetch(store, version, name, part)
        else:
            (part / name).unlink()
    wrong = _faults(part, manifest)
    if wrong:
        raise ModelError(
            f"{wrong[0]} is not what was published (its SHA-256 differs)",
            place=str(part),
            fix="download again; if it stays so, the file in the store was changed",
        )
    if target.exists():
        target.rmdir()
    part.replace(target)
    return target


def read_manifest(store: Store, version: ModelVersion) -> Manifest:
    """The manifest of a version, as the store has it.

    Raises:
        ModelError: there is none, or it does not agree with the registry's tag.
        TrackingError: the store cannot be reached.
    """
    sha256 = version.tags.get("grpo.sha256", "")
    text = stored_manifest(store, version.run_id, sha256) if version.run_id and sha256 else None
    if text is None:
        raise ModelError(
            f"version {version.version} of {version.name} has no manifest: it was not published by this project",
            place=store.uri,
            fix=f"mlflow artifacts download -u models:/{version.name}/{version.version}",
        )
    manifest = parse_manifest(text)
    if manifest is None or manifest_sha256(manifest) != sha256:
        raise ModelError(
            f"the manifest of version {version.version} of {version.name} does not agree with the registry (tag grpo.sha256)",
            place=f"{store.uri}, run {version.run_id}, {manifest_path(sha256)}",
            fix="do not use this version: its manifest or its tag was changed; publish the model again",
        )
    return manifest


def stored_manifest(store: Store, run_id: str, sha256: str) -> str | None:
    """Text of the manifest of these bytes in a run's artifacts; None where there is none."""
    path = manifest_path(sha256)

    def work(client: MlflowClient) -> str | None:
        with store.as_default():
            known = {item.path for item in client.list_artifacts(run_id, "publication")}
            return str(mlflow.artifacts.load_text(f"runs:/{run_id}/{path}")) if path in known else None

    return store.ask(work)


def parse_manifest(text: str) -> Manifest | None:
    """The manifest in a text; None when the text is none. File names cannot lead out of the model's folder."""
    try:
        manifest: Manifest = json.loads(text)
        entries = {name: (bytes.fromhex(str(entry["sha256"])), int(entry["size"])) for name, entry in manifest.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    for name in entries:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ModelError(f"the manifest names a file outside the model: {name}", fix="do not use this model")
    return manifest


def _faults(folder: Path, manifest: Manifest) -> list[str]:
    """Files that are missing or differ, and files that the manifest does not name."""
    wrong = [
        name
        for name, entry in manifest.items()
        if not (folder / name).is_file()
        or (folder / name).stat().st_size != entry["size"]
        or file_sha256(folder / name) != entry["sha256"]
    ]
    found = {path.relative_to(folder).as_posix() for path in files_below(folder)}
    # Beside a downloaded model lies where it came from.
    return wrong + sorted(found - manifest.keys() - {ORIGIN})


def _fetch(store: Store, version: ModelVersion, name: str, part: Path) -> None:
    work_folder = part / ".incoming"
    uri = f"models:/{version.name}/{version.version}/{FOLDER}/{name}"

    def work(_: MlflowClient) -> str:
        shutil.rmtree(work_folder, ignore_errors=True)
        work_folder.mkdir()
        with store.as_default():
            return str(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(work_folder)))

    came = Path(store.ask(work))
    (part / name).parent.mkdir(parents=True, exist_ok=True)
    came.replace(part / name)
    shutil.rmtree(work_folder)

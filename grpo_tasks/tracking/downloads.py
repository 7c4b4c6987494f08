"""A registered model on this disk: every file checked against the manifest of its publication, whole or not there at all.

    version -> manifest (file -> SHA-256, size) -> DIR.part, file by file -> all verified -> DIR

A download that broke off leaves DIR.part; the next one keeps the files in it that are whole.
"""

import hashlib
import json
import shutil
from pathlib import Path, PurePosixPath

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from grpo_tasks.tracking.store import Store, open_store
from schemas.config import TrackingConfig
from schemas.errors import ModelError

FOLDER = "model"
"""Where MLflow keeps the files of a transformers model."""


def manifest_path(sha256: str) -> str:
    """Artifact of the parent run with the manifest of a merged model."""
    return f"publication/manifest-{sha256[:16]}.json"


def manifest_of(folder: Path) -> str:
    """SHA-256 and size of every file of a model folder, as JSON."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {path.relative_to(folder).as_posix(): {"sha256": _sha256(path), "size": path.stat().st_size} for path in files}
    return json.dumps(entries, indent=2)


def fetch_version(version: ModelVersion, tracking: TrackingConfig, target: Path) -> Path:
    """The files of a version in `target`.

    Raises:
        ModelError: `target` holds something else, the manifest is missing, or a file is not what was published.
        TrackingError: the store cannot be reached; calling again goes on with what is left.
    """
    store = open_store(tracking)
    manifest = _manifest(store, version)
    if target.exists() and any(target.iterdir()):
        if _faults(target, manifest):
            raise ModelError("the folder holds something else", place=str(target), mend="name a new folder, or empty this one")
        return target
    part = target.with_name(target.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    for name in _faults(part, manifest):
        _fetch(store, version, name, part)
    wrong = _faults(part, manifest)
    if wrong:
        raise ModelError(
            f"{wrong[0]} is not what was published (its SHA-256 differs)",
            place=str(part),
            mend="download again; if it stays so, the file in the store was changed",
        )
    if target.exists():
        target.rmdir()
    part.replace(target)
    return target


def _manifest(store: Store, version: ModelVersion) -> dict[str, dict[str, str | int]]:
    path = manifest_path(version.tags.get("grpo.sha256", ""))

    def work(_: MlflowClient) -> str | None:
        with store.as_default():
            known = (
                {item.path for item in store.client.list_artifacts(version.run_id, "publication")} if version.run_id else set()
            )
            return str(mlflow.artifacts.load_text(f"runs:/{version.run_id}/{path}")) if path in known else None

    text = store.ask(work)
    if text is None:
        raise ModelError(
            f"version {version.version} of {version.name} has no manifest: it was not published by this project",
            place=store.uri,
            mend=f"mlflow artifacts download -u models:/{version.name}/{version.version}",
        )
    manifest: dict[str, dict[str, str | int]] = json.loads(text)
    for name in manifest:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ModelError(f"the manifest names a file outside the model: {name}", mend="do not use this model")
    return manifest


def _faults(folder: Path, manifest: dict[str, dict[str, str | int]]) -> list[str]:
    """Files of the manifest that are missing or differ."""
    return [
        name
        for name, entry in manifest.items()
        if not (folder / name).is_file()
        or (folder / name).stat().st_size != entry["size"]
        or _sha256(folder / name) != entry["sha256"]
    ]


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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

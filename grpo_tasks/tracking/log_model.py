"""`python -m grpo_tasks.tracking.log_model DIRECTORY`: upload the files of a merged model to MLflow; spec.json names it.

A separate process, forked from one that has transformers loaded: mlflow imports all of transformers only to copy a folder.
"""

from pathlib import Path

import mlflow.transformers

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.processes.entry import SPEC, run_child
from grpo_tasks.tracking.store import FAULTS, open_store
from schemas.config.operations import TrackingConfig
from schemas.errors import DamagedError
from schemas.results.base import Result


class LogSpec(Result):
    """Which model is logged, and to which store."""

    tracking: TrackingConfig
    run_id: str
    model_id: str
    """Id of an existing logged model."""
    path: Path
    sha256: str
    """Expected SHA-256 over all files of the folder. A folder that differs is not logged."""
    requirements: list[str]


def log_model(spec: LogSpec) -> None:
    """Upload the folder under the model's id. MLflow allows that once per id: after an interrupted upload, use a new id.

    Raises:
        DamagedError: the folder differs from what the merge proof covers, before or after the upload. The logged model is then
            deleted.
        TrackingError: the store cannot be reached or refuses.
    """
    store = open_store(spec.tracking)
    require_proved(folder_sha256(spec.path), spec.sha256, spec.path)
    try:
        with store.as_default():
            mlflow.transformers.log_model(
                # Absolute, because mlflow would ask the hub for the model card of a path that looks like OWNER/NAME.
                str(spec.path.resolve()),
                model_id=spec.model_id,
                run_id=spec.run_id,
                task="text-generation",
                # Given, because mlflow would load the model in a new process to find out.
                pip_requirements=spec.requirements,
            )
    except FAULTS as fault:
        raise store.error(fault) from fault
    # Checked again: the folder may have changed while it was uploaded.
    try:
        require_proved(folder_sha256(spec.path), spec.sha256, spec.path)
    except DamagedError:
        store.ask(lambda client: client.delete_logged_model(spec.model_id))
        raise


def require_proved(sha256: str, proved: str, folder: Path) -> None:
    """Raise `DamagedError` unless a folder's SHA-256 is the one that the merge proof covers."""
    if sha256 != proved:
        raise DamagedError(
            "the merged model differs from the one that the merge proof covers (other SHA-256)",
            place=str(folder),
            fix="run the same command again: the merge runs again; nothing was published",
        )


def main(directory: Path) -> None:
    """Log the model that the folder's spec names."""
    log_model(LogSpec.load(directory / SPEC))


if __name__ == "__main__":
    run_child(main)

"""`python -m grpo_tasks.tracking.log_model DIRECTORY`: the files of a merged model into MLflow, as DIRECTORY/spec.json says.

A process of its own, forked where transformers is loaded already: mlflow wants it imported whole, only to copy a folder.
"""

from pathlib import Path

import mlflow.transformers

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.processes.entry import SPEC, run_child
from grpo_tasks.tracking.store import FAULTS, open_store
from schemas.config.operations import TrackingConfig
from schemas.errors import DamagedError
from schemas.results import Result


class LogSpec(Result):
    """What is logged, and where."""

    tracking: TrackingConfig
    run_id: str
    model_id: str
    """A logged model that exists."""
    path: Path
    sha256: str
    """Over all files of the folder; what differs is not logged."""
    requirements: list[str]


def log_model(spec: LogSpec) -> None:
    """Log the folder under the model's id, which mlflow allows once: a model that did not get there whole is made anew.

    Raises:
        DamagedError: the folder is not what was proved, before or after the upload; the logged model is then deleted.
        TrackingError: the store cannot be reached or refuses.
    """
    store = open_store(spec.tracking)
    _require_proved(spec)
    try:
        with store.as_default():
            mlflow.transformers.log_model(
                # Absolute, because mlflow would ask the hub for the card of anything that reads like OWNER/NAME.
                str(spec.path.resolve()),
                model_id=spec.model_id,
                run_id=spec.run_id,
                task="text-generation",
                # Given, because mlflow would load the model in a fresh process to find out.
                pip_requirements=spec.requirements,
            )
    except FAULTS as fault:
        raise store.error(fault) from fault
    try:
        _require_proved(spec)
    except DamagedError:
        store.ask(lambda client: client.delete_logged_model(spec.model_id))
        raise


def _require_proved(spec: LogSpec) -> None:
    if folder_sha256(spec.path) != spec.sha256:
        raise DamagedError(
            "the merged model is not what the merge proof saw (its SHA-256 differs)",
            place=str(spec.path),
            fix="run the same command again: the merge runs again; nothing was published",
        )


def main(directory: Path) -> None:
    """Log what the folder's spec names."""
    log_model(LogSpec.load(directory / SPEC))


if __name__ == "__main__":
    run_child(main)

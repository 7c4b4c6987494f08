"""`python -m grpo_tasks.tracking.log_model DIRECTORY`: the files of a merged model into MLflow, as DIRECTORY/spec.json says.

A process of its own, forked where transformers is loaded already: mlflow wants it imported whole, only to copy a folder.
"""

from pathlib import Path

import mlflow.transformers

from grpo_tasks.tracking.store import FAULTS, open_store
from schemas.child import SPEC, run_child
from schemas.config import TrackingConfig
from schemas.results import Result


class LogSpec(Result):
    """What is logged, and where."""

    tracking: TrackingConfig
    run_id: str
    model_id: str
    """A logged model that exists."""
    path: Path
    requirements: list[str]


def log_model(spec: LogSpec) -> None:
    """Log the folder under the model's id, which mlflow allows once: a model that did not get there whole is made anew.

    Raises:
        TrackingError: the store cannot be reached or refuses.
    """
    store = open_store(spec.tracking)
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


def main(directory: Path) -> None:
    """Log what the folder's spec names."""
    log_model(LogSpec.load(directory / SPEC))


if __name__ == "__main__":
    run_child(main)

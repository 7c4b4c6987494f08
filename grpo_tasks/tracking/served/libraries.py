"""Libraries of the two child processes that publish a model: one logs it, one asks it. Importing them takes longer than either.

    prepare_publishing()  ->  the fork server imports them once  ->  log_model.py and proof.py are forked from it

This module imports none of them. What it does not do: publish.
"""

from grpo_tasks.processes.child import prepare_child

LIBRARIES = (
    # First, because it sets environment variables that mlflow reads while it is imported.
    "grpo_tasks.tracking.store",
    "grpo_tasks.tracking.models",
    "mlflow.pyfunc.model",
    "mlflow.transformers",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    # mlflow asks it for the kind of pipeline.
    "transformers.pipelines",
)


def prepare_publishing() -> None:
    """Import the libraries in the background. With a GPU build of torch this does nothing: each child imports for itself."""
    prepare_child(*LIBRARIES)

"""Versions of a registered model by their tags: was one made of this before?"""

from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from grpo_tasks.tracking.store import open_store
from schemas.config import TrackingConfig


def find_tagged(name: str, tags: Mapping[str, str], tracking: TrackingConfig) -> str | None:
    """The newest version that carries all these tags; None when there is none, or no such model."""

    def matches(version: ModelVersion) -> bool:
        return all(version.tags.get(key) == value for key, value in tags.items())

    found = open_store(tracking).ask(lambda client: list(client.search_model_versions(f"name = '{name}'")))
    return max((str(version.version) for version in found if matches(version)), key=int, default=None)


def tag_version(name: str, version: str, tags: Mapping[str, str], tracking: TrackingConfig) -> None:
    """Put tags on a version; a tag already there is overwritten."""
    store = open_store(tracking)

    def work(client: MlflowClient) -> None:
        for key, value in tags.items():
            client.set_model_version_tag(name, version, key, value)

    store.ask(work)

"""Versions of a registered model: by number, alias or tags; where one came from; back to the one before.

champion    the version in use              challenger   the last candidate that was not promoted
previous    the champion before             (promotion itself: models.py)
"""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from grpo_tasks.tracking.store import Store, open_store
from schemas.config.operations import TrackingConfig
from schemas.errors import ModelError
from schemas.results import Lineage

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
PREFIX = "models:/"
_VERSION = re.compile("[0-9]{1,9}")
"""SQLite stores no longer number."""


def find_version(reference: str, tracking: TrackingConfig) -> ModelVersion:
    """The version behind NAME@ALIAS, NAME/VERSION (with or without models:/), or NAME (its champion).

    Raises:
        ModelError: there is no such model, alias or version; says which there are.
        TrackingError: the store cannot be reached.
    """
    store = open_store(tracking)
    name, alias, number = parse_reference(reference)

    def work(client: MlflowClient) -> ModelVersion | None:
        if number and not _VERSION.fullmatch(number):
            return None
        try:
            return client.get_model_version(name, number) if number else client.get_model_version_by_alias(name, alias)
        except MlflowException as fault:
            if fault.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
                return None
            raise

    found = store.ask(work)
    if found is None:
        raise ModelError(f"no such model: {reference}", place=store.uri, fix=_known(store, name))
    return found


def parse_reference(reference: str) -> tuple[str, str, str]:
    """Name, alias and version number of a reference; one of the last two is empty."""
    plain = reference.removeprefix(PREFIX)
    if "@" in plain:
        name, _, alias = plain.partition("@")
        return name, alias, ""
    name, _, number = plain.partition("/")
    return name, "" if number else CHAMPION, number


def find_tagged(name: str, tags: Mapping[str, str], tracking: TrackingConfig) -> str | None:
    """The newest version that carries all these tags; None when there is none, or no such model."""

    def matches(version: ModelVersion) -> bool:
        return all(version.tags.get(key) == value for key, value in tags.items())

    found = open_store(tracking).ask(lambda client: list(client.search_model_versions(f"name = '{name}'")))
    return max((str(version.version) for version in found if matches(version)), key=int, default=None)


def tag_version(name: str, version: str, tags: Mapping[str, str], tracking: TrackingConfig) -> None:
    """Put tags on a version; a tag already there is overwritten."""

    def work(client: MlflowClient) -> None:
        for key, value in tags.items():
            client.set_model_version_tag(name, version, key, value)

    open_store(tracking).ask(work)


def rollback(name: str, *, to: str | None, reason: str, tracking: TrackingConfig) -> tuple[str, str]:
    """Make `previous` (or version `to`) the champion again; gives (version rolled back, version in use now).

    Raises:
        ModelError: no such model, nothing to go back to, or the version is the champion already.
    """
    store = open_store(tracking)
    current = str(find_version(f"{name}@{CHAMPION}", tracking).version)
    target = str(find_version(f"{name}/{to}" if to else f"{name}@{PREVIOUS}", tracking).version)
    if target == current:
        raise ModelError(f"version {target} of {name} is the champion already", fix="name another version with --to")
    said = json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds"), "to": target, "reason": reason})

    def work(client: MlflowClient) -> None:
        # The champion before `previous`: killed in between, the model in use is right and `previous` names it, which is refused
        # the next time instead of going back to the version that was rolled back.
        client.set_model_version_tag(name, current, "grpo.rolled_back", said)
        client.set_registered_model_alias(name, CHAMPION, target)
        client.set_registered_model_alias(name, PREVIOUS, current)

    store.ask(work)
    return current, target


def lineage_of(reference: str, tracking: TrackingConfig) -> Lineage:
    """Everything that made a version, as recorded.

    Raises:
        ModelError: no such version, or one that this project did not make.
    """
    version = find_version(reference, tracking)
    if "grpo.key" not in version.tags or not version.run_id:
        raise ModelError(f"{reference} was not made by this project", fix="name a version with the tag grpo.key")
    store = open_store(tracking)
    run_id = version.run_id
    run = store.ask(lambda client: client.get_run(run_id))
    tags = version.tags
    return Lineage(
        name=version.name,
        version=str(version.version),
        aliases=sorted(version.aliases),
        run_id=run_id,
        experiment=store.ask(lambda client: client.get_experiment(run.info.experiment_id)).name,
        model_sha256=tags.get("grpo.sha256", ""),
        adapter_sha256=tags.get("grpo.adapter_sha256", ""),
        data_digest=tags.get("grpo.data_digest", run.data.tags.get("grpo.data_digest", "")),
        config_sha256=tags.get("grpo.config_sha256", ""),
        code_sha256=tags.get("grpo.code_sha256", ""),
        reward_sha256=tags.get("grpo.reward_sha256", ""),
        commit=run.data.tags.get("git.commit", ""),
        dirty=run.data.tags.get("git.dirty") == "true",
        python=run.data.tags.get("python", ""),
        packages={key.removeprefix("version."): value for key, value in run.data.tags.items() if key.startswith("version.")},
        flow_run_id=run.data.tags.get("prefect.flow_run_id", ""),
        decision=tags.get("grpo.decision", ""),
        system_prompt=run.data.params.get("data.system_prompt", ""),
    )


def recorded_config(lineage: Lineage, tracking: TrackingConfig) -> str:
    """The text of the config.yaml that made a version."""
    store = open_store(tracking)

    def work(_: MlflowClient) -> str:
        with store.as_default():
            return str(mlflow.artifacts.load_text(f"runs:/{lineage.run_id}/config.yaml"))

    return store.ask(work)


def _known(store: Store, name: str) -> str:
    versions = store.ask(lambda client: list(client.search_model_versions(f"name = '{name}'")))
    if versions:
        numbers = ", ".join(sorted((str(version.version) for version in versions), key=int))
        aliases = store.ask(lambda client: client.get_registered_model(name)).aliases
        return f"versions of {name}: {numbers}; aliases: {', '.join(sorted(aliases)) or 'none'}"
    names = store.ask(lambda client: [model.name for model in client.search_registered_models()])
    return f"registered models: {', '.join(sorted(names)) or 'none'}; MLFLOW_TRACKING_URI says where MLflow is"

"""Recent runs and registered models as lists, for `grpo runs` and `grpo models`."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.entities.model_registry import ModelVersion

from grpo_tasks.tracking.registry import model_names
from grpo_tasks.tracking.shown.headline import DECISION_TAG
from grpo_tasks.tracking.store import Store, open_store, pages, run_or_none, versions_of
from schemas.config.operations import TrackingConfig
from schemas.errors import ModelError
from schemas.metrics import HEADLINES

_RUNS_PER_PAGE = 100
"""A run comes with all its parameters, metrics and tags."""
_MERGED = "merged/"
"""Beginning of the names of the merged model's figures in its run."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """One run of the pipeline or of a single step."""

    run_id: str
    name: str
    status: str
    started: datetime
    figures: dict[str, float]
    """The headline figures of the merged model; empty when none was evaluated."""
    version: str
    """NAME/VERSION of the model that the run registered; empty when there is none."""


@dataclass(frozen=True, slots=True)
class ModelLine:
    """One version of a registered model."""

    name: str
    version: str
    aliases: list[str]
    made: datetime
    run_id: str
    figures: dict[str, float]
    decision: str
    """Why the alias `champion` moved to it, or did not."""


def parent_runs(client: MlflowClient) -> Iterator[Run]:
    """The runs of this project that are no child of another one, newest first: a sweep counts, its runs and stages do not."""
    experiments = [found.experiment_id for found in pages(lambda token: client.search_experiments(page_token=token))]
    parents = "tags.`grpo.key` IS NOT NULL AND tags.`mlflow.parentRunId` IS NULL"
    newest = ["attributes.start_time DESC"]
    if experiments:
        yield from pages(
            lambda token: client.search_runs(
                experiments, parents, ViewType.ACTIVE_ONLY, max_results=_RUNS_PER_PAGE, order_by=newest, page_token=token
            )
        )


def recent_runs(tracking: TrackingConfig, limit: int) -> list[RunLine]:
    """The newest runs, at most `limit`; raises `TrackingError` when the store cannot be reached."""
    found = open_store(tracking).ask(lambda client: list(islice(parent_runs(client), limit)))
    return [_run_line(run) for run in found]


def registered_versions(tracking: TrackingConfig, name: str | None = None) -> list[ModelLine]:
    """The versions of all registered models, or of one, newest first.

    Raises:
        ModelError: no model of that name is registered.
        TrackingError: the store cannot be reached.
    """
    store = open_store(tracking)
    names = store.ask(model_names)
    if name is not None and name not in names:
        raise ModelError(f"no such model: {name}", place=store.uri, fix=f"registered models: {', '.join(names) or 'none'}")
    lines = []
    for one in [name] if name is not None else names:
        aliases, versions = store.ask(partial(_versions, name=one))
        by_number = sorted(versions, key=lambda version: -int(version.version))
        lines += [_model_line(store, version, aliases) for version in by_number]
    return lines


def _versions(client: MlflowClient, name: str) -> tuple[dict[str, str], list[ModelVersion]]:
    return client.get_registered_model(name).aliases, versions_of(client, name)


def _run_line(run: Run) -> RunLine:
    return RunLine(
        run_id=run.info.run_id,
        name=run.info.run_name or "",
        status=run.info.status,
        started=_time(run.info.start_time),
        figures=_figures(run),
        version=run.data.tags.get("grpo.model_version", ""),
    )


def _model_line(store: Store, version: ModelVersion, aliases: dict[str, str]) -> ModelLine:
    run_id = version.run_id or ""
    run = store.ask(partial(run_or_none, run_id=run_id)) if run_id else None
    return ModelLine(
        name=version.name,
        version=str(version.version),
        aliases=sorted(alias for alias, number in aliases.items() if str(number) == str(version.version)),
        made=_time(version.creation_timestamp),
        run_id=run_id,
        figures=_figures(run) if run is not None else {},
        decision=version.tags.get(DECISION_TAG, ""),
    )


def _figures(run: Run) -> dict[str, float]:
    return {name: run.data.metrics[_MERGED + name] for name in HEADLINES if _MERGED + name in run.data.metrics}


def _time(milliseconds: int | None) -> datetime:
    return datetime.fromtimestamp((milliseconds or 0) / 1000, UTC).astimezone()

"""Recent runs and registered models as lists, for `grpo runs` and `grpo models`."""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.entities.model_registry import ModelVersion

from grpo_tasks.tracking.registry import DECISION_TAG
from grpo_tasks.tracking.store import Store, open_store
from schemas.config.operations import TrackingConfig
from schemas.errors import ModelError
from schemas.metrics import HEADLINES

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


def recent_runs(tracking: TrackingConfig, limit: int) -> list[RunLine]:
    """The newest runs, at most `limit`; raises `TrackingError` when the store cannot be reached."""

    def work(client: MlflowClient) -> list[Run]:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        newest = ["attributes.start_time DESC"]
        # Runs of a stage are children of a run; the filter language cannot ask for a tag that is missing.
        found = client.search_runs(experiments, run_view_type=ViewType.ACTIVE_ONLY, order_by=newest, max_results=10 * limit)
        return [run for run in found if "mlflow.parentRunId" not in run.data.tags and "grpo.key" in run.data.tags]

    return [_run_line(run) for run in open_store(tracking).ask(work)[:limit]]


def registered_versions(tracking: TrackingConfig, name: str | None = None) -> list[ModelLine]:
    """The versions of all registered models, or of one, newest first.

    Raises:
        ModelError: no model of that name is registered.
        TrackingError: the store cannot be reached.
    """
    store = open_store(tracking)
    names = sorted(store.ask(lambda client: [model.name for model in client.search_registered_models()]))
    if name is not None and name not in names:
        raise ModelError(f"no such model: {name}", place=store.uri, fix=f"registered models: {', '.join(names) or 'none'}")
    lines = []
    for one in [name] if name is not None else names:
        aliases, versions = store.ask(partial(_versions, name=one))
        by_number = sorted(versions, key=lambda version: -int(version.version))
        lines += [_model_line(store, version, aliases) for version in by_number]
    return lines


def _versions(client: MlflowClient, name: str) -> tuple[dict[str, str], list[ModelVersion]]:
    return client.get_registered_model(name).aliases, list(client.search_model_versions(f"name = '{name}'"))


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
    run = store.ask(lambda client: client.get_run(run_id)) if run_id else None
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

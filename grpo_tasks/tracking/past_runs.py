"""Runs and versions that MLflow has: lists for `grpo runs` and `grpo models`, and all of a past run, without its folder."""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path

import polars as pl
from mlflow import MlflowClient
from mlflow.entities import Run, ViewType

from grpo_tasks.tracking.database import sqlite_file
from grpo_tasks.tracking.description import flatten
from grpo_tasks.tracking.registry import find_version, model_names
from grpo_tasks.tracking.store import CHECK_S, Store, open_store, pages, resolve_uri, run_or_none, versions_of
from grpo_tasks.tracking.texts import VERSION
from schemas.config.load import check_recorded
from schemas.config.operations import TrackingConfig
from schemas.errors import ModelError
from schemas.metrics import CURVES, HEADLINES, NUM_TOKENS

DATA_DIGEST = "grpo.data_digest"
_SHOWN_RUNS = 8
_RUNS_PER_PAGE = 100
_MERGED = "merged/"

Curve = list[tuple[int, float]]
"""(update, value), in order of updates."""


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
    """The newest runs, at most `limit`."""
    found = open_store(tracking).call(lambda client: list(islice(parent_runs(client), limit)))
    return [
        RunLine(
            run_id=run.info.run_id,
            name=run.info.run_name or "",
            status=run.info.status,
            started=_time(run.info.start_time),
            figures=_figures(run),
            version=run.data.tags.get(VERSION, ""),
        )
        for run in found
    ]


def registered_versions(tracking: TrackingConfig, name: str | None = None) -> list[ModelLine]:
    """The versions of all registered models, or of one, newest first. Raises `ModelError` where none has that name."""
    store = open_store(tracking)
    names = store.call(model_names)
    if name is not None and name not in names:
        raise ModelError(f"no such model: {name}", place=store.uri, fix=f"registered models: {', '.join(names) or 'none'}")
    lines = []
    for one in [name] if name is not None else names:
        aliases = store.call(partial(MlflowClient.get_registered_model, name=one)).aliases
        versions = store.call(partial(versions_of, name=one))
        for version in sorted(versions, key=lambda version: -int(version.version)):
            number, run_id = str(version.version), version.run_id or ""
            carried = sorted(alias for alias, of in aliases.items() if str(of) == number)
            run = store.call(partial(run_or_none, run_id=run_id)) if run_id else None
            lines.append(ModelLine(one, number, carried, _time(version.creation_timestamp), run_id, _figures(run) if run else {}))
    return lines


def _figures(run: Run) -> dict[str, float]:
    return {name: run.data.metrics[_MERGED + name] for name in HEADLINES if _MERGED + name in run.data.metrics}


def _time(milliseconds: int | None) -> datetime:
    return datetime.fromtimestamp((milliseconds or 0) / 1000, UTC).astimezone()


@dataclass(frozen=True, slots=True)
class PastRun:
    """One parent run."""

    run_id: str
    name: str
    settings: dict[str, str]
    """Every field of the config by its dotted name."""
    figures: dict[str, float]
    """Last value of every metric of the parent run."""
    curves: dict[str, dict[str, Curve]]
    """By stage, then by metric: the metrics that schemas/metrics.py marks as compared."""
    samples: pl.DataFrame
    """Scored samples of the merged model (schemas/tables.py Samples and the verdicts)."""
    prompts: dict[str, str]
    """Question by prompt_id; empty when the run has no table of held-out prompts."""
    data_digest: str
    tokens: float
    """Tokens of all prompts and completions that its stages trained on or sampled."""


def load_past_run(reference: str, tracking: TrackingConfig) -> PastRun:
    """The run of an id or its beginning, a name (the newest), or a version; `ModelError` without an evaluated model."""
    store = open_store(tracking)
    run = find_run(store, reference, tracking)
    with tempfile.TemporaryDirectory() as folder:
        samples = store.download(run.info.run_id, "evaluation/merged/samples.parquet", Path(folder))
        config = store.read(run.info.run_id, "config.yaml")
        held_out = store.download(run.info.run_id, "data/eval.parquet", Path(folder))
        if samples is None or config is None:
            raise ModelError(f"run {run.info.run_id} has no evaluated model", fix="name a finished run of the pipeline")
        stages = f"tags.`mlflow.parentRunId` = '{run.info.run_id}' and tags.`grpo.stage` != ''"
        order = ["attributes.start_time ASC"]
        children = store.call(lambda client: client.search_runs([run.info.experiment_id], stages, order_by=order))
        questions = pl.col("prompt").list.last().struct.field("content")
        known = pl.read_parquet(held_out).select("prompt_id", questions) if held_out else pl.DataFrame()

        def curves(client: MlflowClient, child: Run) -> dict[str, Curve]:
            histories = {
                name: client.get_metric_history(child.info.run_id, name) for name in CURVES if name in child.data.metrics
            }
            return {name: sorted((point.step, point.value) for point in points) for name, points in histories.items()}

        return PastRun(
            run_id=run.info.run_id,
            name=run.info.run_name or run.info.run_id[:8],
            settings=flatten(check_recorded(config, place=f"config.yaml of run {run.info.run_id}")),
            figures=dict(run.data.metrics),
            curves={child.data.tags["grpo.stage"]: store.call(partial(curves, child=child)) for child in children},
            samples=pl.read_parquet(samples),
            prompts=dict(known.iter_rows()),
            data_digest=run.data.tags.get(DATA_DIGEST, ""),
            tokens=sum(child.data.metrics.get(NUM_TOKENS, 0.0) for child in children),
        )


def find_rejection_run(data_digest: str, tracking: TrackingConfig) -> str | None:
    """Id of the newest finished run that trained by rejection sampling on these data, and had no stage of GRPO."""

    def wanted(run: Run) -> bool:
        kinds = {value for name, value in run.data.params.items() if re.fullmatch(r"stages\.\d+\.kind", name)}
        same = run.data.tags.get(DATA_DIGEST) == data_digest and run.info.status == "FINISHED"
        return same and "rejection" in kinds and "grpo" not in kinds

    found = open_store(tracking).call(lambda client: next(filter(wanted, parent_runs(client)), None))
    return found.info.run_id if found else None


def is_named(run: Run, name: str) -> bool:
    """Whether this is the run's name, or its beginning without the time."""
    return f"{run.info.run_name} ".startswith(f"{name} ")


def newest_run(name: str, tracking: TrackingConfig) -> str:
    """Id of the newest run of this name; empty where there is none. The question creates no database."""
    file = sqlite_file(resolve_uri(tracking))
    if file is not None and not file.exists():
        return ""
    # A person waits for the answer.
    store = replace(open_store(tracking), patience_s=CHECK_S)
    found = store.call(lambda client: next((run for run in parent_runs(client) if is_named(run, name)), None))
    return found.info.run_id if found else ""


def find_run(store: Store, reference: str, tracking: TrackingConfig) -> Run:
    """The run of a version, the newest run whose id begins with this, or else the newest of this name."""
    if "@" in reference or "/" in reference:
        version = find_version(reference, tracking)
        if version.run_id:
            run_id = version.run_id
            return store.call(lambda client: client.get_run(run_id))

    def named(client: MlflowClient) -> Run | None:
        found = None
        for run in parent_runs(client):
            if run.info.run_id.startswith(reference):
                return run
            if found is None and is_named(run, reference):
                found = run
        return found

    found = store.call(named)
    if found is not None:
        return found
    newest = store.call(lambda client: list(islice(parent_runs(client), _SHOWN_RUNS)))
    names = ", ".join(f"{run.info.run_id[:8]} ({run.info.run_name})" for run in newest)
    fix = f"the newest runs are {names}" if names else "the store has no runs"
    raise ModelError(f"no such run: {reference}", place=store.uri, fix=fix)

"""A past run from MLflow alone: settings, figures, curves and samples. The run's folder on disk is not needed."""

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import mlflow
import polars as pl
from mlflow import MlflowClient
from mlflow.entities import Run

from grpo_tasks.tracking.description import flatten
from grpo_tasks.tracking.overview import parent_runs
from grpo_tasks.tracking.registry import find_version
from grpo_tasks.tracking.store import Store, open_store
from schemas.config.load import check_recorded
from schemas.config.operations import TrackingConfig
from schemas.errors import ModelError
from schemas.metrics import CURVES, NUM_TOKENS

DATA_DIGEST = "grpo.data_digest"
_SHOWN_RUNS = 8

Curve = list[tuple[int, float]]
"""(update, value), in order of updates."""


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

    @property
    def kinds(self) -> set[str]:
        """Kinds of its stages."""
        return _kinds(self.settings)


def load_past_run(reference: str, tracking: TrackingConfig) -> PastRun:
    """The run with this id, beginning of an id, or name (the newest), or behind models:/NAME@ALIAS or NAME@ALIAS.

    Raises:
        ModelError: there is no such run, or it did not evaluate a merged model.
        TrackingError: the store cannot be reached.
    """
    store = open_store(tracking)
    run = _find(store, reference, tracking)
    with tempfile.TemporaryDirectory() as folder:
        samples = _artifact(store, run, "evaluation/merged/samples.parquet", Path(folder))
        config = _artifact(store, run, "config.yaml", Path(folder))
        if samples is None or config is None:
            raise ModelError(f"run {run.info.run_id} has no evaluated model", fix="name a finished run of the pipeline")
        children = _children(store, run)
        return PastRun(
            run_id=run.info.run_id,
            name=run.info.run_name or run.info.run_id[:8],
            settings=flatten(check_recorded(config.read_text(encoding="utf-8"), place=f"config.yaml of run {run.info.run_id}")),
            figures=dict(run.data.metrics),
            curves={child.data.tags["grpo.stage"]: _curves(store, child) for child in children},
            samples=pl.read_parquet(samples),
            prompts=_questions(store, run),
            data_digest=run.data.tags.get(DATA_DIGEST, ""),
            tokens=sum(child.data.metrics.get(NUM_TOKENS, 0.0) for child in children),
        )


def find_rejection_run(data_digest: str, tracking: TrackingConfig) -> str | None:
    """Id of the newest finished run that trained by rejection sampling on these data, and had no stage of GRPO."""

    def wanted(run: Run) -> bool:
        kinds = _kinds(run.data.params)
        same = run.data.tags.get(DATA_DIGEST) == data_digest and run.info.status == "FINISHED"
        return same and "rejection" in kinds and "grpo" not in kinds

    found = open_store(tracking).ask(lambda client: next(filter(wanted, parent_runs(client)), None))
    return found.info.run_id if found else None


def fetch_held_out(run_id: str, tracking: TrackingConfig, folder: Path) -> Path | None:
    """The table of a run's held-out prompts, downloaded into `folder`; None when the run has none.

    Raises:
        TrackingError: the store cannot be reached.
    """
    store = open_store(tracking)
    return _artifact(store, store.ask(lambda client: client.get_run(run_id)), "data/eval.parquet", folder)


def _kinds(settings: Mapping[str, str]) -> set[str]:
    return {value for name, value in settings.items() if re.fullmatch(r"stages\.\d+\.kind", name)}


def _is_named(run: Run, name: str) -> bool:
    """Whether this is the run's name, or its beginning without the time."""
    return f"{run.info.run_name} ".startswith(f"{name} ")


def _find(store: Store, reference: str, tracking: TrackingConfig) -> Run:
    if "@" in reference or "/" in reference:
        version = find_version(reference, tracking)
        if version.run_id:
            run_id = version.run_id
            return store.ask(lambda client: client.get_run(run_id))
    found = store.ask(lambda client: _named(client, reference))
    if found is not None:
        return found
    newest = store.ask(lambda client: list(islice(parent_runs(client), _SHOWN_RUNS)))
    names = ", ".join(f"{run.info.run_id[:8]} ({run.info.run_name})" for run in newest)
    fix = f"the newest runs are {names}" if names else "the store has no runs"
    raise ModelError(f"no such run: {reference}", place=store.uri, fix=fix)


def _named(client: MlflowClient, reference: str) -> Run | None:
    """The newest run whose id begins with this, or else the newest of this name."""
    named = None
    for run in parent_runs(client):
        if run.info.run_id.startswith(reference):
            return run
        if named is None and _is_named(run, reference):
            named = run
    return named


def _children(store: Store, run: Run) -> list[Run]:
    condition = f"tags.`mlflow.parentRunId` = '{run.info.run_id}'"
    found = store.ask(
        lambda client: client.search_runs([run.info.experiment_id], condition, order_by=["attributes.start_time ASC"])
    )
    return [child for child in found if "grpo.stage" in child.data.tags]


def _curves(store: Store, child: Run) -> dict[str, Curve]:
    def work(client: MlflowClient) -> dict[str, Curve]:
        names = [name for name in CURVES if name in child.data.metrics]
        histories = {name: client.get_metric_history(child.info.run_id, name) for name in names}
        return {name: sorted((point.step, point.value) for point in points) for name, points in histories.items()}

    return store.ask(work)


def _artifact(store: Store, run: Run, path: str, folder: Path) -> Path | None:
    """Download an artifact of the run; None when it has no artifact of that name."""

    def work(client: MlflowClient) -> Path | None:
        parent = path.rpartition("/")[0]
        if path not in {item.path for item in client.list_artifacts(run.info.run_id, parent or None)}:
            return None
        with store.as_default():
            return Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=path, dst_path=str(folder)))

    return store.ask(work)


def _questions(store: Store, run: Run) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        found = _artifact(store, run, "data/eval.parquet", Path(folder))
        if found is None:
            return {}
        rows = pl.read_parquet(found, columns=["prompt_id", "prompt"])
        return {prompt_id: messages[-1]["content"] for prompt_id, messages in rows.iter_rows()}

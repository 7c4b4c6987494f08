"""Checkpoints, stages and merged models as logged models of MLflow, so that the best of all runs is one search.

    train_stage/format-KEY/checkpoints/step-000080   ->   format-step-80    the metrics of its update, eval_reward if measured
    train_stage/format-KEY/final                     ->   format            accuracy, format_rate ... of its evaluation
    the published model                              ->   model             what its run has measured so far: accuracy, reward ...

    mlflow.search_logged_models(order_by=[{"field_name": "metrics.accuracy", "ascending": False}])

Checkpoints and stages point to files on disk (tag `path`) and hold none.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelStatus, Metric

from grpo_tasks.stage.journal import JOURNAL_KEYS, read_lines
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.registry import SHA_TAG
from grpo_tasks.tracking.store import pages
from schemas.results.data import DataReport
from schemas.results.evaluation import EvalReport
from schemas.results.model import StageResult

_PARAMS = 100
_VALUE_CHARS = 500
"""MLflow's limits for the parameters of a logged model are lower than those of a run."""
_KEPT_FIRST = (
    "learning_rate",
    "model.lora.",
    "reward.",
    *("name", "kind", "seed", "rewards", "max_steps", "num_generations", "beta", "loss_type", "model.path"),
    *("rollout.temperature", "rollout.max_completion_length", "completion.", "data.train"),
)
"""Beginnings of the names that are kept where a stage has more parameters: what people search by."""


def record_checkpoints(run: RunHandle, result: StageResult, params: Mapping[str, str]) -> None:
    """A logged model for each checkpoint that is on disk and one for the stage, with its settings and its journal's figures."""
    stage, lines = StageDir(result.directory), _journal(result)
    known = {model.name: model for model in logged_models(run)}
    # The least known names last: they may not fit.
    first = sorted(
        params, key=lambda name: next((at for at, start in enumerate(_KEPT_FIRST) if name.startswith(start)), len(_KEPT_FIRST))
    )
    kept = {key: params[key][:_VALUE_CHARS] for key in first[:_PARAMS]}

    def ready(name: str, kind: str, tags: dict[str, str]) -> LoggedModel:
        """The run's logged model of this name, created if there is none."""
        make = partial(MlflowClient.create_logged_model, experiment_id=run.experiment_id, name=name, source_run_id=run.run_id)
        model = known.get(name) or run.store.ask(partial(make, tags=tags, params=kept, model_type=kind))
        if model.status != LoggedModelStatus.READY:
            return run.store.ask(lambda client: client.finalize_logged_model(model.model_id, LoggedModelStatus.READY))
        return model

    for folder in sorted(stage.checkpoints.glob("step-*")):
        number = folder.name.removeprefix("step-")
        if not number.isdigit():
            continue
        step = int(number)
        tags = {"stage": result.stage, "step": str(step), "path": str(folder)}
        model = ready(f"{result.stage}-step-{step}", "checkpoint", tags)
        if step in lines:
            # Names, values and times of the run's own metrics: they are linked, not stored twice.
            figures = {name: value for name, value in lines[step]["metrics"].items() if value is not None}
            _measure(run, model, figures, step=step, timestamp_ms=lines[step]["timestamp_ms"])
    place = str(result.model.adapter or stage.final)
    ready(result.stage, "stage", {"stage": result.stage, "step": str(result.steps), "path": place, SHA_TAG: result.sha256})


def record_stage_figures(
    run: RunHandle, stage: StageResult, result: EvalReport, data: DataReport | None, *, timestamp_ms: int
) -> None:
    """The held-out figures of a stage, for its logged model and for its run."""
    model = next((model for model in logged_models(run) if model.name == stage.stage), None)
    if model is None:
        # The stage was recorded by an earlier version of this project.
        return
    # A curve of the training keeps its name: its last point would otherwise come from another measurement.
    curves = {name for line in _journal(stage).values() for name in line["metrics"]}
    figures = {name: interval.value for name, interval in result.metrics.items() if name not in curves}
    measured = {"dataset_name": "eval", "dataset_digest": data.digest[:36]} if data is not None else {}
    _measure(run, model, figures, step=stage.steps, timestamp_ms=timestamp_ms, **measured)


def _journal(stage: StageResult) -> dict[int, dict[str, Any]]:
    """The lines of the journal by update."""
    found, _ = read_lines(StageDir(stage.directory).journal, JOURNAL_KEYS | {"timestamp_ms": int})
    return {line["step"]: line for line in found}


def logged_models(run: RunHandle) -> list[LoggedModel]:
    """The logged models of a stage's run: its checkpoints and its end."""
    search = partial(MlflowClient.search_logged_models, experiment_ids=[run.experiment_id])
    ours = f"source_run_id = '{run.run_id}'"
    return run.store.ask(lambda client: list(pages(lambda token: search(client, filter_string=ours, page_token=token))))


def _measure(
    run: RunHandle, model: LoggedModel, figures: Mapping[str, float], *, step: int, timestamp_ms: int, **data: str
) -> None:
    of = {"model_id": model.model_id, "run_id": run.run_id} | data
    run.log_metrics([Metric(name, float(value), timestamp_ms, step, **of) for name, value in figures.items()])

"""What of a run has a page of its own in MLflow: checkpoints and stages as logged models, system prompts, held-out rows.

    mlflow.search_logged_models(order_by=[{"field_name": "metrics.accuracy", "ascending": False}])

finds the best of all runs. Checkpoints (STAGE-step-80) and stages (STAGE) point to files on disk (tag `path`) and hold none.
"""

import hashlib
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import polars as pl
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelStatus, Metric

from grpo_tasks.stage.journal import JOURNAL_KEYS, read_lines
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.registry import SHA_TAG
from grpo_tasks.tracking.store import pages
from schemas.prompts import PLAIN
from schemas.results.data import DataReport
from schemas.results.evaluation import EvalReport
from schemas.results.model import StageResult

# MLflow's limits for the parameters of a logged model are lower than those of a run.
_PARAMS, _VALUE_CHARS = 100, 500
_KEPT_FIRST = (
    "learning_rate",
    "model.lora.",
    "reward.",
    *("name", "kind", "seed", "rewards", "max_steps", "num_generations", "beta", "loss_type", "model.path"),
    *("rollout.temperature", "rollout.max_completion_length", "completion.", "data.train"),
)
"""Beginnings of the names that are kept where a stage has more parameters: what people search by."""
_PROMPT_CHARS = 50_000
"""Longest prompt that the registry takes. A longer one is a parameter of the run only."""
_MAX_ROWS = 500
"""Rows of a held-out set that MLflow gets: it stores them one by one. All are in the artifact data/eval.parquet."""


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
        make = partial(MlflowClient.create_logged_model, experiment_id=run.experiment_id, name=name, source_run_id=run.run_id)
        model = known.get(name) or run.store.call(partial(make, tags=tags, params=kept, model_type=kind))
        if model.status != LoggedModelStatus.READY:
            return run.store.call(lambda client: client.finalize_logged_model(model.model_id, LoggedModelStatus.READY))
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
    path = str(result.model.adapter or stage.final)
    ready(result.stage, "stage", {"stage": result.stage, "step": str(result.steps), "path": path, SHA_TAG: result.sha256})


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
    found, _ = read_lines(StageDir(stage.directory).journal, JOURNAL_KEYS | {"timestamp_ms": int})
    return {line["step"]: line for line in found}


def logged_models(run: RunHandle) -> list[LoggedModel]:
    """The logged models of a stage's run: its checkpoints and its end."""
    search = partial(MlflowClient.search_logged_models, experiment_ids=[run.experiment_id])
    ours = f"source_run_id = '{run.run_id}'"
    return run.store.call(lambda client: list(pages(lambda token: search(client, filter_string=ours, page_token=token))))


def _measure(
    run: RunHandle, model: LoggedModel, figures: Mapping[str, float], *, step: int, timestamp_ms: int, **data: str
) -> None:
    of = {"model_id": model.model_id, "run_id": run.run_id} | data
    run.log_metrics([Metric(name, float(value), timestamp_ms, step, **of) for name, value in figures.items()])


def record_system_prompt(run: RunHandle, name: str, text: str | None) -> str | None:
    """Register the text, unless a version has it, and link it to the run; NAME/VERSION of the prompt, None without a text."""
    if not text or len(text) > _PROMPT_CHARS:
        return None
    prompt = re.sub(r"[^\w.-]", "-", f"{name}-system-prompt", flags=re.ASCII)

    def registered(client: MlflowClient) -> str:
        """The newest version with this text; registered now if there is none."""
        if client.get_prompt(prompt) is not None:
            versions = pages(lambda token: client.search_prompt_versions(prompt, page_token=token))
            same = [str(known.version) for known in versions if known.template == text]
            if same:
                return max(same, key=int)
        made = client.register_prompt(prompt, text, commit_message="system prompt of a training")
        # MLflow shows a prompt in the experiment that is active in this process, which is not the run's.
        client.set_prompt_tag(prompt, "_mlflow_experiment_ids", f",{run.experiment_id},")
        return str(made.version)

    with run.store.lock(f"prompt-{prompt}", who=f"a run that registers the prompt {prompt}"):
        version = run.store.call_globally(registered)

        def link() -> None:
            run.store.call_globally(lambda client: client.link_prompt_version_to_run(run.run_id, f"prompts:/{prompt}/{version}"))
            run.tags({"system_prompt": f"{prompt}/{version}"})

        run.once(f"prompt.{prompt}.{version}", link)
    return f"{prompt}/{version}"


def link_to_model(run: RunHandle, prompt: str, model_id: str) -> None:
    """Link NAME/VERSION of a prompt to a logged model."""
    name, _, version = prompt.rpartition("/")
    run.store.call_globally(lambda client: client.link_prompt_version_to_model(name, version, model_id))


def record_held_out(run: RunHandle, name: str, data: DataReport) -> None:
    """Create the version of the held-out rows of a config `name`, unless there is one; the run's tag `held_out` names it.

    MLflow's own datasets have no versions, so a version is a dataset with the tags `version` and `digest`.
    """
    rows = pl.read_parquet(data.eval, columns=["prompt", "answer"])
    digest = hashlib.sha256(rows.write_json().encode()).hexdigest()
    with run.store.lock(f"dataset-{name}", who=f"a run that records the held-out set of {name}"):
        found = run.store.call(partial(held_out_versions, experiment_id=run.experiment_id, name=name))
        dataset = next((known for known in found if known.tags.get("digest") == digest), None)
        number = dataset.tags["version"] if dataset else str(1 + max((int(known.tags["version"]) for known in found), default=0))
        title = f"{name} held-out v{number}"
        if dataset is None or dataset.tags.get("complete") != "yes":
            tags = {"name": name, "version": number, "digest": digest, "rows": str(rows.height)}
            records = []
            for prompt, answer in rows.head(_MAX_ROWS).iter_rows():
                inputs = {"prompt": prompt[0]["content"]} if prompt[0]["role"] == PLAIN else {"messages": prompt}
                truth = {} if answer is None else {"expectations": {"expected_response": answer}}
                records.append({"inputs": inputs} | truth)

            def fill(client: MlflowClient) -> None:
                # Rows with known inputs are replaced, so this can be repeated.
                made = dataset or client.create_dataset(title, experiment_id=run.experiment_id, tags=tags)
                made.merge_records(records)
                client.set_dataset_tags(made.dataset_id, {"complete": "yes"})

            run.store.call_globally(fill)
    run.tags({"held_out": title})


def held_out_versions(client: MlflowClient, *, experiment_id: str, name: str) -> list[Any]:
    """The datasets that are versions of the held-out rows of a config `name`."""
    found = pages(lambda token: client.search_datasets(experiment_ids=[experiment_id], page_token=token))
    return [dataset for dataset in found if (dataset.tags or {}).get("name") == name]

"""A run of the pipeline as an MLflow run: found by its key, filled from step results, ended with the pipeline's status.

A killed run that is started again resumes the same MLflow run. A finished run with nothing new to record is not changed. What
this module does not do: run steps, or know who orchestrates them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path

import yaml
from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Run

from grpo_tasks.content.hashes import outputs_sha256
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from grpo_tasks.tracking import entities, records
from grpo_tasks.tracking.database import sqlite_file
from grpo_tasks.tracking.description import ENVIRONMENT, describe_environment, flatten, stage_params
from grpo_tasks.tracking.handle import EndStatus, RunHandle
from grpo_tasks.tracking.journal import JournalShipper
from grpo_tasks.tracking.registry import ADAPTER_HASH
from grpo_tasks.tracking.report_to import Report, TensorBoardWriter, WandbWriter, Writer
from grpo_tasks.tracking.store import Store, deleted_run, open_store
from grpo_tasks.tracking.texts import EXPERIMENT_TAGS, FLOW_RUN_URL, origin_tags, run_title
from schemas.config.run import RunConfig
from schemas.errors import EndedByOthers, PrunedError, TrackingError
from schemas.results.base import StepResult
from schemas.results.data import DataReport, GuardData
from schemas.results.evaluation import EvalReport
from schemas.results.model import StageResult

KEY_TAG = "grpo.key"
PARENT_TAG = "mlflow.parentRunId"
_KEY_CHARS = 8


@contextmanager
def open_run(
    config: RunConfig,
    *,
    key: str,
    inputs: RunConfig | None = None,
    fresh: bool = False,
    flow_run_id: str | None = None,
    flow_run_url: str | None = None,
    flow_run_name: str | None = None,
    name: str | None = None,
    parent_run_id: str | None = None,
) -> Iterator["TrackedRun"]:
    """The MLflow run of this configuration. It ends FINISHED, FAILED (an error) or KILLED (an interrupt, or pruned in a sweep).

    The experiment's most recent run with the content key `key` is resumed, unless `fresh`. `inputs` is the configuration as the
    steps have it, with the copies of the user's own modules, which are uploaded. `flow_run_name` and `name` (by default that of
    the configuration) are parts of the name of a new run. `parent_run_id` is that of the sweep that it belongs to.
    """
    flow = {"prefect.flow_run_id": flow_run_id, FLOW_RUN_URL: flow_run_url}
    known = {tag: value for tag, value in (flow | {PARENT_TAG: parent_run_id}).items() if value}
    title = run_title(name or config.name, flow_run_name, datetime.now())
    run = TrackedRun(config, inputs=inputs or config, key=key, fresh=fresh, flow=known, title=title)
    try:
        yield run
    except BaseException as fault:
        # The original fault must not be hidden by a store that cannot be reached.
        with suppress(TrackingError, OSError):
            run.close_reports()
        with suppress(TrackingError):
            broken = isinstance(fault, Exception) and not isinstance(fault, PrunedError)
            run.end("FAILED" if (fault.failed if isinstance(fault, EndedByOthers) else broken) else "KILLED")
        raise
    run.close_reports()
    run.end("FINISHED")


class TrackedRun:
    """The parent run and its children. Created by `open_run`."""

    def __init__(self, config: RunConfig, *, inputs: RunConfig, key: str, fresh: bool, flow: dict[str, str], title: str) -> None:
        self.config, self.key = config, key
        self.store: Store = open_store(config.tracking)
        self._flow = flow
        self._children: dict[str, RunHandle] = {}
        self._stages: list[StageResult] = []
        self._reports: dict[Path, list[Report]] = {}
        self.data: DataReport | None = None
        """The data of the run, once it is recorded."""
        parent = {PARENT_TAG: flow[PARENT_TAG]} if PARENT_TAG in flow else {}
        tags = {"grpo.name": config.name} | origin_tags(config, flow.get(FLOW_RUN_URL)) | parent
        run, is_new = find_or_create(self.store, config, title, by={KEY_TAG: key}, tags=tags, fresh=fresh)
        self.handle = RunHandle(self.store, run, on_start=self._describe)
        self.run_id, self.experiment_id = self.handle.run_id, self.handle.experiment_id
        if is_new:
            self.handle.mark_running()
        params = flatten(config)

        def record_config() -> None:
            self.handle.params(params)
            self.handle.text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), "config.yaml")
            records.record_sources(self.handle, inputs)
            self.handle.tags({"seed": str(config.seed)})

        self.handle.once(f"config.{_short_hash(repr(sorted(params.items())))}", record_config)

    def record(self, result: StepResult) -> bool:
        """Record a step's result from its folder; False when it was recorded before, and then nothing is written."""
        if isinstance(result, StageResult):
            return self._record_stage(result)
        if isinstance(result, DataReport) and not isinstance(result, GuardData):
            self.data = result
        # A publication is recorded a second time when a person has decided about a version that waited for it.
        label = getattr(result, "label", "pending" if getattr(result, "awaits_approval", False) else "")
        step = ".".join(filter(None, [result.directory.parent.name, label]))

        def work() -> None:
            records.record(self.handle, self.config, result, self.data)
            for stage in self._stages:
                if not isinstance(result, EvalReport) or stage.stage != result.label:
                    continue
                at = records.made_at(result, self.handle)
                entities.record_stage_figures(self.child(stage.stage, stage.key), stage, result, self.data, timestamp_ms=at)
            records.record_log(self.handle, result, step)

        return self.handle.once(f"{step}.{_mark(result)}", work)

    def said_about_files(self) -> str:
        """A sentence if the artifacts lie outside of the project: it was moved, or its experiment was made elsewhere."""
        database = sqlite_file(self.store.uri)
        found = self.store.call(lambda client: client.get_experiment(self.experiment_id)).artifact_location
        location = Path(found.removeprefix("file://"))
        if database is None or not location.is_absolute():
            return ""
        if any(location.is_relative_to(folder.resolve()) for folder in (database.parent, Path.cwd())):
            return ""
        return (
            f"MLflow keeps the artifacts of the experiment {self.config.experiment} in {location}, outside of this project; "
            "if the project was moved, tracking.experiment: ANOTHER NAME keeps new ones here"
        )

    def require_active(self, *, once: bool = False) -> None:
        """Raise `TrackingError` if the run was deleted in MLflow, which would still take a version of it. `once`: no retries."""

        def require(client: MlflowClient) -> None:
            if client.get_run(self.run_id).info.lifecycle_stage == LifecycleStage.DELETED:
                raise deleted_run(self.run_id, self.store.uri)

        if once:
            require(self.store.client)
        else:
            self.store.call(require)

    @property
    def origin(self) -> dict[str, str]:
        """Hashes of a model's origin, from what was recorded so far: the digest of the data and the last stage's weights."""
        last = {ADAPTER_HASH: self._stages[-1].sha256} if self._stages else {}
        return last | ({"grpo.data_digest": self.data.digest} if self.data else {})

    def follow(self, stage_dir: Path) -> JournalShipper:
        """The journal shipper of a stage that is being trained; `stage_dir` holds its spec.json."""
        spec = StageSpec.load(StageDir(stage_dir).spec)
        child = partial(self.child, spec.stage.name, spec.key)
        reports = self._reports_of(spec.stage.name, stage_dir)
        return JournalShipper(self.store, stage_dir, child, check=partial(self.require_active, once=True), reports=reports)

    def _reports_of(self, stage: str, stage_dir: Path) -> list[Report]:
        """What the trackers of `tracking.report_to` get of a stage, in addition to MLflow."""
        output = (self.config.resources.output_dir / self.config.name).resolve()
        params = stage_params(self.config, stage) | {"mlflow_run_id": self.run_id}

        def tensorboard(name: str) -> Writer:
            return TensorBoardWriter(output / "tensorboard" / name)

        def wandb(name: str) -> Writer:
            return WandbWriter(output / "wandb", name, project=self.config.experiment, group=self.config.name, params=params)

        if stage_dir not in self._reports:
            writers = {"tensorboard": tensorboard, "wandb": wandb}
            chosen = self.config.tracking.report_to
            self._reports[stage_dir] = [Report(tracker, output, stage_dir, writers[tracker]) for tracker in chosen]
        return self._reports[stage_dir]

    def close_reports(self) -> None:
        """End the runs of the other trackers."""
        for report in chain.from_iterable(self._reports.values()):
            report.close()

    def child(self, stage: str, key: str) -> RunHandle:
        """The child run of a stage, found by its tags or created, with the stage's settings as parameters."""
        name = f"{stage}.{key}"
        if name not in self._children:
            tags = {PARENT_TAG: self.run_id, "grpo.stage": stage, "grpo.stage_key": key}
            run, is_new = find_or_create(self.store, self.config, stage, by=tags)
            if is_new:
                self.handle.mark_running()
            handle, params = RunHandle(self.store, run), stage_params(self.config, stage)
            handle.once(f"config.{_short_hash(repr(sorted(params.items())))}", lambda: handle.params(params))
            self._children[name] = handle
        return self._children[name]

    def end(self, status: EndStatus) -> None:
        """End the parent and the children that still run with this status."""
        for child in self._children.values():
            if child.status == "RUNNING":
                child.end(status)
        self.handle.end(status)

    @property
    def system_prompt(self) -> str | None:
        """NAME/VERSION of the run's system prompt in the prompt registry, registered now if it is not; None if there is none."""
        return entities.record_system_prompt(self.handle, self.config.registered_model, self.config.data.system_prompt)

    def _record_stage(self, result: StageResult) -> bool:
        child = self.child(result.stage, result.key)

        def work() -> None:
            records.record_stage(child, result)
            records.record_log(child, result, "train_stage")
            entities.record_checkpoints(child, result, stage_params(self.config, result.stage))

        done = child.once(f"train_stage.{_mark(result)}", work)
        for report in self._reports_of(result.stage, result.directory):
            # Also of a stage that was trained before, by a run that reported less.
            report.ship()
            report.close()
        if self.system_prompt is not None:
            # Not inside of the work that records the stage: linking a run takes the same lock.
            prompt = str(entities.record_system_prompt(child, self.config.registered_model, self.config.data.system_prompt))

            def link() -> None:
                for model in entities.logged_models(child):
                    entities.link_to_model(child, prompt, model.model_id)

            child.once(f"prompt_of_models.{_mark(result)}", link)
        child.end("FINISHED")
        self._stages = [stage for stage in self._stages if stage.stage != result.stage] + [result]

        def draw_overview() -> None:
            from grpo_tasks.tracking.plots import plot_overview

            journals = [(stage.stage, StageDir(stage.directory).journal) for stage in self._stages]
            self.handle.file(plot_overview(journals, result.directory / "overview.png"), "plots")

        self.handle.once(f"overview.{_short_hash('-'.join(map(_mark, self._stages)))}", draw_overview)
        return done

    def _describe(self, handle: RunHandle) -> None:
        """Record the environment. Each process that writes to the run records its own."""
        environment = describe_environment()
        handle.tags(environment.tags() | self._flow)
        handle.text(json.dumps(asdict(environment), indent=2), ENVIRONMENT)


def find_or_create(
    store: Store, config: RunConfig, title: str, *, by: dict[str, str], tags: Mapping[str, str] | None = None, fresh: bool = False
) -> tuple[Run, bool]:
    """The newest run with the tags `by` in the experiment of a config; created, and True, if there is none, or if `fresh`."""

    def experiment(client: MlflowClient) -> str:
        found = client.get_experiment_by_name(config.experiment)
        if found is None:
            return client.create_experiment(config.experiment, tags=EXPERIMENT_TAGS)
        if found.lifecycle_stage == "deleted":
            raise TrackingError(
                f"the experiment {config.experiment} was deleted in MLflow",
                place=store.uri,
                fix=f"restore it (mlflow experiments restore -x {found.experiment_id}) or set tracking.experiment",
            )
        return str(found.experiment_id)

    experiment_id = store.call(experiment)
    condition = " and ".join(f"tags.`{key}` = '{value}'" for key, value in by.items())
    newest = ["attributes.start_time DESC"]
    # Without the lock, two processes could both find no run and create two runs with one key.
    with store.lock("open-run", who=f"the run {config.name}"):
        found = store.call(lambda client: client.search_runs([experiment_id], condition, max_results=1, order_by=newest))
        if found and not fresh:
            return found[0], False
        return store.call(lambda client: client.create_run(experiment_id, tags={**by, **(tags or {})}, run_name=title)), True


def _mark(result: StepResult) -> str:
    """Identify a recorded result by key and contents. A GPU may produce other bytes for the same key; they are recorded too."""
    contents = outputs_sha256(result.manifest, result.OUTPUTS)[:_KEY_CHARS] if result.manifest and result.OUTPUTS else ""
    return ".".join(filter(None, [result.key[:_KEY_CHARS], contents]))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:_KEY_CHARS]

"""One run of a flow: the folder where its steps leave their results, and the MLflow run that records them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote
from uuid import UUID

from flows.frozen_inputs import Inputs, frozen_inputs
from flows.preflight import check_inputs, check_installed, check_output, check_tracking, check_working_directory
from grpo_tasks.content.markdown import table
from grpo_tasks.processes.child import no_room
from grpo_tasks.running.key import content_key
from grpo_tasks.running.orchestrator import (
    flow_run_id,
    flow_run_name,
    flow_run_url,
    locked,
    run_logger,
    send_event,
    show_artifact,
)
from grpo_tasks.running.step import LOCKS
from grpo_tasks.stage.journal import Journal
from grpo_tasks.stage.stage_dir import StageDir
from grpo_tasks.stage.watch import curve_of, publish_curve
from grpo_tasks.tracking.journal import JournalShipper
from grpo_tasks.tracking.models import Champion
from grpo_tasks.tracking.runs import TrackedRun, open_run
from schemas.config.operations import ResourcesConfig
from schemas.config.run import RunConfig
from schemas.errors import PrunedError, TrackingError, UserError, disk_full, hidden_errors
from schemas.results.base import StepResult
from schemas.results.model import StageResult
from schemas.results.publication import Publication
from schemas.results.sweep import Pruning, VariantSpec
from schemas.secret import hide

STEPS = tuple(
    f"grpo_tasks.steps.{name}" for name in ("prepare_data", "validate_data", "train_stage", "merge_adapter", "evaluate_model")
)
"""Steps whose code decides what a trained model is."""
FAILURE_FILES = ("report.md", "quarantine.parquet", "probes.parquet", "events.jsonl", "log.txt")
"""Files of a failed step that are sent to MLflow."""
CHAMPION_CHANGED = "grpo.champion.changed"
PUBLIC = "GRPO_MLFLOW_URL"
"""Environment variable: the address of MLflow for browsers, where it is not the one that runs use."""


@dataclass(slots=True, eq=False)
class FlowRun:
    """What steps know about the run (`grpo_tasks.running.step.Run`), backed by MLflow."""

    tracked: TrackedRun
    inputs: Inputs
    output: Path
    fresh: bool
    flow_run_id: str | None
    pruning: Pruning | None = None
    steps: int = 0
    begun: int = 0
    sections: dict[str, str] = field(default_factory=dict)
    """What the report says of steps that it does not know, by step (Markdown)."""
    _shown: dict[str, UUID] = field(default_factory=dict)
    """Artifacts of the run in Prefect that grow while it runs."""

    @property
    def config(self) -> RunConfig:
        """With the copies of the user's own modules."""
        return self.inputs.config

    @property
    def resources(self) -> ResourcesConfig:
        """Part of no content key."""
        return self.config.resources

    @property
    def origin(self) -> dict[str, str]:
        """Hashes of what the model was made from."""
        hashes = {
            "grpo.config_sha256": content_key("config", (), _sections(self.inputs)),
            "grpo.code_sha256": content_key("code", STEPS, {}),
            "grpo.reward_sha256": content_key("rewards", ("grpo_tasks.rewards.suite",), {"rewards": self.config.rewards}),
        }
        return hashes | self.tracked.origin

    def record(self, result: StepResult) -> None:
        """Send a result to MLflow, once; in a sweep, show the evaluations of a stage to the other runs."""
        for change in self.inputs.newly_changed():
            warn(change)
        self.tracked.record(result)
        if section := result.section():
            self.sections[result.directory.parent.name] = section
        if self.pruning is not None and isinstance(result, StageResult):
            # A stage that was trained before has had no chance to do it itself.
            journal = Journal(StageDir(result.directory).journal, writes=False)
            curve = curve_of(journal, self.pruning, key=result.key, seed=self.config.seed)
            publish_curve(curve, self.pruning, result.stage)

    def record_failure(self, step: str, directory: Path, error: UserError) -> None:
        """Send the error of a failed step and the files that it has left. Being pruned is no failure."""
        if isinstance(error, PrunedError):
            return
        handle = self.tracked.handle
        # The step's own error must reach the user, even if MLflow cannot record it.
        with suppress(TrackingError, OSError):
            handle.text(f"{step}\n{error}\n", f"failed/{step}/error.txt")
            for name in FAILURE_FILES:
                if name.endswith(".txt") and (directory / name).exists():
                    # The user's own code may have printed anything, secrets included.
                    text = (directory / name).read_text(encoding="utf-8", errors="replace")
                    handle.text(hide(text), f"failed/{step}/{name}")
                elif (directory / name).exists():
                    handle.file(directory / name, f"failed/{step}")

    def show_links(self, publication: Publication | None = None, *, report: bool = False) -> None:
        """Show in Prefect where MLflow has this run; called again, its report and its version too."""
        pages, experiment = mlflow_pages(self.tracked.store.uri), self.tracked.experiment_id
        if not pages:
            return
        page = f"{pages}/#/experiments/{experiment}/runs"
        run = f"{page}/{self.tracked.run_id}"
        rows = [
            ["MLflow run", f"[metrics, parameters, files]({run})"],
            ["all runs", f"[compare the runs of the experiment]({page}?workflowType=machine_learning)"],
        ]
        if report:
            rows.append(["report", f"[report.html]({run}/artifacts/report/report.html)"])
        if publication is not None:
            name, number = publication.model_name, publication.model_version
            version = f"{pages}/#/models/{quote(name, safe='')}/versions/{number}"
            rows.append(["model version", f"[{name} version {number}]({version})"])
        show_artifact("links", table(["what", "where"], rows), "This run in MLflow", self._shown)

    def announce(self, publication: Publication, before: Champion | None) -> None:
        """Send the event grpo.champion.changed if the version has become the champion."""
        name, version = publication.model_name, publication.model_version
        previous = before.version if before else ""
        if publication.champion and version != previous:
            payload = {"name": name, "version": version, "before": previous, "detail": publication.headline()}
            send_event(CHAMPION_CHANGED, f"grpo.model.{name}", payload)

    def require_wanted(self) -> None:
        """Before something is published: wait while the run is paused; raises `EndedByOthers` when others have ended it."""
        if self.flow_run_id is not None:
            from flows.ends import require_wanted

            require_wanted(self.flow_run_id)

    def follow(self, stage_dir: Path) -> JournalShipper:
        """What sends the journal of a stage to MLflow."""
        return self.tracked.follow(stage_dir)


def mlflow_pages(uri: str) -> str:
    """Address of MLflow for browsers, without a password; empty for a database that no server shows yet."""
    base = os.environ.get(PUBLIC) or uri
    return hide(base).rstrip("/") if base.startswith(("http://", "https://")) else ""


def warn(problem: str) -> None:
    """Log a problem that must not fail the run."""
    if problem:
        run_logger().warning("%s", problem)


@contextmanager
def open_flow_run(
    config: RunConfig,
    *,
    flow: str,
    fresh: bool = False,
    variant: VariantSpec | None = None,
    key: str | None = None,
    copies: Path | None = None,
    steps: int = 0,
) -> Iterator[FlowRun]:
    """Check the config against this machine, freeze its inputs, then open the MLflow run of the config, the inputs and the code.

    A second run of the same config, inputs and code continues the same MLflow run. Outside of a flow, Prefect is not involved.
    `steps` says how many steps follow; 0: not known. `key` is that of a run that waits only for a decision: its inputs were
    checked before, and may have changed since. `copies` holds the user's own modules, where they were copied before.
    """
    check_working_directory()
    check_installed(config)
    if key is None:
        check_inputs(config)
    check_output(config)
    check_tracking(config)
    with _report_disk_full(config.resources.output_dir):
        inputs = frozen_inputs(config, folder=copies)
    key = key or content_key(flow, STEPS, _sections(inputs))
    name = config.name if flow == "pipeline" else f"{flow} {config.name}"
    if variant is not None:
        name = variant.label
    run_id, folder = flow_run_id(), config.resources.output_dir / config.name
    with (
        _report_disk_full(config.resources.output_dir),
        hidden_errors(),
        # Runs in one folder share finished steps. A fresh run deletes them, so it waits until no other run uses the folder.
        locked(folder / LOCKS / "folder", f"uses the same folder {folder}", who=f"the run {config.name}", shared=not fresh),
        state_in_prefect(folder / ".running", run_id),
        open_run(
            inputs.given,
            inputs=inputs.config,
            key=key,
            fresh=fresh,
            flow_run_id=run_id,
            flow_run_url=flow_run_url(),
            # The flow run of a variant has the same name.
            flow_run_name=flow_run_name() if variant is None else None,
            name=name,
            parent_run_id=variant.parent_run_id if variant else None,
        ) as tracked,
    ):
        pruning = variant.pruning if variant else None
        warn(tracked.said_about_files())
        run = FlowRun(tracked, inputs, folder, fresh, run_id, pruning, steps)
        run.show_links()
        yield run
        for change in inputs.newly_changed():
            warn(change)


@contextmanager
def state_in_prefect(folder: Path, run_id: str | None) -> Iterator[None]:
    """Stop when others end the run in Prefect, and show how earlier runs of this folder ended; without a flow run do neither."""
    if run_id is None:
        yield
        return
    from flows.ends import recorded_process, watched

    with recorded_process(folder, run_id), watched(run_id):
        yield


@contextmanager
def _report_disk_full(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not disk_full(error):
            raise
        raise no_room(folder) from error


def pipeline_key(inputs: Inputs, start_from: str) -> str:
    """Hash of everything a trained model depends on: settings, contents of data, models and modules, code of the steps."""
    return content_key(f"retrain from {start_from}", STEPS, _sections(inputs))


def inputs_key(inputs: Inputs) -> str:
    """Hash of everything but the stages and the seed that a run depends on: settings, contents of files, code of the steps."""
    kept = {name: section for name, section in _sections(inputs).items() if name not in ("stages", "seed")}
    return content_key("inputs", STEPS, kept)


def _sections(inputs: Inputs) -> dict[str, object]:
    fields = [name for name in RunConfig.model_fields if name not in ("tracking", "resources")]
    # The copy of the adapter is called by its contents.
    start = inputs.config.start_from and inputs.config.start_from.name
    return {name: getattr(inputs.config, name) for name in fields} | {"modules": inputs.digest, "start_from": start}

"""A flow's run: where its steps leave their folders and how their results reach MLflow."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prefect import get_run_logger
from prefect.runtime import flow_run

from flows.checks import check_inputs, check_output
from flows.ends import cancellable, noted
from grpo_tasks.processes.child import no_room
from grpo_tasks.processes.lock import alone
from grpo_tasks.running.key import content_key
from grpo_tasks.running.step import LOCKS
from grpo_tasks.tracking.journal import JournalShipper
from grpo_tasks.tracking.runs import TrackedRun, open_run
from schemas.config.operations import ResourcesConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, TrackingError, UserError, disk_full, hidden_errors
from schemas.results import StepResult
from schemas.secret import hide

ROOMS = ("data", "answers", "rewards", "policy", "rollout", "stage", "grpo", "evaluation")
EXTRAS = {"trl": "trl", "bitsandbytes": "gpu"}
"""Libraries that a configuration may ask for, and the extra that brings each."""
SHOWN_OF_A_FAILURE = ("report.md", "quarantine.parquet", "probes.parquet", "events.jsonl", "log.txt")


@dataclass(slots=True, eq=False)
class FlowRun:
    """What steps see of the run (`grpo_tasks.running.step.Run`), kept by the tracking room."""

    tracked: TrackedRun
    output: Path
    fresh: bool
    flow_run_id: str | None

    @property
    def config(self) -> RunConfig:
        """The whole configuration."""
        return self.tracked.config

    @property
    def resources(self) -> ResourcesConfig:
        """Machine settings; no part of any content key."""
        return self.config.resources

    @property
    def origin(self) -> dict[str, str]:
        """What made the model, as tags of its registered version."""
        hashes = {
            "grpo.config_sha256": content_key("config", (), _sections(self.config)),
            "grpo.code_sha256": content_key("code", ROOMS, {}),
            "grpo.reward_sha256": content_key("rewards", ("rewards", "answers"), {"rewards": self.config.rewards}),
        }
        return hashes | self.tracked.origin

    def record(self, result: StepResult) -> None:
        """Send a result to MLflow, once."""
        self.tracked.record(result)

    def record_failure(self, step: str, directory: Path, error: UserError) -> None:
        """Send what a failed step has left, and why it failed."""
        handle = self.tracked.handle
        # The error itself matters more than a store that cannot hear of it.
        with suppress(TrackingError):
            handle.text(f"{step}\n{error}\n", f"failed/{step}/error.txt")
            for name in SHOWN_OF_A_FAILURE:
                if name.endswith(".txt") and (directory / name).exists():
                    # A user's own code may have printed anything.
                    text = (directory / name).read_text(encoding="utf-8", errors="replace")
                    handle.text(hide(text), f"failed/{step}/{name}")
                elif (directory / name).exists():
                    handle.file(directory / name, f"failed/{step}")

    def follow(self, stage_dir: Path) -> JournalShipper:
        """The shipper of a stage's journal."""
        return self.tracked.follow(stage_dir)


@contextmanager
def session(config: RunConfig, *, flow: str, fresh: bool = False) -> Iterator[FlowRun]:
    """Open the MLflow run that belongs to this configuration, these inputs and this code; the same again goes on in it."""
    _require_installed(config)
    check_inputs(config)
    check_output(config)
    key = content_key(flow, ROOMS, _sections(config))
    name = config.name if flow == "pipeline" else f"{flow} {config.name}"
    with (
        _full_disk_told(config.resources.output_dir),
        hidden_errors(),
        _in_company(config, fresh),
        noted(config.resources.output_dir / config.name / ".running", flow_run.id),
        cancellable(flow_run.id),
        open_run(config, key=key, fresh=fresh, flow_run_id=flow_run.id, name=name) as tracked,
    ):
        yield FlowRun(tracked, config.resources.output_dir / config.name, fresh, flow_run.id)


@contextmanager
def _in_company(config: RunConfig, fresh: bool) -> Iterator[None]:
    """Runs of one folder share finished steps; one that does every step again takes them away, and so waits to be alone."""
    log = get_run_logger()
    lock = config.resources.output_dir / config.name / LOCKS / "folder"

    def waiting(holder: str) -> None:
        log.info("waiting for %s, which works in the same folder %s", holder, lock.parent.parent)

    with alone(lock, who=f"the run {config.name}", shared=not fresh, waiting=waiting):
        yield


@contextmanager
def _full_disk_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not disk_full(error):
            raise
        raise no_room(folder) from error


def _require_installed(config: RunConfig) -> None:
    """Before anything is computed: the libraries that the configuration asks for."""
    wanted = [("model.quantization", "bitsandbytes")] if config.model.quantization != "none" else []
    for stage in config.stages:
        wanted += [(f"stages {stage.name}: engine trl", "trl")] if stage.engine == "trl" else []
        wanted += [(f"stages {stage.name}: optim {stage.optim}", "bitsandbytes")] if "8bit" in stage.optim else []
    for place, library in wanted:
        if importlib.util.find_spec(library) is None:
            raise ConfigError(f"{library} is not installed", place=place, fix=f"pip install '.[{EXTRAS[library]}]'")


def pipeline_key(config: RunConfig, start_from: str) -> str:
    """Key of everything a trained model depends on: settings, contents of data and models, code of the rooms."""
    return content_key(f"retrain from {start_from}", ROOMS, _sections(config))


def _sections(config: RunConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in RunConfig.model_fields if name not in ("tracking", "resources")}

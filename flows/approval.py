"""A person decides about the champion (promotion.approval: manual), in the form with which Prefect resumes a suspended run.

The process ends while the run is suspended. A worker starts it again: only the alias moves, whatever has become of data and code.
A run without a deployment cannot be started again; it ends with the version registered, and `grpo promote` decides.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import UUID

from prefect import suspend_flow_run
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.input import RunInput
from prefect.input.actions import create_flow_run_input, delete_flow_run_input, read_flow_run_input
from prefect.runtime import deployment, flow_run
from pydantic import Field, field_validator

from flows.flow_run import CHAMPION_CHANGED, FlowRun, open_flow_run
from grpo_tasks.operating.automations import SUSPENDED
from grpo_tasks.running.orchestrator import run_logger, send_event
from grpo_tasks.tracking.registry import approval_of, decide_pending, find_version
from grpo_tasks.tracking.store import open_store
from schemas.config.run import RunConfig
from schemas.errors import DamagedError, ModelError, TrackingError
from schemas.hints import without_gone
from schemas.results.base import Result
from schemas.results.publication import Approval, PipelineResult, Publication, Trained
from schemas.secret import hide

REQUESTED, DECIDED = "grpo.approval.requested", "grpo.approval.decided"
"""Events of the version grpo.model.NAME.VERSION."""
_ASKED = "grpo-asked"
"""Key under which Prefect keeps the name of the file with what a suspended run continues with."""
_SIGNS, _BETWEEN_SIGNS_S = 5, 0.5
Made = TypeVar("Made", Publication, PipelineResult)


class Verdict(RunInput):
    """The form of a suspended run."""

    decision: Literal["promote", "reject"] = Field(description="promote: the version becomes the champion.")
    approved_by: str = Field("", max_length=200, description="Your name, for the record.")
    note: str = Field("", max_length=2_000, description="Why, for the record.")


class SuspendedRun(Result):
    """What a suspended run continues with. Its parameters name data, code and aliases that may change while a person decides."""

    config: RunConfig
    """With the base model as it was found."""
    run_key: str
    """Content key of the MLflow run: the data may be others when a person has decided."""
    store: str = ""
    """Address of the MLflow store, without a password. An environment variable may name another when a person has decided."""
    copies: Path | None = None
    """The user's own modules, as they were when the run started."""
    trained: Trained
    tags: dict[str, str] = Field(default_factory=dict)
    """Of the version that waits."""

    @field_validator("config", mode="before")
    @classmethod
    def _read_earlier(cls, given: Any) -> Any:
        """A person may decide after an upgrade."""
        return without_gone(given) if isinstance(given, dict) else given

    @classmethod
    def of(cls, run: FlowRun, config: RunConfig, trained: Trained, tags: Mapping[str, str] | None = None) -> "SuspendedRun":
        """What `run` would continue with. `config`: as it was given, with the base model as it was found."""
        tracked = run.tracked
        return cls(
            config=config,
            run_key=tracked.key,
            store=hide(tracked.store.uri),
            copies=run.inputs.copies.folder,
            trained=trained,
            tags=dict(tags or {}),
        )


def load_pending_decision() -> SuspendedRun | None:
    """What this run was suspended with; None when it never was. Raises `DamagedError` when its file has changed since."""
    file = _kept()
    if file is None:
        return None
    try:
        return read_asked(file)
    except (OSError, TypeError, ValueError):
        run_logger().warning("what this run was suspended with cannot be read; it continues with its parameters as they are now")
        return None


def write_asked(asked: SuspendedRun, folder: Path) -> Path:
    """A file whose name is its SHA-256. Prefect keeps the name, so whoever edits the file cannot make it agree."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / f"{flow_run.id}.json"
    asked.save(written)
    return written.replace(folder / f"{hashlib.sha256(written.read_bytes()).hexdigest()}.json")


def read_asked(file: Path) -> SuspendedRun:
    """What `write_asked` wrote; raises `DamagedError` when it has changed since."""
    content = file.read_bytes()
    # An earlier release has named it after the run: there the results within it are sealed, each by itself.
    if file.stem not in (hashlib.sha256(content).hexdigest(), str(flow_run.id)):
        raise DamagedError(
            "what this run was suspended with has changed since a person was asked about it (its SHA-256 differs)",
            place=str(file),
            fix="start a new run of the same config: finished steps are skipped, and it asks with the figures that they recorded",
        )
    return SuspendedRun.parse(content, place=file)


@contextmanager
def continued_flow_run(asked: SuspendedRun, *, flow: str) -> Iterator[FlowRun]:
    """The run once more, for the decision alone; raises `TrackingError` when the store is another than that of its record."""
    here = hide(open_store(asked.config.tracking).uri)
    if asked.store not in ("", here):
        raise TrackingError(
            f"this run was recorded in {asked.store}, and the MLflow server is {here} now",
            place="MLFLOW_TRACKING_URI",
            fix="set it for the worker as it was when the run started, and start the run again",
        )
    with open_flow_run(asked.config, flow=flow, key=asked.run_key, copies=asked.copies) as run:
        for result in asked.trained.results():
            run.record(result)
        yield run


def _kept() -> Path | None:
    """The file of a suspension. It is known after a retry too, when Prefect has forgotten that the run was ever suspended."""
    if deployment.id is None or flow_run.parent_flow_run_id is not None:
        return None
    kept = read_flow_run_input(_ASKED)
    return None if kept is None else Path(str(kept))


def was_suspended() -> bool:
    """Whether the run was suspended before. Then everything is computed, also where every step was to run again."""
    return bool(_questions()) or _kept() is not None


def decide(asked: SuspendedRun, made: Made | None, publish: Callable[[FlowRun, SuspendedRun], Made], *, flow: str) -> Made:
    """What a run has made, published again after each answer of a person that it has to wait for.

    Call it outside of the run: a suspended run must hold nothing, and is not running in MLflow. `made` is None in a run that was
    suspended before.
    """
    while True:
        if made is not None:
            publication, comparison = (
                (made, made.headline) if isinstance(made, Publication) else (made.publication, made.comparison)
            )
            if not publication.awaits_approval or not ask_for_approval(asked, publication, made.headline(), comparison()):
                return made
        with continued_flow_run(asked, flow=flow) as run:
            made = publish(run, asked)


def ask_for_approval(asked: SuspendedRun, publication: Publication, headline: str, comparison: str) -> bool:
    """Suspend the run until a person has decided, and record the decision. False: this run cannot ask anybody.

    Lists of runs show the `headline` meanwhile, and the form the `comparison` (Markdown).
    """
    config, name = asked.config, f"{publication.model_name}/{publication.model_version}"
    if deployment.id is None or flow_run.parent_flow_run_id is not None:
        run_logger().info("%s waits for approval: grpo promote %s, or grpo promote %s --reject", name, name, name)
        return False
    resource, payload = f"grpo.model.{name.replace('/', '.')}", {"version": name, "detail": headline}
    pending = approval_of(find_version(name, config.tracking))
    # A comparison with another champion is another question.
    key, verdict = _answered(f"approval-{publication.model_version}-{pending.champion if pending else ''}")
    if verdict is None:
        send_event(REQUESTED, resource, payload)
        # Next to the results: a config may hold an address with a password, so Prefect knows only the file.
        file = str(write_asked(asked, config.resources.output_dir.resolve() / config.name / ".asked"))
        # There is one already when the run was asked before: with the same contents, unless that file was gone.
        known = read_flow_run_input(_ASKED)
        if known is not None and known != file:
            delete_flow_run_input(_ASKED)
        if known != file:
            create_flow_run_input(_ASKED, file)
        seconds = max(1, round(3600 * config.promotion.approval_hours))
        try:
            verdict = suspend_flow_run(Verdict.with_initial_data(description=hide(comparison)), timeout=seconds, key=key)
        except Pause as suspended:
            # `suspend_flow_run` takes no message, and a list of runs would say nothing.
            with suppress(Exception), get_client(sync_client=True) as client:
                if suspended.state is not None:
                    said = suspended.state.model_copy(update={"message": headline})
                    client.set_flow_run_state(UUID(str(flow_run.id)), said, force=True)
            # The automation that finds vanished runs must expect nothing more of this one. Prefect's own event is not enough: on
            # SQLite its server may fail to count an event while the database is locked, and gives up after 0.1 s.
            for _ in range(_SIGNS):
                send_event(SUSPENDED, f"prefect.flow-run.{flow_run.id}", {})
                time.sleep(_BETWEEN_SIGNS_S)
            raise
    approval = Approval(decision=verdict.decision, by=verdict.approved_by, note=verdict.note)
    try:
        run_logger().info(decide_pending(name, approval, config.tracking, sha256=asked.trained.merged.sha256))
    except ModelError as changed:
        # Another version became champion meanwhile, or `grpo promote` was quicker and has sent the events: publishing again
        # finds out.
        run_logger().warning("%s", changed)
    else:
        if approval.decision == "promote":
            send_event(CHAMPION_CHANGED, f"grpo.model.{publication.model_name}", payload | {"detail": str(approval)})
        send_event(DECIDED, resource, payload | {"detail": str(approval)})
    return True


def _answered(key: str) -> tuple[str, Verdict | None]:
    """The key under which to ask a question, and what a person has answered, in this attempt of the run or in an earlier one.

    Prefect suspends a run once for each key and takes one form for it. A retry finds those of a question that nobody answered.
    """
    while key in _questions() or read_flow_run_input(f"suspended-{key}-schema") is not None:
        given = read_flow_run_input(f"suspended-{key}-response")
        if given is not None:
            return key, Verdict.model_validate(given)
        key += "-again"
    return key, None


def _questions() -> set[str]:
    """Keys of the suspensions of this run so far."""
    context = FlowRunContext.get()
    run = context.flow_run if context else None
    return set(run.empirical_policy.pause_keys or ()) if run else set()

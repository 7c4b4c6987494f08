"""A step: a function of (work, inputs) that gets a content key and a folder, and in a flow a Prefect task.

    @step(reads="data")
    def prepare_data(work: Work, config: RunConfig) -> PreparedData: ...

    prepare_data(run, config):  the settings that it reads, no others (schemas/config/section.py)
                                content key of inputs and code (key.py)  ->  folder  ->  lock the folder  ->  finished?
                                    yes: skip, shown as Cached in the Prefect UI
                                    no: clear the folder, run, seal the result
                                record the result in MLflow and log it

Only the folder decides whether a step is finished: its result.json must have a seal and a manifest that agrees with every file.
Outside of a flow the same function runs without Prefect: same key, same folder, same record in MLflow.
"""

import functools
import inspect
import logging
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from grpo_tasks.content.hashes import find_changes, take_manifest
from grpo_tasks.kit.files import remove
from grpo_tasks.kit.progress import Progress, report
from grpo_tasks.processes.child import RESULT
from grpo_tasks.running.key import content_key
from grpo_tasks.running.orchestrator import artifact_key, in_flow, locked, run_logger, show_artifact, slots_of
from grpo_tasks.running.progress import StepProgress
from schemas.config.operations import ResourcesConfig
from schemas.config.section import view
from schemas.errors import ChildDied, DamagedError, Notice, UserError, hidden_errors
from schemas.results.base import StepResult, step_results
from schemas.results.sweep import Pruning
from schemas.secret import hide

LOCKS = ".locks"
"""Name of the folder with the lock files, next to the folders of the steps."""
Inputs = ParamSpec("Inputs")
Made = TypeVar("Made", bound=StepResult)
Kept_co = TypeVar("Kept_co", bound=StepResult, covariant=True)

RETRY_DELAY_S = 5
"""Seconds before a step whose child process died is tried again."""

REBUILT = ("final", "checkpoints", "spec.json", "train.parquet", "left_out.parquet")
"""What a stage writes again when it continues from a checkpoint."""
DAMAGED = "damaged.txt"
"""Lists the files of a folder that differ from the manifest, until `clear` has dealt with them."""
MAX_CHANGES_SHOWN = 5


class Run(Protocol):
    """What a step needs to know about the run it belongs to (the flows have the implementation)."""

    output: Path
    """Folder that holds the folders of all steps."""
    fresh: bool
    """Run every step again, finished or not."""
    pruning: Pruning | None
    """Only in a sweep: how a stage compares itself with the other runs."""
    steps: int
    """How many steps it has; 0: not known."""
    begun: int
    """How many of them have begun."""

    @property
    def resources(self) -> ResourcesConfig:
        """Settings of the machine. Of these, only `ways` is a part of content keys."""

    def record(self, result: StepResult) -> None:
        """Send the result and the files of a step to the tracking server. Sending them twice changes nothing."""

    def record_failure(self, step: str, directory: Path, error: UserError) -> None:
        """Send what a failed step left in its folder."""


@dataclass(slots=True, eq=False)
class Work:
    """What the body of a step is given besides its inputs."""

    key: str
    """Content key of the step (SHA-256, hex)."""
    directory: Path
    run: Any
    """The `Run`. Not typed as such, because Prefect builds a schema from the types of parameters."""

    def artifact(self, name: str, markdown: str) -> None:
        """Show a report in the Prefect UI under a stable key."""
        show_artifact(artifact_key(name), hide(markdown), self.key[:16])

    def table(self, name: str, rows: Sequence[Mapping[str, str | float]]) -> None:
        """Show rows in the Prefect UI, which can sort and filter them, under a stable key."""
        shown = [{column: hide(cell) if isinstance(cell, str) else cell for column, cell in row.items()} for row in rows]
        show_artifact(artifact_key(name), shown, self.key[:16])


def step(
    *,
    reads: str = "",
    retries: int = 0,
    resumable: bool = False,
    keeps: Sequence[str] = (),
    cached: bool = True,
    device: bool = False,
    on_cluster: bool = False,
) -> Callable[[Callable[Concatenate[Work, Inputs], Made]], "Step[Inputs, Made]"]:
    """Make a function a step.

    Args:
        reads: the settings that it reads of its input `config`, as `view` takes them. Only these count in its key.
        retries: how often to try again when the child process died; a `UserError` of another kind is never retried.
        resumable: an unfinished step continues in its folder instead of starting with an empty one.
        keeps: what stays in the folder of an unfinished step, which takes from there what it need not make again.
        cached: skip the step when it is finished; without it the step runs every time and decides itself what to do again.
        device: the step uses the GPU and waits for its slot.
        on_cluster: the step computes where `resources.cluster` says; a cluster has its own accounting of GPUs.
    """

    def decorate(body: Callable[Concatenate[Work, Inputs], Made]) -> Step[Inputs, Made]:
        return Step(body, reads, retries, resumable, keeps, cached, device, on_cluster)

    return decorate


@dataclass(frozen=True, slots=True)
class Step(Generic[Inputs, Made]):
    """A function made a step by `step`."""

    body: Callable[Concatenate[Work, Inputs], Made]
    reads: str
    retries: int
    resumable: bool
    keeps: Sequence[str]
    cached: bool
    device: bool
    on_cluster: bool

    def __call__(self, run: Run, *args: Inputs.args, **kwargs: Inputs.kwargs) -> Made:
        """The result of the step in a run, from its folder if it is finished there; recorded."""
        inputs = self._inputs(*args, **kwargs)
        label, work = self._work(run, inputs)
        run.begun += 1
        run_step = _run_as_task if in_flow() else _run_here
        try:
            outcome = run_step(functools.partial(self._followed, work, inputs, label), self.body, label, self.retries)
        except UserError as error:
            run.record_failure(label, work.directory, error)
            raise
        run_logger().info("%s%s", f"{run.begun}/{run.steps} " if run.steps else "", outcome.message(label))
        report(Progress("recording the results", step=label, number=run.begun, steps=run.steps))
        run.record(outcome.result)
        return outcome.result

    def left(self, run: Run, *args: Inputs.args, **kwargs: Inputs.kwargs) -> "Left[Made]":
        """What an earlier run has left of the step, without running anything."""
        label, work = self._work(run, self._inputs(*args, **kwargs))
        found = finished_result(self._makes, work.directory, marks=False) if self.cached and not run.fresh else None
        return Left(label, work.directory, cast(Made | None, found))

    def key(self, resources: ResourcesConfig, *args: Inputs.args, **kwargs: Inputs.kwargs) -> str:
        """Content key of the step for these inputs; raises `DamagedError` when a file is not what an earlier step wrote."""
        inputs = self._inputs(*args, **kwargs)
        require_unchanged(inputs)
        return self._key(inputs, resources)

    def made_in(self, directory: Path, resources: ResourcesConfig, *args: Inputs.args, **kwargs: Inputs.kwargs) -> Made:
        """What the body makes in this folder, which may hold other files: no run, no lock, no skipping, no record."""
        work = Work(self.key(resources, *args, **kwargs), directory, SimpleNamespace(resources=resources))
        with StepProgress(self.body.__name__, directory):
            result = self.body(work, *args, **kwargs)
        return result.sealed(take_manifest(work.directory, result.OUTPUTS) if result.OUTPUTS else ())

    def _inputs(self, *args: Inputs.args, **kwargs: Inputs.kwargs) -> dict[str, Any]:
        """All inputs by name, defaults included, without the first parameter (work); of the config what the step reads."""
        bound = inspect.signature(self.body).bind(None, *args, **kwargs)
        bound.apply_defaults()
        inputs = dict(bound.arguments)
        inputs.pop(next(iter(inputs)))
        return inputs | ({"config": view(inputs["config"], self.reads)} if self.reads else {})

    def _work(self, run: Run, inputs: dict[str, Any]) -> tuple[str, Work]:
        """Label, key and folder of the step in a run."""
        require_unchanged(inputs)
        name, key = self.body.__name__, self._key(inputs, run.resources)
        # The stage or the model, for a step that runs more than once in a pipeline.
        suffix = inputs.get("label") or getattr(inputs.get("stage"), "name", None)
        label = f"{name}-{suffix}" if suffix else name
        return label, Work(key, run.output.resolve() / name / f"{suffix or 'all'}-{key[:16]}", run)

    @property
    def _makes(self) -> type[StepResult]:
        made: type[StepResult] = inspect.signature(self.body, eval_str=True).return_annotation
        return made

    def _key(self, inputs: dict[str, Any], resources: ResourcesConfig) -> str:
        # What a device computes depends on the way in which it does.
        ways = resources.ways if self.device else {}
        return content_key(self.body.__name__, (self.body.__module__,), inputs | ({"ways": ways} if ways else {}))

    def _followed(self, work: Work, inputs: dict[str, Any], label: str) -> "_Outcome[Made]":
        with StepProgress(label, work.directory, number=work.run.begun, steps=work.run.steps):
            return self._skip_or_run(work, inputs)

    def _skip_or_run(self, work: Work, inputs: dict[str, Any]) -> "_Outcome[Made]":
        """Skip the step if its folder holds the finished result, otherwise run it."""
        name, folder = self.body.__name__, work.directory
        lock = folder.parent.parent / LOCKS / f"{name}-{folder.name}"
        # Of two runs that need the same step, the second waits and finds it finished.
        with locked(lock, f"runs the same step {name} ({folder})", who="another run"):
            if self.cached and not work.run.fresh:
                finished = finished_result(self._makes, work.directory)
                if finished is not None:
                    return _Outcome(cast(Made, finished), skipped=True)
            clear(work.directory, resumable=self.resumable and not work.run.fresh, keep=() if work.run.fresh else self.keeps)
            # The slot is acquired here and not before: a step that is skipped needs no GPU.
            with hidden_errors(), self._slots(work, inputs), _logged_notices():
                body: Callable[..., Made] = self.body
                result = body(work, **inputs)
            self._require_same_key(work, inputs)
            # The seal is written last. A step that is killed before this line is not finished.
            result = result.sealed(take_manifest(work.directory))
            result.save(work.directory / RESULT)
            return _Outcome(result, skipped=False)

    def _slots(self, work: Work, inputs: dict[str, Any]) -> AbstractContextManager[None]:
        rollout = inputs["config"].rollout if self.on_cluster else None
        names = slots_of(work.run.resources, rollout, trains=rollout is not None) if self.device else []
        return holding(names)

    def _require_same_key(self, work: Work, inputs: dict[str, Any]) -> None:
        """Refuse what a step has made while its inputs changed: it may have read either. Nothing may be found under its key."""
        try:
            if self._key(inputs, work.run.resources) == work.key:
                return
            raise DamagedError(
                "files that this step reads have changed while it ran",
                place=str(work.directory),
                fix="start the run again when they are complete; steps whose inputs are the same are skipped",
            )
        except DamagedError:
            clear(work.directory, resumable=False)
            raise


@dataclass(frozen=True, slots=True)
class Left(Generic[Kept_co]):
    """What is there of a step."""

    label: str
    directory: Path
    result: Kept_co | None
    """None where it has to run, or to continue."""


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[Made]):
    result: Made
    skipped: bool

    def message(self, label: str) -> str:
        return f"{label}: unchanged, skipped" if self.skipped else f"{label}: done in {self.result.seconds:.1f} s"


@contextmanager
def _logged_notices() -> Iterator[None]:
    """Notices of the step stand in its log, not on the standard error output with a line of code."""
    show, logger = warnings.showwarning, run_logger()

    def showwarning(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        if issubclass(category, Notice):
            logger.warning("%s", message)
        else:
            show(message, category, *rest, **options)

    warnings.showwarning = showwarning
    try:
        yield
    finally:
        warnings.showwarning = show


def _run_as_task(run: Callable[[], _Outcome[Made]], body: Callable[..., Made], label: str, retries: int) -> _Outcome[Made]:
    """Run a step in a task of the current flow: its state, name and retries are what the Prefect UI shows."""
    from prefect import task
    from prefect.cache_policies import NO_CACHE
    from prefect.states import Completed

    # The line of the step says it.
    logging.getLogger("prefect.task_runs").addFilter(_adds_something)
    # Prefect keeps the state of a task, not its result.
    outcomes: list[_Outcome[Made]] = []

    def skip_or_run() -> Any:
        outcomes.append(run())
        if outcomes[-1].skipped:
            return Completed(name="Cached", message=f"{label}: unchanged, every file verified")
        return Completed(message=outcomes[-1].message(label))

    async def child_died(task: object, task_run: object, state: Any) -> bool:  # noqa: ARG001 - Prefect's signature
        try:
            await state.aresult()
        except BaseException as error:
            return isinstance(error, ChildDied)
        return False

    make_task: Any = task  # its overloads know no generic function
    state = make_task(
        skip_or_run,
        name=body.__name__,
        task_run_name=label,
        description=inspect.getdoc(body),
        # Only the folder decides whether a step is finished; a cache of Prefect's could contradict it.
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=retries,
        retry_delay_seconds=RETRY_DELAY_S,
        retry_condition_fn=child_died,
    )(return_state=True)
    state.result()
    return outcomes[-1]


def _adds_something(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(("Finished in state Completed(", "Finished in state Cached("))


def _run_here(run: Callable[[], _Outcome[Made]], body: Callable[..., Made], label: str, retries: int) -> _Outcome[Made]:  # noqa: ARG001 - the shape of `_run_as_task`
    for attempt in range(retries):
        try:
            return run()
        except ChildDied as error:
            run_logger().warning("%s: %s; attempt %d of %d follows", label, error.message, attempt + 2, retries + 1)
            time.sleep(RETRY_DELAY_S)
    return run()


def finished_result(kind: type[Made], folder: Path, *, marks: bool = True) -> Made | None:
    """The result of a finished step; None if it is not sealed, or if any file has another size or SHA-256 than its manifest.

    `marks`: warn of the damage, and leave a mark by which the step that runs again knows it.
    """
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        result = kind.load(path)
    except DamagedError as error:
        if marks:
            _mark_damaged(folder, [RESULT], f"{error.message}: {path}")
        return None
    if not result.seal:
        # Written by the child process. The seal comes last, when the step has hashed every file.
        return None
    changes = find_changes(folder, result.manifest)
    if changes and not marks:
        return None
    if changes:
        shown = "; ".join(map(str, changes[:MAX_CHANGES_SHOWN]))
        more = f"; and {len(changes) - MAX_CHANGES_SHOWN} more" if len(changes) > MAX_CHANGES_SHOWN else ""
        _mark_damaged(folder, [change.path for change in changes], f"{folder}: {shown}{more}")
        return None
    # The folder of all runs may have been moved since; the paths in the result follow.
    return result if result.directory == folder else result.moved_to(folder)


def _mark_damaged(folder: Path, paths: list[str], damage: str) -> None:
    run_logger().warning("%s; the step runs again", damage)
    (folder / DAMAGED).write_text("\n".join(paths), encoding="utf-8")


def clear(folder: Path, *, resumable: bool, keep: Sequence[str] = ()) -> None:
    """Prepare a folder for its step: with `resumable` it keeps what the step can continue from, otherwise it is emptied, but for
    the names in `keep`.

    A trained stage is worth hours: if its journal and tables are intact, it keeps its last complete checkpoint. If not, its
    folder is kept under another name and the stage starts again.
    """
    if not resumable:
        for path in folder.iterdir() if folder.exists() else ():
            if path.name not in keep:
                remove(path)
    elif (folder / DAMAGED).exists():
        _clear_damage(folder, (folder / DAMAGED).read_text(encoding="utf-8").splitlines())
    folder.mkdir(parents=True, exist_ok=True)


def _clear_damage(folder: Path, paths: list[str]) -> None:
    if all(path == RESULT or path.split("/")[0] in REBUILT for path in paths):
        # Everything damaged can be rebuilt from a checkpoint: remove the result, the final weights and the damaged checkpoints.
        (folder / RESULT).unlink(missing_ok=True)
        for path in ["final", *(path for path in paths if path.startswith("checkpoints/"))]:
            two_levels = path.split("/")[:2]  # of checkpoints/step-000050/state.json the folder of that checkpoint
            shutil.rmtree(folder.joinpath(*two_levels), ignore_errors=True)
        (folder / DAMAGED).unlink()
        return
    names = (folder.with_name(f"{folder.name}.damaged-{number}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    folder.rename(aside)
    (aside / RESULT).unlink(missing_ok=True)
    run_logger().warning("%s: journal or tables are damaged; kept as %s, and the stage starts again", folder, aside)


def require_unchanged(inputs: Mapping[str, Any]) -> None:
    """Compare the outputs of earlier steps with their manifests, right before a step reads them; raises `DamagedError`."""
    for result in step_results(inputs):
        outputs = [file for file in result.manifest if file.path.split("/")[0] in result.OUTPUTS]
        changes = find_changes(result.directory, outputs)
        if changes:
            raise DamagedError(
                str(changes[0]),
                place=str(result.directory / changes[0].path),
                fix="run the same command again: the step that made it runs again",
            )


def holding(slots: Sequence[str]) -> AbstractContextManager[None]:
    """Hold these slots while the block runs; of none nothing of Prefect is imported, which may be missing here."""
    if not slots:
        return nullcontext()
    from grpo_tasks.running.slots import hold_all

    return hold_all(slots)

"""A step: a function of (work, inputs) that becomes a Prefect task with a content key and a folder.

    @step(rooms=("data",))
    def prepare_data(work: Work, data: DataConfig) -> PreparedData: ...

    prepare_data(run, config.data)      in a flow:

    content key of inputs and code (key.py)  ->  folder  ->  lock the folder  ->  finished (finished.py)?
                                                                                  yes: skip, shown as Cached in the Prefect UI
                                                                                  no: clear the folder, run, seal the result
                                                         ->  in both cases: record the result in MLflow and log it

The same inputs and the same code have the same key and therefore the same folder. Only the folder decides whether a step is
finished: its result.json must have a seal and a manifest that agrees with every file. Prefect's own caching is off.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed

from grpo_tasks.content.manifest import take_manifest
from grpo_tasks.processes.entry import RESULT
from grpo_tasks.processes.lock import alone
from grpo_tasks.running.finished import clear, finished_result, require_unchanged
from grpo_tasks.running.key import content_key
from grpo_tasks.running.slots import hold_all, slots_of
from schemas.config.operations import ResourcesConfig
from schemas.errors import ChildDied, UserError, hidden_errors
from schemas.results.base import StepResult
from schemas.secret import hide

LOCKS = ".locks"
"""Name of the folder with the lock files, next to the folders of the steps."""
Inputs = ParamSpec("Inputs")
Made = TypeVar("Made", bound=StepResult)

CACHED = "Cached"
"""Name of the Prefect state of a step that was skipped."""


class Run(Protocol):
    """What a step needs to know about the run it belongs to (the flows have the implementation)."""

    output: Path
    """Folder that holds the folders of all steps."""
    fresh: bool
    """Run every step again, finished or not."""

    @property
    def resources(self) -> ResourcesConfig:
        """Settings of the machine; they are not part of any content key."""

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
    """Folder of the step."""
    run: Any
    """The `Run`. Not typed as such, because Prefect builds a schema from the types of parameters."""

    def artifact(self, name: str, markdown: str) -> None:
        """Show a report in the Prefect UI under a stable key."""
        create_markdown_artifact(key=name.replace("_", "-").lower(), markdown=hide(markdown), description=self.key[:16])


def step(
    *, rooms: tuple[str, ...], retries: int = 0, resumable: bool = False, cached: bool = True, device: bool = False
) -> Callable[[Callable[Concatenate[Work, Inputs], Made]], Callable[Concatenate[Run, Inputs], Made]]:
    """Make a function a step.

    Args:
        rooms: folders of grpo_tasks whose code the step reaches (a test compares them with the import graph).
        retries: how often to try again when the child process died; a `UserError` of another kind is never retried.
        resumable: an unfinished step continues in its folder instead of starting with an empty one.
        cached: skip the step when it is finished; without it the step runs every time and decides itself what to do again.
        device: the step uses the GPU and waits for its slot.
    """

    def decorate(body: Callable[Concatenate[Work, Inputs], Made]) -> Callable[Concatenate[Run, Inputs], Made]:
        name = body.__name__
        result_type: Any = inspect.signature(body, eval_str=True).return_annotation
        defined = _Step(body, result_type, resumable, cached, device)
        prefect_task = _prefect_task(defined, name, retries)

        @functools.wraps(body)
        def call(run: Run, *args: Inputs.args, **kwargs: Inputs.kwargs) -> Made:
            inputs = _bound(body, args, kwargs)
            require_unchanged(inputs)
            key = content_key(name, (*rooms, name), inputs)
            label = _label(name, inputs)
            work = Work(key, run.output.resolve() / name / f"{label.removeprefix(name).lstrip('-') or 'all'}-{key[:16]}", run)
            # Prefect keeps the state of a task, not its result: the task appends the result here.
            results: list[Made] = []
            state = prefect_task(work, label, inputs, results, return_state=True)
            return _record(state, results, run, work, label)

        return cast(Callable[Concatenate[Run, Inputs], Made], call)

    return decorate


@dataclass(frozen=True, slots=True)
class _Step(Generic[Made]):
    body: Callable[..., Made]
    result_type: type[Made]
    resumable: bool
    cached: bool
    device: bool

    def skip_or_run(self, work: Work, label: str, inputs: dict[str, Any], results: list[Made]) -> State[None]:
        """Skip the step if its folder holds the finished result, otherwise run it. Appends the result to `results`."""
        with _locked_folder(work, label):
            may_skip = self.cached and not work.run.fresh
            finished = finished_result(self.result_type, work.directory) if may_skip else None
            if finished is not None:
                results.append(finished)
                return Completed(name=CACHED, message=f"{label}: unchanged, every file verified")
            result = self._run(work, inputs)
            results.append(result)
        return Completed(message=f"{label}: done in {result.seconds:.1f} s")

    def _run(self, work: Work, inputs: dict[str, Any]) -> Made:
        clear(work.directory, resumable=self.resumable and not work.run.fresh)
        # The slot is acquired here and not before: a step that is skipped needs no GPU.
        with hidden_errors(), hold_all(slots_of(work.run.resources) if self.device else ()):
            result = self.body(work, **inputs)
        # The seal is written last. A step that is killed before this line is not finished.
        result = result.sealed(take_manifest(work.directory))
        result.save(work.directory / RESULT)
        return result


def _prefect_task(defined: _Step[Any], name: str, retries: int) -> Any:
    def skip_or_run(work: Work, label: str, inputs: dict[str, Any], results: list[Any]) -> State[None]:
        return defined.skip_or_run(work, label, inputs, results)

    make_task: Any = task  # its overloads know no generic function
    return make_task(
        skip_or_run,
        name=name,
        task_run_name="{label}",
        description=inspect.getdoc(defined.body),
        # Only the folder decides whether a step is finished; a cache of Prefect's could contradict it.
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=retries,
        retry_delay_seconds=5,
        retry_condition_fn=_child_died,
    )


@contextmanager
def _locked_folder(work: Work, label: str) -> Iterator[None]:
    """Be the only process in this folder. Of two runs that need the same step, the second waits and finds it finished."""
    log = get_run_logger()

    def waiting(holder: str) -> None:
        log.info("%s: waiting for %s, which runs the same step (%s)", label, holder, work.directory)

    lock = work.directory.parent.parent / LOCKS / f"{work.directory.parent.name}-{work.directory.name}"
    with alone(lock, who="another run", waiting=waiting):
        yield


def _record(state: State[Any], results: list[Made], run: Run, work: Work, label: str) -> Made:
    """Log and record the result of the task, or record its failure and raise its error."""
    try:
        state.result()
    except UserError as error:
        run.record_failure(label, work.directory, error)
        raise
    [result] = results
    outcome = "unchanged, skipped" if state.name == CACHED else f"done in {result.seconds:.1f} s"
    get_run_logger().info("%s: %s (%s)", label, outcome, work.directory)
    run.record(result)
    return result


def _bound(body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All inputs by name, defaults included, without the first parameter (work)."""
    bound = inspect.signature(body).bind(None, *args, **kwargs)
    bound.apply_defaults()
    inputs = dict(bound.arguments)
    inputs.pop(next(iter(inputs)))
    return inputs


def _label(name: str, inputs: dict[str, Any]) -> str:
    """The step's name, followed by the stage or the model for a step that runs more than once in a pipeline."""
    suffix = inputs.get("label") or getattr(inputs.get("stage"), "name", None)
    return f"{name}-{suffix}" if suffix else name


async def _child_died(task: object, task_run: TaskRun, state: State[Any]) -> bool:  # noqa: ARG001 - Prefect's signature
    try:
        await state.aresult()
    except ChildDied:
        return True
    except BaseException:
        return False
    return False

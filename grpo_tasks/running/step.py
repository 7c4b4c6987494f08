"""A step: a function of (work, inputs) that becomes a Prefect task with a content key and a folder.

    @step(rooms=("data",))
    def prepare_data(work: Work, data: DataConfig) -> PreparedData: ...

    prepare_data(run, config.data)      in a flow: skipped when it is finished, recorded in MLflow, logged

Same inputs and same code give the same key, so the same folder. The folder is the one truth about whether a step is finished: its
result.json carries a seal and the manifest of its files (finished.py). A step that is skipped shows as Cached in the Prefect UI.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

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
from schemas.results import StepResult
from schemas.secret import hide

LOCKS = ".locks"
"""Folder beside the steps' folders."""
Inputs = ParamSpec("Inputs")
Made = TypeVar("Made", bound=StepResult)

CACHED = "Cached"
"""Name of the Prefect state of a step that was skipped."""


class Run(Protocol):
    """What a step needs to know of the run it belongs to; the tracking room has the real one."""

    output: Path
    """Folder of all steps' folders."""
    fresh: bool
    """Run every step again."""

    @property
    def resources(self) -> ResourcesConfig:
        """Machine settings; no part of any content key."""

    def record(self, result: StepResult) -> None:
        """Send a step's result and files to the tracking server; sending twice changes nothing."""

    def record_failure(self, step: str, directory: Path, error: UserError) -> None:
        """Send what a failed step has left."""


@dataclass(slots=True, eq=False)
class Work:
    """Handed to a step's body."""

    key: str
    directory: Path
    run: Any
    """The `Run`; typed loosely because Prefect inspects parameters."""

    def artifact(self, name: str, markdown: str) -> None:
        """Show a report in the Prefect UI under a stable key."""
        create_markdown_artifact(key=name.replace("_", "-").lower(), markdown=hide(markdown), description=self.key[:16])


def step(
    *, rooms: tuple[str, ...], retries: int = 0, resumable: bool = False, cached: bool = True, device: bool = False
) -> Callable[[Callable[Concatenate[Work, Inputs], Made]], Callable[Concatenate[Run, Inputs], Made]]:
    """Make a step of a function.

    Args:
        rooms: folders of grpo_tasks whose code the step reaches (a test holds them to the import graph).
        retries: how often to try again when the step's process died; errors of the user's are never retried.
        resumable: an unfinished step continues in its folder instead of starting with an empty one.
        device: whether it uses the card and therefore waits for its slot.
        cached: whether an unchanged step is skipped; a step that is cheap and idempotent may look for itself.
    """

    def decorate(body: Callable[Concatenate[Work, Inputs], Made]) -> Callable[Concatenate[Run, Inputs], Made]:
        name = body.__name__
        made_by: Any = inspect.signature(body, eval_str=True).return_annotation

        def work_of(work: Work, label: str, inputs: dict[str, Any], made: list[Made]) -> State[None]:
            with _alone(work, label):
                kept = finished_result(made_by, work.directory) if cached and not work.run.fresh else None
                if kept is not None:
                    made.append(kept)
                    return Completed(name=CACHED, message=f"{label}: unchanged, every file verified")
                clear(work.directory, resumable=resumable and not work.run.fresh)
                with hidden_errors(), hold_all(slots_of(work.run.resources) if device else ()):
                    result = body(work, **inputs)  # type: ignore[call-arg]
                result = result.sealed(take_manifest(work.directory))
                result.save(work.directory / RESULT)
                made.append(result)
            return Completed(message=f"{label}: done in {result.seconds:.1f} s")

        make_task: Any = task  # its overloads know no generic function
        prefect_task = make_task(
            work_of,
            name=name,
            task_run_name="{label}",
            description=inspect.getdoc(body),
            # The step's folder says what is finished; a second memory could only contradict it.
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=retries,
            retry_delay_seconds=5,
            retry_condition_fn=_died,
        )

        @functools.wraps(body)
        def call(run: Run, *args: Inputs.args, **kwargs: Inputs.kwargs) -> Made:
            inputs = _bound(body, args, kwargs)
            require_unchanged(inputs)
            key = content_key(name, (*rooms, name), inputs)
            label = _label(name, inputs)
            work = Work(key, run.output.resolve() / name / f"{label.removeprefix(name).lstrip('-') or 'all'}-{key[:16]}", run)
            made: list[Made] = []
            state = prefect_task(work, label, inputs, made, return_state=True)
            return _settle(state, made, run, work, label)

        return cast(Callable[Concatenate[Run, Inputs], Made], call)

    return decorate


@contextmanager
def _alone(work: Work, label: str) -> Iterator[None]:
    """Be the only process at this folder: the second of two that want the same step waits, and finds it done."""
    log = get_run_logger()

    def waiting(holder: str) -> None:
        log.info("%s: waiting for %s, which is at the same step (%s)", label, holder, work.directory)

    lock = work.directory.parent.parent / LOCKS / f"{work.directory.parent.name}-{work.directory.name}"
    with alone(lock, who="another run", waiting=waiting):
        yield


def _settle(state: State[Any], made: list[Made], run: Run, work: Work, label: str) -> Made:
    try:
        state.result()
    except UserError as error:
        run.record_failure(label, work.directory, error)
        raise
    [result] = made
    how = "unchanged, skipped" if state.name == CACHED else f"done in {result.seconds:.1f} s"
    get_run_logger().info("%s: %s (%s)", label, how, work.directory)
    run.record(result)
    return result


def _bound(body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(body).bind(None, *args, **kwargs)
    bound.apply_defaults()
    inputs = dict(bound.arguments)
    inputs.pop(next(iter(inputs)))
    return inputs


def _label(name: str, inputs: dict[str, Any]) -> str:
    """The step's name, with the stage's or the model's where a step runs more than once."""
    part = inputs.get("label") or getattr(inputs.get("stage"), "name", None)
    return f"{name}-{part}" if part else name


async def _died(task: object, task_run: TaskRun, state: State[Any]) -> bool:  # noqa: ARG001 - Prefect's signature
    try:
        await state.aresult()
    except ChildDied:
        return True
    except BaseException:
        return False
    return False

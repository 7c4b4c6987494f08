"""Runs the body of a step as a Prefect task: its state, its name and its retries are what the Prefect UI shows."""

from collections.abc import Callable
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed

from schemas.errors import ChildDied

CACHED = "Cached"
"""Name of the Prefect state of a step that was skipped."""


def run_as_task(
    body: Callable[[], Any],
    message: Callable[[Any], tuple[bool, str]],
    *,
    name: str,
    label: str,
    about: str | None,
    retries: int,
    delay_s: float,
) -> Any:
    """Call `body` in a task of the current flow and return what it returned.

    Args:
        body: the work.
        message: for the value of `body`, whether the step was skipped, and the message of the task's state.
        name: name of the task.
        label: name of the task run.
        about: description of the task.
        retries: how often to try again when the child process of the step died.
        delay_s: seconds before each of these attempts.
    """
    # Prefect keeps the state of a task, not its result: the task appends the result here.
    results: list[Any] = []

    def skip_or_run() -> State[None]:
        results.append(body())
        skipped, text = message(results[-1])
        return Completed(name=CACHED, message=text) if skipped else Completed(message=text)

    make_task: Any = task  # its overloads know no generic function
    state = make_task(
        skip_or_run,
        name=name,
        task_run_name=label,
        description=about,
        # Only the folder decides whether a step is finished; a cache of Prefect's could contradict it.
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=retries,
        retry_delay_seconds=delay_s,
        retry_condition_fn=_child_died,
    )(return_state=True)
    state.result()
    return results[-1]


async def _child_died(task: object, task_run: TaskRun, state: State[Any]) -> bool:  # noqa: ARG001 - Prefect's signature
    try:
        await state.aresult()
    except ChildDied:
        return True
    except BaseException:
        return False
    return False

"""The server that Prefect starts for a flow when none is configured: a password for it, and the flows that lock it.

It has a random password that only this process tree knows: else any web page could write to the database of a worker.
locked_server.py has how it starts and where it keeps its tables.
"""

import functools
import os
import secrets
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.context import FlowRunContext, refresh_global_settings_context
from prefect.settings import get_current_settings
from prefect.states import Completed

from schemas.results.base import Result

P = ParamSpec("P")
R = TypeVar("R")


def is_temporary() -> bool:
    """Whether Prefect starts a server of its own for a flow. A profile may name a server even if the environment names none."""
    return get_current_settings().api.url is None


def lock_temporary_server() -> None:
    """Set a password for the temporary server, unless a server is configured or the password has been set before."""
    if not is_temporary() or {"PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"} <= os.environ.keys():
        return
    password = os.environ.setdefault("PREFECT_SERVER_API_AUTH_STRING", f"grpo:{secrets.token_urlsafe(24)}")
    os.environ["PREFECT_API_AUTH_STRING"] = password
    # On a slow or busy machine the server needs more than the 20 s that Prefect allows.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "300")
    # Prefect's server takes a second to import. With a server of one's own nothing here needs it.
    from flows.locked_server import patch_prefect

    patch_prefect()
    refresh_global_settings_context()


class _LockedFlow(Flow[P, R]):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Inside another flow, the server runs already.
        if FlowRunContext.get() is None:
            lock_temporary_server()
        return super().__call__(*args, **kwargs)


def locked_flow(*, name: str, description: str) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """`prefect.flow`, for flows that a script may call directly: their temporary server is locked too.

    The headline of the result becomes the message of the run's final state, which Prefect shows in lists of runs.
    """

    def decorate(function: Callable[P, R]) -> Flow[P, R]:
        @functools.wraps(function)
        def with_headline(*args: P.args, **kwargs: P.kwargs) -> Any:
            result = function(*args, **kwargs)
            message = result.headline() if isinstance(result, Result) else ""
            return Completed(message=message, data=result) if message else result

        # The folders of the steps are what is kept. A pickle of Prefect's would be a second, unverified copy.
        return _LockedFlow(with_headline, name=name, description=description, persist_result=False)

    return decorate

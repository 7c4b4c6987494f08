"""The server that Prefect starts for a flow when none is configured, closed to everybody but this process and its children.

Prefect leaves that server open: any web page in a browser on this machine could write to its database, and a worker would later
execute what it finds there. A random password, which only this process tree knows, prevents that.
"""

import os
import secrets
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Flow
from prefect.context import FlowRunContext, refresh_global_settings_context
from prefect.settings import get_current_settings

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
    refresh_global_settings_context()


class _LockedFlow(Flow[P, R]):
    """A flow that locks the temporary server before Prefect starts it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Inside another flow, the server runs already.
        if FlowRunContext.get() is None:
            lock_temporary_server()
        return super().__call__(*args, **kwargs)


def locked_flow(*, name: str, description: str) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """`prefect.flow`, for flows that a script may call directly: their temporary server is locked too."""
    return lambda function: _LockedFlow(function, name=name, description=description)

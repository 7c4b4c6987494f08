"""The Prefect server that the environment, a profile or a settings file names: whether it answers, known within seconds.

Prefect's own client repeats a request for minutes, which is right for a server that disappears during a run and wrong for one
that was never there. Its settings of TLS, headers and login apply here too.
"""

import os
import time
from dataclasses import dataclass
from typing import Any

import httpx
from prefect.client.orchestration import get_client
from prefect.context import get_settings_context
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings

from schemas.errors import OrchestratorError

ATTEMPTS = 2
"""Requests to a server that does not answer: it may be starting. The client tries to connect three times in each."""
LIMIT_S = 5.0
"""Longest wait for one answer."""
_STARTING = (500, 502, 503, 504)
"""Answers of a server, or of the proxy in front of it, that may be starting."""
_COUNT = "/flow_runs/count"
"""A request that needs the database and the login."""


@dataclass(frozen=True, slots=True)
class PrefectServer:
    """The address, and what names it."""

    url: str
    place: str
    fix: str
    """How to do without it."""

    def count_runs(self) -> int:
        """Number of flow runs in its database; `OrchestratorError`: no answer, a refused login, or another server."""
        answer = self.ask(_COUNT, {})
        if not isinstance(answer, int):
            raise self._another("it does not count flow runs")
        return answer

    def ask(self, path: str, body: object) -> Any:
        """What the server answers to a POST; raises as `count_runs`."""
        for attempt in range(ATTEMPTS):
            time.sleep(attempt)
            try:
                with (
                    temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_URL: self.url}),
                    get_client({"timeout": LIMIT_S}, sync_client=True) as client,
                ):
                    return client._client.post(path, json=body).raise_for_status().json()
            except Exception as error:
                fault = _of_httpx(error)
                if isinstance(fault, httpx.HTTPStatusError) and fault.response.status_code not in _STARTING:
                    status = fault.response.status_code
                    if status not in (401, 403):
                        raise self._another(f"it answers {status}") from error
                    raise OrchestratorError(
                        f"the Prefect server refuses the login ({status})",
                        place=self.place,
                        fix="export PREFECT_API_AUTH_STRING=USER:PASSWORD for a server with a password, PREFECT_API_KEY for "
                        "Prefect Cloud",
                    ) from error
                if isinstance(fault, ValueError | httpx.InvalidURL | httpx.UnsupportedProtocol):
                    raise self._another("it answers no JSON, as a login page or a proxy does") from error
                if fault is None:
                    raise self._another(str(error)) from error
                last = fault
        raise OrchestratorError(
            "the Prefect server does not answer" + (f": {last}" if str(last) else ""),
            place=self.place,
            fix=f"start it (grpo up, or prefect server start), or {self.fix}: flows then use a temporary one",
        ) from last

    def _another(self, why: str) -> OrchestratorError:
        return OrchestratorError(
            f"the server at this address is not Prefect's API: {why}",
            place=self.place,
            fix=f"PREFECT_API_URL=http://HOST:PORT/api, or {self.fix}: flows then use a temporary one",
        )


def configured_server() -> PrefectServer | None:
    """The server that Prefect would use; None where it starts a temporary one."""
    url = get_current_settings().api.url
    if url is None:
        return None
    profile = get_settings_context().profile
    if "PREFECT_API_URL" not in os.environ and "PREFECT_API_URL" in profile.to_environment_variables():
        return PrefectServer(url, f"PREFECT_API_URL of the profile {profile.name}: {url}", "export PREFECT_PROFILE=ephemeral")
    return PrefectServer(url, f"PREFECT_API_URL={url}", "unset PREFECT_API_URL")


def _of_httpx(error: BaseException) -> Exception | None:
    """What went wrong with the request: Prefect's client wraps it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, httpx.HTTPError | httpx.InvalidURL | ValueError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None

"""JSON requests to servers, their failures sorted by what the pool does about them.

no connection, connection lost, status 5xx     ServerGoneError    the server is examined, and restarted if necessary
no answer in time, status 429 or 503           ServerBusyError    it gets fewer requests at once
any other status                               RolloutError       the request is wrong; no other server would take it
"""

from collections.abc import Callable, Mapping
from typing import Any

import httpx
import tenacity

from schemas.errors import RolloutError, ServerBusyError, ServerGoneError

BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
CHECK_TIMEOUT_S = 10.0


class Client:
    """Asks servers; several threads may share it.

    Args:
        headers: sent with every request.
        timeout_s: time limit of one request in seconds.
        retries: how often a request is repeated when there is no connection.
    """

    def __init__(self, headers: Mapping[str, str], *, timeout_s: float, retries: int) -> None:
        self._retries = retries
        self._client = httpx.Client(
            headers=dict(headers),
            timeout=httpx.Timeout(timeout_s, connect=CHECK_TIMEOUT_S),
            # The pool limits the requests of each server.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    def post(self, address: str, path: str, body: Mapping[str, Any], *, repeat: bool = True) -> Any:
        """The answer to a request; see `send`."""
        return self.send("POST", address, path, lambda: {"json": body}, repeat=repeat)

    def send(self, method: str, address: str, path: str, content: Callable[[], dict[str, Any]], *, repeat: bool = True) -> Any:
        """The answer to a request.

        Args:
            method: of HTTP.
            address: of the server.
            path: on the server.
            content: makes the arguments `json`, `content` and `headers` of httpx, anew for each attempt.
            repeat: whether a request that found no connection is sent again.

        Raises:
            ServerGoneError: the server does not answer, or failed; ServerBusyError if it has too much to do.
            RolloutError: it refuses the request.
        """
        try:
            for attempt in tenacity.Retrying(
                retry=tenacity.retry_if_exception_type((httpx.NetworkError, httpx.RemoteProtocolError)),
                stop=tenacity.stop_after_attempt(self._retries + 1 if repeat else 1),
                wait=tenacity.wait_exponential(0.2, max=5.0),
                reraise=True,
            ):
                with attempt:
                    answer = self._client.request(method, f"{address}{path}", **content())
        except httpx.TransportError as error:
            # A server that did not even accept the connection in time is gone.
            slow = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
            kind = ServerBusyError if slow else ServerGoneError
            raise kind(f"no answer to {path}: {error!r}", place=address, fix="see the server's log, vllm.log") from error
        if answer.status_code in BUSY:
            raise ServerBusyError(f"{path} failed ({answer.status_code}): {answer.text[:500]}", place=address)
        if answer.is_server_error:
            raise ServerGoneError(f"{path} failed ({answer.status_code}): {answer.text[:500]}", place=address)
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise UnknownError(f"{path} was refused (404): {answer.text[:500]}", place=address)
        if answer.status_code != httpx.codes.OK:
            raise RolloutError(f"{path} was refused ({answer.status_code}): {answer.text[:500]}", place=address)
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text

    def healthy(self, address: str) -> bool:
        """True if the server says that it is."""
        try:
            return self._client.get(f"{address}/health", timeout=CHECK_TIMEOUT_S).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def models(self, address: str) -> set[str]:
        """Names of the models and adapters that the server has; empty if it does not say."""
        try:
            answer = self._client.get(f"{address}/v1/models", timeout=CHECK_TIMEOUT_S)
            return {model["id"] for model in answer.json()["data"]} if answer.is_success else set()
        except (httpx.TransportError, ValueError, KeyError):
            return set()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class UnknownError(RolloutError):
    """The server does not know the path or the model of a request."""

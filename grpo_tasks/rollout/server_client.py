"""JSON requests to servers, and weights for a server that does not see the trainer's files (`grpo weights-server` next to it).

no answer, status 5xx     ServerGoneError    the server is examined, and restarted if necessary
status 429 or 503         ServerBusyError    it rests
any other status          RolloutError       the request is wrong; no other server would take it
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import tenacity

from grpo_tasks.content.hashes import file_sha256
from schemas.errors import RolloutError, ServerBusyError, ServerGoneError

BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
CHECK_TIMEOUT_S = 10.0
CHUNK = 1 << 20


class UnknownError(RolloutError):
    """The server does not know the path or the model of a request."""


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
            slow = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
            fix = "see the server's log, vllm.log"
            fix += "; or raise rollout.vllm.request_timeout_s, or lower rollout.vllm.concurrency" * slow
            raise ServerGoneError(f"no answer to {path}: {error!r}", place=address, fix=fix) from error
        if answer.status_code == httpx.codes.OK:
            return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
        kind, what = RolloutError, "was refused"
        if answer.status_code in BUSY or answer.is_server_error:
            kind, what = ServerBusyError if answer.status_code in BUSY else ServerGoneError, "failed"
        elif answer.status_code == httpx.codes.NOT_FOUND:
            kind = UnknownError
        raise kind(f"{path} {what} ({answer.status_code}): {answer.text[:500]}", place=address)

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


def deliver(client: Client, receiver: str, name: str, folder: Path) -> str:
    """Send the files of a folder, without those of folders in it; each is checked by its hash where it arrives.

    Args:
        client: asks the receiver.
        receiver: address of the `grpo weights-server`.
        name: of these weights, unlike that of any others.
        folder: with the files.

    Returns:
        Where the vLLM server finds them.

    Raises:
        ServerGoneError: the receiver does not answer, its disk is full, or a file arrived damaged.
        RolloutError: the receiver refuses them.
    """
    hashes = {file.name: file_sha256(file) for file in sorted(folder.iterdir()) if file.is_file()}
    for file, sha256 in hashes.items():
        headers = {"X-SHA256": sha256, "Content-Length": str((folder / file).stat().st_size)}

        def content(path: Path = folder / file, headers: dict[str, str] = headers) -> dict[str, Any]:
            return {"content": _chunks(path), "headers": headers}

        client.send("PUT", receiver, f"/weights/{name}/{file}", content)
    return str(client.post(receiver, f"/weights/{name}", {"files": hashes})["path"])


def withdraw(client: Client, receiver: str, name: str) -> None:
    """Delete weights that the server has unloaded.

    Raises:
        ServerGoneError: the receiver does not answer.
    """
    client.send("DELETE", receiver, f"/weights/{name}", dict)


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            yield chunk

"""Refuses requests that other web pages send to a server on this machine, and requests without the key on a network.

A browser sends what any page asks it to send, "simple" POSTs without asking the server first. CORS headers only decide whether
the page may read the answer. So the server checks what the browser says about a request: Host (a foreign name means DNS
rebinding), Origin (the page that sent it), and without an Origin Sec-Fetch-Site (whether that page belongs to the same site).

Programs send neither Origin nor Sec-Fetch-Site. This is no authentication: every program on this machine is accepted. vLLM itself
asks for its key on some paths only, and those that load weights are not among them. Standard library only: vLLM loads this file
in an environment of its own.
"""

import base64
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from secrets import compare_digest
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
ALLOWED_HOSTS = "GRPO_ALLOWED_HOSTS"
"""Environment variable: further host names (`name` or `name:port`, separated by commas) that the servers answer to."""
KEY = "VLLM_API_KEY"
"""Environment variable with the key."""
OPEN = "/health"
"""The path that says whether the server runs; it needs no key."""
NO_KEY = f"The key is missing or wrong; it is read from {KEY}"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_ADDRESS = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@/\[\]]+)(?::([0-9]+))?")


class SameOrigin:
    """ASGI middleware: 403 for requests from other pages, or to a host name that is neither loopback nor one of `hosts`.

    `hosts` are by default those of GRPO_ALLOWED_HOSTS.
    """

    def __init__(self, app: App, hosts: Iterable[str] | None = None) -> None:
        self.app = app
        self.hosts = {*LOOPBACK, *(further_hosts() if hosts is None else hosts)}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer 403, or pass the request to the app."""
        reason = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if reason is None:
            await self.app(scope, receive, send)
        else:
            await _refuse(scope, send, 403, reason, (b"x-content-type-options", b"nosniff"))

    def _refusal(self, scope: Mapping[str, Any]) -> str | None:
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        host, *more = headers.get("host", [""])
        if more or not self._is_ours(host):
            return f"This server does not answer to that host name; to allow it: {ALLOWED_HOSTS}=NAME"
        origins = headers.get("origin", [])
        if origins:
            # A page opened as localhost:4200 may call 127.0.0.1:4200. But another port is another server.
            pages = [origin.partition("://")[2].lower() for origin in origins]
            foreign = not all(self._is_ours(page) and _port(page) == _port(host) for page in pages)
        else:
            elsewhere = headers.get("sec-fetch-site", ["none"])[0] in ("cross-site", "same-site")
            foreign = elsewhere and not _follows_link(scope, headers)
        return "Other web pages cannot use this server" if foreign else None

    def _is_ours(self, address: str) -> bool:
        found = _ADDRESS.fullmatch(address.lower())
        return found is not None and (found[0] in self.hosts or found[1] in self.hosts)


class BearerKey:
    """ASGI middleware: 401 for requests without `key` (default: VLLM_API_KEY). Where no key is set it refuses all of them."""

    def __init__(self, app: App, key: str | None = None) -> None:
        key = os.environ.get(KEY, "") if key is None else key
        self.app, self._wanted = app, f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request to the app."""
        may_pass = scope["type"] not in ("http", "websocket") or scope["path"] == OPEN
        if not may_pass and self._wanted is not None:
            given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
            # In constant time: the time of an answer must not say how much of a guess is right.
            may_pass = len(given) == 1 and compare_digest(given[0], self._wanted)
        if may_pass:
            await self.app(scope, receive, send)
        else:
            await _refuse(scope, send, 401, NO_KEY, (b"www-authenticate", b"Bearer"))


def has_password(scope: Mapping[str, Any], password: str | None) -> bool:
    """Whether an HTTP request carries the password (`user:password`), as Prefect's API demands it; without one, every request."""
    if not password:
        return True
    wanted = b"Basic " + base64.b64encode(password.encode())
    return any(name.lower() == b"authorization" and compare_digest(value, wanted) for name, value in scope["headers"])


async def _refuse(scope: Message, send: Send, status: int, reason: str, header: tuple[bytes, bytes]) -> None:
    if scope["type"] == "websocket":
        # Closing it before it is accepted makes the ASGI server answer 403.
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
        return
    head = [(b"content-type", b"text/plain; charset=utf-8"), header]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": f"{reason}\n".encode()})


def further_hosts() -> list[str]:
    """The names in GRPO_ALLOWED_HOSTS."""
    return [name.strip().lower() for name in os.environ.get(ALLOWED_HOSTS, "").split(",") if name.strip()]


def _port(address: str) -> str:
    found = _ADDRESS.fullmatch(address.lower())
    return (found[2] or "") if found else ""


def _follows_link(scope: Mapping[str, Any], headers: Mapping[str, list[str]]) -> bool:
    """Whether a person followed a link to a page of the server. The page with the link cannot read what the server answers."""
    opened = headers.get("sec-fetch-mode") == ["navigate"] and headers.get("sec-fetch-dest") == ["document"]
    return opened and scope.get("method") in ("GET", "HEAD")

"""Refuses requests without the key, for servers that other machines reach.

    BearerKey(app)   ->  app answers /health to everybody, and all else to who sends `Authorization: Bearer KEY`

vLLM itself asks for its key on some paths only, and the paths that load weights are not among them. Only the standard library is
used, so that a server in another environment can load this file.
"""

import base64
import hmac
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from secrets import compare_digest
from typing import Any

KEY = "VLLM_API_KEY"
"""Environment variable with the key."""
OPEN = "/health"
"""The path that says whether the server runs; it needs no key."""
REASON = f"The key is missing or wrong; it is read from {KEY}"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class BearerKey:
    """ASGI middleware that answers 401 to requests without the key. Where no key is set it refuses all of them."""

    def __init__(self, app: App, key: str | None = None) -> None:
        """Wrap `app`; without `key` the one of VLLM_API_KEY is asked for."""
        key = os.environ.get(KEY, "") if key is None else key
        self.app, self._wanted = app, f"Bearer {key}".encode() if key else None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request to the app."""
        if scope["type"] not in ("http", "websocket") or scope["path"] == OPEN or self._has_key(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": REASON})
        else:
            head = [(b"content-type", b"text/plain; charset=utf-8"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": head})
            await send({"type": "http.response.body", "body": f"{REASON}\n".encode()})

    def _has_key(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        # In constant time: the time of an answer must not say how much of a guess is right.
        return self._wanted is not None and len(given) == 1 and hmac.compare_digest(given[0], self._wanted)


def is_allowed(scope: Mapping[str, Any], password: str | None) -> bool:
    """Whether an HTTP request carries the password (`user:password`), as Prefect's API demands it; without one, every request."""
    if not password:
        return True
    wanted = b"Basic " + base64.b64encode(password.encode())
    return any(name.lower() == b"authorization" and compare_digest(value, wanted) for name, value in scope["headers"])

"""Serves the live pages of stages below /live/, in front of another server's pages. It reads one folder and writes nothing.

    LivePages(app)   ->  GET /live/NAME.html is a file of the folder GRPO_LIVE; every other request goes to app

`grpo up` sets GRPO_LIVE for its Prefect server and its workers. Where it is not set there are no such pages, and no link to them.
"""

import re

from grpo_tasks.content.live_folder import live_folder
from grpo_tasks.web.password import is_allowed
from grpo_tasks.web.same_origin import App, Message, Receive, Send

_NAME = re.compile(r"/live/([0-9a-f]{8,64}\.html)")
_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    # The pages have no scripts; whatever text of a model or a user they show must not become one.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
}


class LivePages:
    """ASGI middleware: see the module."""

    def __init__(self, app: App, password: str | None = None) -> None:
        """Wrap `app`. With a password (`user:password`) a browser has to give it, as Prefect's API demands it."""
        self.app, self._password = app, password

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer with a page, or pass the request to the app."""
        found = _NAME.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") else None
        folder = live_folder()
        if found is None or folder is None:
            await self.app(scope, receive, send)
            return
        status, page = 200, b""
        if not is_allowed(scope, self._password):
            status, page = 401, b"password required\n"
        else:
            try:
                page = (folder / found[1]).read_bytes()
            except OSError:
                status, page = 404, b"no such stage\n"
        headers = _HEADERS | ({"www-authenticate": 'Basic realm="grpo"'} if status == 401 else {})
        head = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else page})

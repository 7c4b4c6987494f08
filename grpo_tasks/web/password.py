"""The password of a server, checked in front of it: for pages and answers that are not the server's own."""

import base64
from collections.abc import Mapping
from secrets import compare_digest
from typing import Any


def is_allowed(scope: Mapping[str, Any], password: str | None) -> bool:
    """Whether an HTTP request carries the password (`user:password`), as Prefect's API demands it; without one, every request."""
    if not password:
        return True
    wanted = b"Basic " + base64.b64encode(password.encode())
    return any(name.lower() == b"authorization" and compare_digest(value, wanted) for name, value in scope["headers"])

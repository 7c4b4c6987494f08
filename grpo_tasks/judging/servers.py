"""The addresses of a judge: which one gets the next request, and what happens to one that fails.

The least loaded address that is not resting gets a request. One that fails rests for REST_S, and then one request tries it again.
When all of them rest, they are asked all the same: whether the judge is away is decided by client.py.
"""

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

REST_S = 10.0
"""How long an address that failed is left out while others answer."""


@dataclass(slots=True)
class JudgeAddress:
    """One address."""

    address: str
    """Up to and including /v1."""
    in_flight: int = 0
    sent: int = 0
    """Requests so far."""
    failing: bool = False
    rests_until: float = 0.0


class JudgeAddresses:
    """The addresses of a judge; safe for threads."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._servers = [JudgeAddress(address.rstrip("/")) for address in dict.fromkeys(addresses)]

    def __len__(self) -> int:
        return len(self._servers)

    @contextmanager
    def taken(self, tried: Collection[str]) -> Iterator[JudgeAddress]:
        """The address for a request, as long as the request takes.

        Args:
            tried: addresses that have failed for this request; they come last.
        """
        with self._lock:
            now = time.monotonic()
            server = min(self._servers, key=lambda one: (one.address in tried, one.rests_until > now, one.in_flight, one.sent))
            server.in_flight += 1
            server.sent += 1
            if server.failing:
                # Others do not try it until this request knows more.
                server.rests_until = now + REST_S
        try:
            yield server
        finally:
            with self._lock:
                server.in_flight -= 1

    def answered(self, server: JudgeAddress) -> None:
        """It has answered."""
        with self._lock:
            server.failing, server.rests_until = False, 0.0

    def failed(self, server: JudgeAddress, told_s: float) -> None:
        """It has not answered, or asks for a pause of `told_s` seconds."""
        with self._lock:
            server.failing, server.rests_until = True, time.monotonic() + max(REST_S, told_s)

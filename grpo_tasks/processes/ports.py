"""Free ports of this machine."""

import socket
from contextlib import ExitStack

HOST = "127.0.0.1"


def free_port(host: str = HOST) -> int:
    """A port of an address of this machine that is free now; another process may take it before the caller does."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = HOST) -> list[int]:
    """As many different free ports of an address."""
    with ExitStack() as stack:
        # All are open at once: a port that was closed again could be given a second time.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]

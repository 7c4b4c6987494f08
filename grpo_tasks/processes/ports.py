"""Free ports of this machine."""

import socket
from contextlib import ExitStack

HOST = "127.0.0.1"


def free_port() -> int:
    """A port of the loopback address that is free now; another process may take it before the caller does."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """As many different free ports."""
    with ExitStack() as stack:
        # All are open at once: a port that was closed again could be given a second time.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]

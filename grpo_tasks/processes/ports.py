"""Ports of this machine that nobody listens on."""

import socket

HOST = "127.0.0.1"


def free_port() -> int:
    """Some port on the loopback address; somebody else may still be quicker to take it."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port

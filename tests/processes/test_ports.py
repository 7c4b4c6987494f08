"""Free ports are different ones, and free."""

import socket

from grpo_tasks.processes.ports import HOST, free_port, free_ports


def test_free_ports_are_different_and_can_be_listened_on():
    ports = [*free_ports(20), free_port()]
    assert len(set(ports[:20])) == 20
    for port in ports:
        with socket.create_server((HOST, port)):
            pass


def test_a_port_in_use_is_not_given():
    with socket.create_server((HOST, 0)) as server:
        assert server.getsockname()[1] not in free_ports(50)

"""The actor of a rollout server, called in this process: what it starts again, and what it gives up."""

import socket
import time

import httpx
import pytest

from schemas.errors import RolloutError
from tests.rollout.conftest import small  # noqa: F401 - a fixture
from tests.rollout.servers import served
from tests.rollout.small_servers import kill, small_config

pytest.importorskip("ray")

from grpo_tasks.cluster import server_node
from grpo_tasks.cluster.server_node import ServerNode

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.timeout(300)]


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "planted")
    # Not the loopback address that everything else uses: what is probed there says nothing about this one.
    monkeypatch.setattr(server_node, "get_node_ip_address", lambda: "127.0.0.2")
    made = ServerNode("planted")
    yield made
    for process in (made._receiver, made._server):
        if process is not None:
            process.kill() if process is made._receiver else process.end()
    if made._receiver is not None:
        made._receiver.wait()


def start(node, **settings):
    return node.start((), "embedded:base", small_config(**settings), served())


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def answers(address):
    try:
        return httpx.get(f"{address}/weights", headers={"Authorization": "Bearer planted"}).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.long
@pytest.mark.ci
def test_what_ends_is_started_again_and_reported(node, monkeypatch):
    address = start(node)
    until(lambda: answers(address.weights_url))
    assert httpx.get(f"{address.weights_url}/weights").status_code == 401
    assert node.tend() == ""
    monkeypatch.setattr(server_node, "SETTLED_S", 0.0)
    node._receiver.kill()
    node._receiver.wait()
    kill(node._server)
    until(lambda: not node._server.runs)
    said = node.tend()
    assert "the receiver of weights ended with exit code -9 and is started again" in said
    assert f"the rollout server at {address.url} ended and is started again" in said
    until(lambda: answers(address.weights_url) and node.tend() == "" and node._server.runs)
    # The next end comes at once: the driver has to start another server.
    monkeypatch.setattr(server_node, "SETTLED_S", 60.0)
    node._receiver.kill()
    node._receiver.wait()
    with pytest.raises(RolloutError, match="the receiver of weights ended with exit code -9"):
        node.tend()


@pytest.mark.long
def test_a_server_that_cannot_be_started_again_is_given_up(node):
    start(node, start_timeout_s=60.0)
    # Somebody deletes the environment.
    node._server._config = node._server._config.model_copy(update={"python": "/nowhere/python"})
    kill(node._server)
    until(lambda: not node._server.runs)
    assert "ended and is started again" in node.tend()
    node._restart.join(120)
    for _ in range(2):
        with pytest.raises(RolloutError, match="cannot be started again"):
            node.tend()


@pytest.mark.long
def test_a_receiver_whose_port_is_taken_is_an_error_with_its_log(node, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        monkeypatch.setattr(server_node, "free_port", lambda *_: taken.getsockname()[1])
        with pytest.raises(RolloutError, match=r"the receiver of weights ended[\s\S]*in use"):
            start(node)

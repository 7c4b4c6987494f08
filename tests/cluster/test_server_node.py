"""The actor of a rollout server, called in this process: whatever ends there is an error, and the driver starts another one."""

import socket

import httpx
import pytest

from schemas.errors import RolloutError
from tests.processes.waiting import until
from tests.rollout.conftest import small  # noqa: F401 - a fixture
from tests.rollout.servers import kill, served, small_config

pytest.importorskip("ray")

from grpo_tasks.cluster import servers
from grpo_tasks.cluster.servers import ServerNode

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.timeout(300)]


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "planted")
    # Not the loopback address that everything else uses: what is probed there says nothing about this one.
    made = ServerNode("planted", "127.0.0.2")
    yield made
    made._receiver.kill()
    made._receiver.wait()
    made._server.end()


def answers(address):
    try:
        return httpx.get(f"{address}/weights", headers={"Authorization": "Bearer planted"}).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.long
@pytest.mark.ci
def test_what_ends_is_an_error_with_its_log(node):
    address = node.start(small_config(), served())
    until(lambda: answers(address.weights_url))
    assert httpx.get(f"{address.weights_url}/weights").status_code == 401
    node.check()
    kill(node._server)
    until(lambda: not node._server.runs)
    with pytest.raises(RolloutError, match=f"the server at {address.url} ended; the end of its log"):
        node.check()
    node._receiver.kill()
    node._receiver.wait()
    with pytest.raises(RolloutError, match=r"the receiver of weights on .* ended with exit code -9"):
        node.check()


@pytest.mark.long
def test_a_receiver_whose_port_is_taken_is_an_error_with_its_log(node, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        monkeypatch.setattr(servers, "free_port", lambda *_: taken.getsockname()[1])
        with pytest.raises(RolloutError, match=r"the receiver of weights on 127.0.0.2 ended[\s\S]*in use"):
            node.start(small_config(), served())

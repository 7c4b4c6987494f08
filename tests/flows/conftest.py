"""The command line in folders of its own, with a Prefect home and an MLflow store of their own."""

import os
import subprocess
import time
import urllib.request

import pytest
import yaml

from tests.flows.place import BIN, SMALL, Place
from tests.ports import free_ports


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory):
    """Address of a Prefect server that the commands of all tests here share; starting one for each command takes ten seconds."""
    [port] = free_ports(1)
    home = tmp_path_factory.mktemp("prefect")
    server = subprocess.Popen(
        [BIN / "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        env=os.environ | {"PREFECT_HOME": str(home), "PREFECT_SERVER_API_PORT": str(port)},
        stdout=(home / "log.txt").open("wb"),
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )
    api, deadline = f"http://127.0.0.1:{port}/api", time.monotonic() + 90
    while not _answers(f"{api}/health"):
        assert server.poll() is None, (home / "log.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    yield api
    server.terminate()
    server.wait(timeout=30)


def _answers(address):
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except OSError:
        return False


@pytest.fixture
def place(tmp_path, prefect_api):
    return Place(tmp_path, prefect_api)


@pytest.fixture
def lone_place(tmp_path):
    """Without any server."""
    return Place(tmp_path)


@pytest.fixture
def small(place):
    """Write the small config with changes to it; `change` takes top-level sections."""

    def write(**changes):
        return place.write("small.yaml", yaml.safe_dump(SMALL | changes))

    return write


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """`grpo run demo`, done once for the session; gives the place and what was printed."""
    place = Place(tmp_path_factory.mktemp("demo"))
    return place, place.grpo("run", "demo")

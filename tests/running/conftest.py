"""A Prefect server for the tests here."""

import os

import pytest
from prefect.logging import disable_run_logger
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.flows.place import ask, prefect_server
from tests.ports import free_ports


class Server:
    """A Prefect server that can be stopped and started again. It never expires a lease: we free a slot, or nobody does."""

    def __init__(self, home):
        [self._port] = free_ports(1)
        self._home, self.api = home, f"http://127.0.0.1:{self._port}/api"
        self.environment = os.environ | {"PREFECT_HOME": str(home), "PREFECT_API_URL": self.api}
        self.start()

    def start(self):
        self._running = prefect_server(self._home, self._port, PREFECT_SERVER_SERVICES_REPOSSESSOR_ENABLED="false")
        self._running.__enter__()

    def stop(self):
        self._running.__exit__(None, None, None)

    def held(self, slot):
        return ask(f"{self.api}/v2/concurrency_limits/{slot}")["active_slots"]


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("prefect"))
    with temporary_settings({PREFECT_API_URL: server.api}):
        yield server
    server.stop()


@pytest.fixture
def no_run_log():
    """There is no logger of a run outside of one."""
    with disable_run_logger():
        yield

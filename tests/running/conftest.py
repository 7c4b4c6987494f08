"""A Prefect server for the tests here."""

import os
import subprocess
import sys

import pytest
from prefect.logging import disable_run_logger
from prefect.settings import PREFECT_API_URL, temporary_settings

from grpo_tasks.operating.commands import prefect_command, prefect_environment
from tests.flows.place import ask
from tests.ports import free_ports


class Server:
    """A Prefect server that can be stopped and started again. It never expires a lease: we free a slot, or nobody does."""

    def __init__(self, home):
        [self._port] = free_ports(1)
        self.home, self.api = home, f"http://127.0.0.1:{self._port}/api"
        never_expires = {"PREFECT_SERVER_SERVICES_REPOSSESSOR_ENABLED": "false"}
        self.environment = os.environ | {"PREFECT_HOME": str(home), "PREFECT_API_URL": self.api} | never_expires
        self.start()

    def start(self):
        environment = self.environment | prefect_environment(self._port, None)
        with (self.home / "log.txt").open("ab") as log:
            command = [sys.executable, "-m", *prefect_command(self._port)]
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while not self._answers():
            assert self._process.poll() is None, (self.home / "log.txt").read_text()

    def stop(self):
        self._process.terminate()
        self._process.wait(timeout=60)

    def held(self, slot):
        return ask(f"{self.api}/v2/concurrency_limits/{slot}")["active_slots"]

    def _answers(self):
        try:
            return ask(f"{self.api}/health")
        except OSError:
            return False


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

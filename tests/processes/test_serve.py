"""A server and everything it starts end with the process that wanted the server, however that one ends."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from grpo_tasks.processes.serve import HOST, free_port, free_ports
from tests.processes.waiting import has_ended, until

SUPERVISED = [sys.executable, "-P", "-m", "grpo_tasks.processes.serve"]
SERVER = """
import os, subprocess, sys, time
from pathlib import Path
helper = subprocess.Popen(["sleep", "600"])
part = Path(sys.argv[1] + ".part")
part.write_text(f"{os.getpid()} {helper.pid} {os.environ['VLLM_RPC_BASE_PATH']}")
part.rename(sys.argv[1])
time.sleep(float(sys.argv[2]))
"""
CALLER = f"""
import os, subprocess, sys
subprocess.run({SUPERVISED!r} + sys.argv[1:], env=os.environ | {{"GRPO_PARENT_PID": str(os.getpid())}}, start_new_session=True)
"""


@pytest.fixture
def server(tmp_path):
    """Command of a server that runs so many seconds and writes down its processes."""
    return lambda seconds: [sys.executable, "-S", "-c", SERVER, str(tmp_path / "started"), str(seconds)]


@pytest.fixture
def started(tmp_path):
    """Wait for the server; its pid, the pid of the process it started, and its folder of sockets."""

    def wait():
        until((tmp_path / "started").exists)
        server, helper, sockets = (tmp_path / "started").read_text().split()
        assert Path(sockets).is_dir()
        return int(server), int(helper), Path(sockets)

    return wait


def assert_nothing_left(server, helper, sockets):
    until(lambda: has_ended(server) and has_ended(helper) and not sockets.exists())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_to_the_supervisor_ends_everything(server, started, number):
    supervisor = subprocess.Popen([*SUPERVISED, *server(600)], start_new_session=True)
    everything = started()
    supervisor.send_signal(number)
    supervisor.wait()
    assert_nothing_left(*everything)


def test_the_end_of_the_server_ends_what_it_has_started(server, started):
    supervisor = subprocess.Popen([*SUPERVISED, *server(0.5)], start_new_session=True)
    everything = started()
    supervisor.wait()
    assert_nothing_left(*everything)


def test_a_killed_caller_takes_everything_with_it(server, started):
    caller = subprocess.Popen([sys.executable, "-c", CALLER, *server(600)])
    everything = started()
    supervisors = [child.pid for child in psutil.Process(caller.pid).children()]
    caller.kill()
    caller.wait()
    assert_nothing_left(*everything)
    until(lambda: all(map(has_ended, supervisors)))


def test_free_ports_are_different_and_can_be_listened_on():
    with socket.create_server((HOST, 0)) as server:
        ports = [*free_ports(20), free_port()]
        assert server.getsockname()[1] not in ports
    assert len(set(ports[:20])) == 20
    for port in ports:
        with socket.create_server((HOST, port)):
            pass

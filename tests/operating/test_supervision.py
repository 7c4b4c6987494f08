"""A process of a stack that ends is started again, without the stack's servers. With them: test_servers.py."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

from grpo_tasks.operating import servers
from grpo_tasks.operating.servers import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MLFLOW,
    PREFECT,
    Addresses,
    Restarts,
    Stack,
    _end_leftovers,
    rotate_logs,
    supervise,
)
from grpo_tasks.processes.lifetime import ProcessIdentity
from schemas.errors import UserError
from tests.processes.waiting import has_ended, until


@pytest.fixture
def stack(tmp_path):
    """The record of a stack whose only worker has ended. There is no server, so a worker that is started keeps asking."""
    (tmp_path / ".grpo").mkdir()
    (tmp_path / ".grpo" / "addresses.json").write_text(
        json.dumps({"prefect": "http://127.0.0.1:9", "mlflow": "http://127.0.0.1:9"})
    )
    record(tmp_path, worker_1=ProcessIdentity(2**22 - 1, 1.0))
    stack = Stack(tmp_path)
    yield stack
    stack.stop()


def record(folder, **processes):
    """Processes in stack.json, by their names with underscores."""
    entries = [{"name": name.replace("_", " "), "pid": each.pid, "born": each.born} for name, each in processes.items()]
    (folder / ".grpo" / "stack.json").write_text(json.dumps(entries))


def recorded_pid(folder, name="worker 1"):
    [found] = [each for each in json.loads((folder / ".grpo" / "stack.json").read_text()) if each["name"] == name]
    return found["pid"]


def test_a_killed_background_process_restarts_until_the_stack_stops(stack, tmp_path):
    supervisor = subprocess.Popen([sys.executable, "-m", "grpo_tasks.operating.servers", str(tmp_path)])
    try:
        until(stack.running)
        first = recorded_pid(tmp_path)
        assert "worker start" in " ".join(psutil.Process(first).cmdline())
        os.kill(first, signal.SIGKILL)
        until(lambda: recorded_pid(tmp_path) != first and stack.running())
        second = psutil.Process(recorded_pid(tmp_path))
        assert stack.stop() == ["worker 1"]
        assert supervisor.wait(60) == 0
        assert has_ended(second.pid)
    finally:
        supervisor.kill()
        supervisor.wait()


def test_in_the_foreground_too_and_grpo_down_of_another_terminal_ends_it(stack, tmp_path):
    rounds = 0

    def stop_after_the_restart():
        nonlocal rounds
        rounds += 1
        if stack.running():
            Stack(tmp_path).stop()
        return rounds > 100

    supervise(stack, None, stop_requested=stop_after_the_restart)
    assert rounds < 100
    assert stack.ended() is None


def test_nothing_is_started_that_runs_or_whose_stack_was_stopped(stack, tmp_path):
    record(tmp_path, worker_1=ProcessIdentity.of())
    assert stack.ended() == []
    assert stack.restart("worker 1", None) is False
    record(tmp_path)
    stack.stop()
    assert stack.restart("worker 1", None) is False


def test_another_folders_server_on_the_port_is_not_ours(tmp_path, monkeypatch):
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    other = HTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    ours = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(servers, "START_LIMIT_S", 2.0)
    (tmp_path / ".grpo").mkdir()
    record(tmp_path, Prefect_server=ProcessIdentity.of(ours.pid))
    stack = Stack(tmp_path)
    with pytest.raises(UserError, match="the Prefect server did not answer"):
        stack._wait_for(f"http://127.0.0.1:{other.server_port}/api/health", PREFECT)
    ours.kill()
    ours.wait()
    other.shutdown()


def test_a_process_that_ends_at_once_is_started_less_and_less_often():
    restarts, now, pauses = Restarts(), 0.0, []
    for _ in range(12):
        start = now
        while not restarts.due("worker 1", now):
            now += 0.5
        pauses.append(now - start)
        restarts.started("worker 1", now)
    assert pauses[:4] == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert max(pauses) == LONGEST_PAUSE_S
    assert restarts.due("worker 2", now), "each process has a pause of its own"
    restarts.started("worker 1", now + 10 * LONGEST_PAUSE_S)
    assert restarts.due("worker 1", now + 10 * LONGEST_PAUSE_S + FIRST_PAUSE_S)


def test_a_killed_servers_remains_end_and_a_workers_continue(tmp_path):
    child = "subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL).pid"
    script = f"import subprocess, time; print({child}, flush=True); time.sleep(300)"
    for name, stays in ((MLFLOW, False), ("worker 1", True)):
        leader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
        child = psutil.Process(int(leader.stdout.readline()))
        server = ProcessIdentity.of(leader.pid)
        leader.kill()
        leader.wait()
        _end_leftovers(name, server)
        if stays:
            assert child.is_running()
            child.kill()
        else:
            until(lambda child=child: has_ended(child.pid))


@pytest.fixture
def sleeping(monkeypatch):
    """Servers and workers only sleep, and answer at once: what is asked is who starts them, and what is recorded."""
    sleeps = ["timeit", "-n", "1", "-r", "1", "-s", "import time", "time.sleep(300)"]
    monkeypatch.setattr(Stack, "_command", lambda *_: (sleeps, {}))
    monkeypatch.setattr(Stack, "_wait_for", lambda *_: None)
    return monkeypatch


def test_the_supervisor_reads_postgresqls_address_from_its_environment(tmp_path):
    secret = "postgresql://me:secret@db:5432"
    command, environment = Stack(tmp_path)._command(
        "supervisor", Addresses("http://127.0.0.1:1", "http://127.0.0.1:2", True), secret
    )
    assert "secret" not in " ".join(command)
    assert environment == {"GRPO_POSTGRES": secret}


def test_a_log_that_grows_is_rotated_while_its_process_writes_to_it(tmp_path):
    log = tmp_path / "worker-1.log"
    writer = "import sys, time\nwhile True:\n    print('x' * 999, flush=True)\n    time.sleep(0.001)"
    with log.open("ab") as output:
        process = subprocess.Popen([sys.executable, "-c", writer], stdout=output)
    try:
        for _ in range(2):
            until(lambda: log.stat().st_size > 20_000)
            assert rotate_logs(tmp_path, most_bytes=20_000) == [log]
        until(lambda: log.stat().st_size > 0)
        assert log.read_bytes().startswith(b"x"), "no hole where the rotated lines were"
        assert (tmp_path / "worker-1.log.1").stat().st_size > 20_000
    finally:
        process.kill()
        process.wait()
    assert rotate_logs(tmp_path, most_bytes=10**9) == []


def test_a_port_that_another_program_uses_is_said(tmp_path):
    said = []
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        port = Stack(tmp_path, report=said.append)._port_for(MLFLOW, taken)
    assert port > taken
    assert said == [f"port {taken} is in use by another program; the MLflow server uses {port}"]


def test_of_two_simultaneous_stack_starts_one_starts_it(tmp_path, sleeping):
    # Between the question whether something runs and the record of what was started, whoever is not excluded is let in.
    sleeping.setattr(Stack, "_port_for", lambda _, __, wanted: time.sleep(0.5) or wanted)
    sleeping.setattr(Stack, "_deploy", lambda *_: time.sleep(1))
    stacks, refusals = [Stack(tmp_path), Stack(tmp_path)], []

    def start(stack):
        try:
            stack.start(1, 2, postgres=None, deploy_file=tmp_path)
        except UserError as refused:
            refusals.append(refused.message)

    threads = [threading.Thread(target=start, args=(stack,)) for stack in stacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    spawned = {process.pid for stack in stacks for process in stack._spawned}
    try:
        assert len(refusals) == 1
        assert refusals[0].startswith("a stack runs here already")
        entries = json.loads((tmp_path / ".grpo" / "stack.json").read_text())
        assert [each["name"] for each in entries] == [PREFECT, MLFLOW, "worker 1", "supervisor"]
        assert {each["pid"] for each in entries} == spawned, "grpo down stops what is recorded"
    finally:
        for stack in stacks:
            for process in stack._spawned:
                process.kill()
                process.wait()


def test_a_stack_that_is_stopped_while_it_starts_gets_no_worker(tmp_path, sleeping):
    sleeping.setattr(Stack, "_deploy", lambda *_: Stack(tmp_path).stop())
    stack = Stack(tmp_path)
    with pytest.raises(UserError, match="grpo down has stopped the servers"):
        stack.start(40_001, 40_101, postgres=None, deploy_file=tmp_path)
    assert [process.wait(10) is not None for process in stack._spawned] == [True, True]
    assert stack.running() == []


def test_a_start_that_was_killed_is_completed_by_the_next_one(tmp_path, sleeping):
    said, deployed = [], []
    sleeping.setattr(Stack, "_deploy", lambda *_: deployed.append("deployments"))
    prefect = subprocess.Popen(["sleep", "60"])
    (tmp_path / ".grpo").mkdir()
    record(tmp_path, Prefect_server=ProcessIdentity.of(prefect.pid))
    at = {"prefect": "http://127.0.0.1:40001", "mlflow": "http://127.0.0.1:40101"}
    (tmp_path / ".grpo" / "addresses.json").write_text(json.dumps(at))
    (tmp_path / ".grpo" / "starting.json").write_text(json.dumps({"pid": 2**22 - 1, "born": 1.0}))
    stack = Stack(tmp_path, report=said.append)
    try:
        assert stack.start(1, 2, postgres=None, deploy_file=tmp_path).mlflow == at["mlflow"]
        assert "an earlier start was interrupted; completing it" in said
        assert stack.running() == [PREFECT, MLFLOW, "worker 1", "supervisor"]
        assert deployed == ["deployments"]
        with pytest.raises(UserError, match="a stack runs here already"):
            stack.start(1, 2, postgres=None, deploy_file=tmp_path)
    finally:
        stack.stop()
        prefect.wait()

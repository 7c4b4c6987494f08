"""What a reward function leaves behind or uses up: memory, processes, output. Its supervisor limits and cleans up all of it."""

import os
import re
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.processes.worker_supervisor import MAX_BYTES, MAX_LINES, Output
from grpo_tasks.rewards.contract import FunctionScores, RewardFault
from grpo_tasks.rewards.worker import RewardWorker
from tests.processes.waiting import has_ended, until
from tests.rewards.processes import server_process

FUNCTIONS = """
    import ctypes, logging, os, subprocess, sys, threading, time, warnings

    def texts(completions):
        return [chat[0]["content"] for chat in completions]

    def greedy(prompts, completions, **columns):
        if "all" in texts(completions):
            kept = []
            while True:
                kept.append(bytearray(os.urandom(1000)) * 20_000)
        return [1.0] * len(completions)

    def greedy_child(prompts, completions, **columns):
        if "all" in texts(completions):
            source = "import time; kept = bytearray(b'x') * 600_000_000; time.sleep(600)"
            subprocess.run([sys.executable, "-c", source])
        return [1.0] * len(completions)

    def greedy_later(prompts, completions, **columns):
        def fill():
            time.sleep(0.2)
            sys.kept = bytearray(b"x") * 600_000_000
        threading.Thread(target=fill).start()
        return [1.0] * len(completions)

    def shares(prompts, completions, **columns):
        kept = bytearray(b"x") * 150_000_000
        for _ in range(4):
            if os.fork() == 0:
                while True:
                    time.sleep(60)
        time.sleep(0.5)
        return [1.0] * len(completions)

    def detaches(prompts, completions, **columns):
        ready, done = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(done, str(os.getpid()).encode())
                os.close(done)
                while True:
                    time.sleep(60)
            os._exit(0)
        os.wait()
        pid = float(os.read(ready, 100))
        if "die" in texts(completions):
            print(int(pid), flush=True)
            os._exit(3)
        return [pid] * len(completions)

    def prints(prompts, completions, **columns):
        print("by print")
        sys.stdout.write("by write\\n")
        os.write(1, b"by descriptor 1\\n")
        os.write(2, b"by descriptor 2\\n")
        ctypes.CDLL(None).puts(b"by C")
        subprocess.run(["echo", "by a subprocess"])
        logging.warning("by logging")
        warnings.warn("by warnings")
        return [1.0] * len(completions)

    def chatty(prompts, completions, **columns):
        sys.stdout.write("".join(f"line {number}\\n" for number in range(1_001_208)))
        return [1.0] * len(completions)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "greedy_child"])
def test_a_function_that_takes_too_much_memory_is_named_with_the_limit(worker_of, make_batch, name):
    worker = worker_of(name, memory_limit_gb=0.4)
    outcome = worker.call(name, make_batch("fine", "all"), 60.0)
    assert isinstance(outcome, RewardFault)
    assert (outcome.kind, "used more than 0.4 GB of memory" in outcome.detail) == ("died", True)
    assert "rewards.memory_limit_gb" in outcome.fix
    assert isinstance(worker.call(name, make_batch("fine"), 30.0), FunctionScores)


@pytest.mark.slow
def test_the_row_that_takes_the_memory_is_found(worker_of, make_batch):
    worker = worker_of("greedy", memory_limit_gb=0.4)
    assert worker.find_failing_completion("greedy", make_batch("fine", "fine", "all", "fine"), 60.0) == 2


@pytest.mark.slow
def test_memory_is_limited_between_calls_too(worker_of, make_batch):
    worker = worker_of("greedy_later", memory_limit_gb=0.4)
    server = server_process(worker)
    assert isinstance(worker.call("greedy_later", make_batch("a"), 30.0), FunctionScores)
    until(lambda: has_ended(server.pid))


def test_memory_that_processes_share_counts_once(worker_of, make_batch):
    outcome = worker_of("shares", memory_limit_gb=0.5).call("shares", make_batch("a"), 30.0)
    assert isinstance(outcome, FunctionScores), outcome


def test_a_worker_never_gets_all_of_the_memory_of_the_machine(rewards_config):
    worker = RewardWorker(rewards_config().model_copy(update={"memory_limit_gb": 1e6}), ["format"])
    assert worker.limit_bytes == int(0.8 * psutil.virtual_memory().total)


def test_a_supervisor_that_does_not_end_is_killed_with_everything_below_it(worker_of, make_batch, monkeypatch):
    monkeypatch.setattr("grpo_tasks.processes.worker_process.CLOSE_S", 0.2)
    worker = worker_of("detaches")
    left = _left_by(worker, make_batch)
    outer = psutil.Process(worker._process.pid)
    family = [outer, *outer.children(recursive=True)]
    for one in family[:2]:
        one.suspend()
    worker.close()
    for pid in (left, *(one.pid for one in family)):
        until(lambda pid=pid: has_ended(pid))


def test_a_detached_process_ends_when_the_worker_ends_or_is_closed(worker_of, make_batch, tmp_path):
    worker = worker_of("detaches")
    assert isinstance(worker.call("detaches", make_batch("die"), 30.0), RewardFault)
    assert not psutil.pid_exists(int((tmp_path / "log.txt").read_text()))
    left = _left_by(worker, make_batch)
    worker.close()
    assert not psutil.pid_exists(left)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["grpo_tasks.rewards.serve", "outer supervisor", "inner supervisor"])
def test_a_detached_process_ends_when_the_worker_or_a_supervisor_is_killed(worker_of, make_batch, victim):
    worker = worker_of("detaches")
    left = _left_by(worker, make_batch)
    outer = psutil.Process(worker._process.pid)
    (inner,) = outer.children()
    server = server_process(worker)
    {"outer supervisor": outer, "inner supervisor": inner}.get(victim, server).kill()
    for pid in (left, server.pid):
        until(lambda pid=pid: has_ended(pid))
    outcome = worker.call("detaches", make_batch("a"), 30.0)
    assert isinstance(outcome, RewardFault)
    assert outcome.kind == "died"
    assert isinstance(worker.call("detaches", make_batch("a"), 30.0), FunctionScores)


def test_nothing_is_left_when_the_trainer_is_killed(own_module, tmp_path):
    own_module(FUNCTIONS)
    script = """
        import os, time
        from grpo_tasks.rewards.contract import ScoreBatch
        from grpo_tasks.rewards.worker import RewardWorker
        from schemas.config.rewards import RewardsConfig
        rewards = RewardsConfig.model_validate({"functions": {"detaches": {"function": "my_rewards:detaches"}}})
        with RewardWorker(rewards, ["detaches"]) as worker:
            left = worker.call("detaches", ScoreBatch([[]], ["a"], [[1]], {}), 30.0).scores[0]
            # It holds copies of the sockets, as the workers of a data loader would.
            fork = os.fork()
            if fork:
                print(worker._process.pid, int(left), fork, flush=True)
            time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert parent.stdout is not None
    supervisor, left, fork = map(int, parent.stdout.readline().split())
    family = [one.pid for one in psutil.Process(supervisor).children(recursive=True)]
    assert left in family
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for pid in (supervisor, *family):
        until(lambda pid=pid: has_ended(pid))
    os.kill(fork, signal.SIGKILL)


def test_prints_go_to_the_log_and_not_the_terminal(worker_of, make_batch, capfd, tmp_path):
    worker = worker_of("prints")
    assert isinstance(worker.call("prints", make_batch("a"), 30.0), FunctionScores)
    worker.close()
    assert capfd.readouterr() == ("", "")
    log = (tmp_path / "log.txt").read_text()
    for how in ("print", "write", "descriptor 1", "descriptor 2", "C", "a subprocess", "logging", "warnings"):
        assert f"by {how}\n" in log


@pytest.mark.slow
def test_a_million_lines_neither_block_the_function_nor_fill_the_log(worker_of, make_batch, tmp_path):
    worker = worker_of("chatty")
    for _ in range(2):
        assert isinstance(worker.call("chatty", make_batch("a"), 60.0), FunctionScores)
    worker.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    note = f"... {1_001_208 - MAX_LINES:,} more lines printed by chatty"
    assert lines[:MAX_LINES] == [f"line {number}" for number in range(MAX_LINES)]
    assert [line.partition(" (")[0] for line in lines if line.startswith("...")] == [note, note]
    assert len(lines) == 2 * (MAX_LINES + 1)


@given(st.lists(st.binary(max_size=60).map(lambda data: data * 100), max_size=8))
def test_the_log_of_a_call_keeps_the_beginning_and_counts_the_rest(tmp_path_factory, parts):
    path, printed = tmp_path_factory.getbasetemp() / "cut.txt", b"".join(parts)
    with path.open("wb", buffering=0) as file:
        output = Output(file.fileno())
        output.next_call("f")
        for part in parts:
            output.feed(part)
        output.next_call("")
    kept = path.read_bytes()
    if len(printed) <= MAX_BYTES and _lines(printed) <= MAX_LINES:
        assert kept == (printed if printed.endswith(b"\n") or not printed else printed + b"\n")
        return
    note = re.search(rb"\.\.\. ([\d,]+) more lines printed by f \(([\d,]+) bytes\)\n\Z", kept)
    assert note is not None
    lines, size = (int(number.replace(b",", b"")) for number in note.groups())
    assert kept[: note.start()].removesuffix(b"\n") == printed[: len(printed) - size].removesuffix(b"\n")
    assert lines == _lines(printed[len(printed) - size :])
    assert len(kept) <= MAX_BYTES + 100
    assert _lines(kept) <= MAX_LINES + 2


def _lines(printed: bytes) -> int:
    return printed.count(b"\n") + (not printed.endswith(b"\n") and bool(printed))


def _left_by(worker, make_batch) -> int:
    outcome = worker.call("detaches", make_batch("a"), 30.0)
    assert isinstance(outcome, FunctionScores)
    left = int(outcome.scores[0] or 0)
    assert psutil.pid_exists(left)
    return left

"""Reward functions that write to the worker's socket, patch its libraries, take all memory, print without end or leave processes.

The parent never waits past the time limit, every deviation is a fault with its name, and the next call is answered.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_tasks.lab.run import run_lab
from grpo_tasks.processes.framing import HEADER, MARK, frame
from grpo_tasks.processes.link import MalformedReplyError, WorkerEndedError, WorkerLink
from grpo_tasks.rewards.contract import Fault, FunctionScores
from grpo_tasks.rewards.replies import max_bytes, read_loaded, read_scores
from grpo_tasks.rewards.supervisor import MAX_BYTES, MAX_LINES, Output
from grpo_tasks.rewards.worker import RewardWorker

FUNCTIONS = """
    import ctypes, json, logging, os, subprocess, sys, threading, time, warnings
    from multiprocessing.connection import Connection

    def texts(completions):
        return [chat[0]["content"] for chat in completions]

    def write_everywhere(data):
        for descriptor in range(3, 256):
            try:
                os.write(descriptor, data)
            except OSError:
                pass

    def good(prompts, completions, **columns):
        return [1.0] * len(completions)

    def writes(prompts, completions, **columns):
        for text in texts(completions):
            if text == "half":
                write_everywhere(b"GRPO" + (1000).to_bytes(8, "big") + b"{")
                time.sleep(600)
            if text == "huge":
                write_everywhere(b"GRPO" + (2**30).to_bytes(8, "big"))
                time.sleep(600)
            if text == "garbage":
                write_everywhere(b"hello")
            if text == "endless":
                while True:
                    write_everywhere(b"x" * 65536)
            if text == "forged":
                forged = b'{"request": "1", "values": {"scores": [9.0], "seconds": 0.0, "tokens": {}}}'
                write_everywhere(b"GRPO" + len(forged).to_bytes(8, "big") + forged)
            if text == "later":
                threading.Timer(0.2, write_everywhere, [b"GRPO"]).start()
            if text == "deaf":
                os.closerange(3, 256)
                time.sleep(600)
        return [1.0] * len(completions)

    def patches(prompts, completions, **columns):
        json.dumps = lambda *_, **__: "[]"
        json.JSONEncoder.encode = lambda *_: "[]"
        Connection.send_bytes = lambda *_: None
        os.write = lambda *_: 0
        return [1.0] * len(completions)

    def twice(prompts, completions, **columns):
        from grpo_tasks.rewards import serve
        serve.__dict__.setdefault("_kept", sys.modules["__main__"].write_frame)
        def both(descriptor, payload):
            serve._kept(descriptor, payload)
            serve._kept(descriptor, payload)
        sys.modules["__main__"].write_frame = both
        return [1.0] * len(completions)

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

LIMIT_S = 2.0


@pytest.fixture
def worker_of(own_module, rewards_config, tmp_path):
    own_module(FUNCTIONS)
    opened = []

    def make(name, **settings):
        config = rewards_config(**{name: {"function": f"my_rewards:{name}"}}).model_copy(update=settings)
        worker = RewardWorker(config, [name], log=tmp_path / "log.txt").__enter__()
        opened.append(worker)
        return worker

    yield make
    for worker in opened:
        worker.close()


WRITES = [
    ("half", "hung", "after 13 bytes of an answer"),
    ("huge", "broken", "announced an answer of 1,073,741,824 bytes"),
    ("garbage", "broken", "wrote bytes that are no answer"),
    ("endless", "broken", "wrote bytes that are no answer"),
    ("forged", "broken", "answer"),
    ("deaf", "died", "closed its socket"),
]


def test_whatever_a_function_writes_to_the_socket_is_a_named_fault_and_the_next_call_is_answered(worker_of, make_batch):
    worker = worker_of("writes")
    for text, kind, words in WRITES:
        outcome = worker.call("writes", make_batch(text), LIMIT_S if kind == "hung" else 30.0)
        assert isinstance(outcome, Fault), text
        assert (outcome.kind, words in outcome.detail) == (kind, True), outcome
        assert isinstance(worker.call("writes", make_batch("honest"), 30.0), FunctionScores)


def test_bytes_that_come_between_two_calls_are_a_fault_of_the_next_and_cost_only_that(worker_of, make_batch):
    worker = worker_of("writes")
    assert isinstance(worker.call("writes", make_batch("later"), 30.0), FunctionScores)
    _until(worker._link.stray)
    outcome = worker.call("writes", make_batch("honest"), 30.0)
    assert isinstance(outcome, Fault)
    assert "answer no request" in outcome.detail
    assert isinstance(worker.call("writes", make_batch("honest"), 30.0), FunctionScores)


def test_an_answer_given_twice_is_a_fault(worker_of, make_batch):
    worker = worker_of("twice")
    outcomes = [worker.call("twice", make_batch("a"), 30.0) for _ in range(2)]
    assert any(isinstance(outcome, Fault) and outcome.kind == "broken" for outcome in outcomes)


def test_libraries_that_a_function_patches_do_not_garble_its_answer(worker_of, make_batch):
    worker = worker_of("patches")
    for _ in range(2):
        outcome = worker.call("patches", make_batch("a"), 30.0)
        assert isinstance(outcome, FunctionScores) or "wrong shape" in outcome.detail


def test_a_worker_that_does_not_read_costs_no_more_than_the_time_limit(worker_of, make_batch):
    worker = worker_of("good")
    server = _server(worker)
    server.suspend()
    outcome = worker.call("good", make_batch("x" * 2**22), 0.5)
    assert isinstance(outcome, Fault)
    assert outcome.kind == "hung"
    assert isinstance(worker.call("good", make_batch("x" * 2**22), 30.0), FunctionScores)


# What may arrive: raw bytes, frames of any JSON, and frames of nearly the right shape.
NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSONS = st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4))
NEARLY = st.fixed_dictionaries(
    {},
    optional={
        "request": st.sampled_from(["7", "8", 7]),
        "values": st.fixed_dictionaries(
            {}, optional={"scores": st.lists(NUMBERS, max_size=3) | JSONS, "seconds": NUMBERS, "tokens": JSONS, "more": JSONS}
        ),
        "fault": st.fixed_dictionaries(
            {"kind": JSONS, "detail": JSONS}, optional={"source": JSONS, "index": JSONS, "fix": JSONS}
        ),
    },
)
PIECES = st.lists(
    st.binary(max_size=40)
    | st.builds(lambda size: HEADER.pack(MARK, size), st.integers(0, 2**64 - 1))
    | (JSONS | NEARLY).map(lambda value: frame(json.dumps(value).encode())),
    max_size=3,
)


@settings(max_examples=150)
@given(PIECES, st.booleans())
def test_arbitrary_bytes_never_hang_the_parent_and_never_raise_anything_else(pieces, closes):
    link = WorkerLink()
    data = link.far[0]
    try:
        data.sendall(b"".join(pieces))
        if closes:
            data.close()
        limit = time.monotonic() + (0.0 if not closes else 5.0)
        try:
            outcome = read_scores(link.receive(max_bytes([2, 3]), limit), "7", [2, 3])
        except (MalformedReplyError, WorkerEndedError, TimeoutError):
            return
        assert isinstance(outcome, Fault) or len(outcome.scores) == 2
    finally:
        link.close()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"request": "7"},
        {"request": "8", "values": {"scores": [1.0, 1.0], "seconds": 0.0, "tokens": {}}},
        {"request": "7", "values": {"scores": [1.0], "seconds": 0.0, "tokens": {}}},
        {"request": "7", "values": {"scores": [1.0, "1"], "seconds": 0.0, "tokens": {}}},
        {"request": "7", "values": {"scores": [1.0, True], "seconds": 0.0, "tokens": {}}},
        {"request": "7", "values": {"scores": [1.0, float("nan")], "seconds": 0.0, "tokens": {}}},
        {"request": "7", "values": {"scores": [1.0, 1.0], "seconds": float("inf"), "tokens": {}}},
        {"request": "7", "values": {"scores": [1.0, 1.0], "seconds": 0.0}},
        {"request": "7", "values": {"scores": [1.0, 1.0], "seconds": 0.0, "tokens": {"2": [1.0]}}},
        {"request": "7", "values": {"scores": [1.0, 1.0], "seconds": 0.0, "tokens": {"0": [1.0]}}},
        {"request": "7", "fault": {"kind": "hung", "detail": "", "source": "", "index": None, "fix": ""}},
        {"request": "7", "fault": {"kind": "raised", "detail": "", "source": "", "index": 2, "fix": ""}},
        {"request": "7", "fault": {"kind": "raised", "detail": "x" * 10_000, "source": "", "index": None, "fix": ""}},
        [[]],
    ],
)
def test_json_of_the_wrong_shape_is_no_answer(answer):
    with pytest.raises(MalformedReplyError):
        read_scores(json.dumps(answer).encode(), "7", [2, 3])


@pytest.mark.parametrize("answer", [{"loaded": ["other"]}, {"error": "{"}, {"error": "{}"}, {"error": "[]"}, {"loaded": 1}])
def test_a_worker_that_loaded_something_else_is_no_worker(answer):
    with pytest.raises(MalformedReplyError):
        read_loaded(json.dumps({"request": "7", **answer}).encode(), "7", ["mine"])


def test_bytes_that_trickle_in_do_not_move_the_deadline():
    link = WorkerLink()
    data, _ = link.far
    data.send(HEADER.pack(MARK, 1_000))
    stop = threading.Event()

    def trickle():
        while not stop.wait(0.01):
            data.send(b"x")

    feeder = threading.Thread(target=trickle)
    feeder.start()
    with pytest.raises(TimeoutError):
        link.receive(10_000, time.monotonic() + 0.2)
    stop.set()
    feeder.join()
    link.close()


@pytest.mark.parametrize("name", ["greedy", "greedy_child"])
def test_a_function_that_takes_too_much_memory_is_named_with_the_limit(worker_of, make_batch, name):
    worker = worker_of(name, memory_limit_gb=0.4)
    outcome = worker.call(name, make_batch("fine", "all"), 60.0)
    assert isinstance(outcome, Fault)
    assert (outcome.kind, "used more than 0.4 GB of memory" in outcome.detail) == ("died", True)
    assert "rewards.memory_limit_gb" in outcome.fix
    assert isinstance(worker.call(name, make_batch("fine"), 30.0), FunctionScores)


def test_the_row_that_takes_the_memory_is_found(worker_of, make_batch):
    assert (
        worker_of("greedy", memory_limit_gb=0.4).find_failing_completion(
            "greedy", make_batch("fine", "fine", "all", "fine"), 60.0
        )
        == 2
    )


def test_a_detached_process_ends_when_the_worker_is_closed(worker_of, make_batch):
    worker = worker_of("detaches")
    left = _left_by(worker, make_batch)
    worker.close()
    assert not psutil.pid_exists(left)


@pytest.mark.parametrize("victim", ["grpo_tasks.rewards.serve", "outer supervisor", "inner supervisor"])
def test_a_detached_process_ends_when_the_worker_or_a_supervisor_is_killed(worker_of, make_batch, victim):
    worker = worker_of("detaches")
    left = _left_by(worker, make_batch)
    outer = psutil.Process(worker._process.pid)
    (inner,) = outer.children()
    server = _server(worker)
    {"outer supervisor": outer, "inner supervisor": inner}.get(victim, server).kill()
    for pid in (left, server.pid):
        _until(lambda pid=pid: _gone(pid))
    outcome = worker.call("detaches", make_batch("a"), 30.0)
    assert isinstance(outcome, Fault)
    assert outcome.kind == "died"
    assert isinstance(worker.call("detaches", make_batch("a"), 30.0), FunctionScores)


def test_a_detached_process_ends_when_its_function_ends_the_worker(worker_of, make_batch, tmp_path):
    worker = worker_of("detaches")
    assert isinstance(worker.call("detaches", make_batch("die"), 30.0), Fault)
    assert not psutil.pid_exists(int((tmp_path / "log.txt").read_text()))


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
        _until(lambda pid=pid: _gone(pid))
    os.kill(fork, signal.SIGKILL)


def test_nothing_that_is_printed_reaches_the_terminal_and_all_of_it_the_log(worker_of, make_batch, capfd, tmp_path):
    worker = worker_of("prints")
    assert isinstance(worker.call("prints", make_batch("a"), 30.0), FunctionScores)
    worker.close()
    assert capfd.readouterr() == ("", "")
    log = (tmp_path / "log.txt").read_text()
    for how in ("print", "write", "descriptor 1", "descriptor 2", "C", "a subprocess", "logging", "warnings"):
        assert f"by {how}\n" in log


def test_a_million_lines_neither_block_the_function_nor_fill_the_log(worker_of, make_batch, tmp_path):
    worker = worker_of("chatty")
    for _ in range(2):
        assert isinstance(worker.call("chatty", make_batch("a"), 60.0), FunctionScores)
    worker.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    told = f"... {1_001_208 - MAX_LINES:,} more lines printed by chatty"
    assert lines[:MAX_LINES] == [f"line {number}" for number in range(MAX_LINES)]
    assert [line.partition(" (")[0] for line in lines if line.startswith("...")] == [told, told]
    assert len(lines) == 2 * (MAX_LINES + 1)


def test_what_a_function_prints_in_the_lab_reaches_the_steps_log_alone(
    own_module, run_config, make_row, capfd, tmp_path, monkeypatch
):
    monkeypatch.setattr("grpo_tasks.lab.probes.LONG_CHARS", 110_000)
    own_module(FUNCTIONS)
    config = run_config(
        {"s": ["prints"]}, rewards={"functions": {"prints": {"function": "my_rewards:prints"}}}, lab={"num_rows": 1}
    )
    run_lab(config, [make_row()], log=tmp_path / "log.txt")
    assert capfd.readouterr() == ("", "")
    assert "by print\n" in (tmp_path / "log.txt").read_text()


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
    told = re.search(rb"\.\.\. ([\d,]+) more lines printed by f \(([\d,]+) bytes\)\n\Z", kept)
    assert told is not None
    lines, size = (int(number.replace(b",", b"")) for number in told.groups())
    assert kept[: told.start()].removesuffix(b"\n") == printed[: len(printed) - size].removesuffix(b"\n")
    assert lines == _lines(printed[len(printed) - size :])
    assert len(kept) <= MAX_BYTES + 100


def _lines(printed: bytes) -> int:
    return printed.count(b"\n") + (not printed.endswith(b"\n") and bool(printed))


def _server(worker) -> psutil.Process:
    family = psutil.Process(worker._process.pid).children(recursive=True)
    return next(one for one in family if "grpo_tasks.rewards.serve" in one.cmdline())


def _left_by(worker, make_batch) -> int:
    outcome = worker.call("detaches", make_batch("a"), 30.0)
    assert isinstance(outcome, FunctionScores)
    left = int(outcome.scores[0] or 0)
    assert psutil.pid_exists(left)
    return left


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _until(true) -> None:
    deadline = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)

"""What the parent accepts from the process of tools; tests/rewards has what hostile code can do to such a process."""

import json
import time

import psutil
import pytest

from grpo_tasks.environments.pool import Answered, Loaded, Opened, Perfect, Stepped
from grpo_tasks.processes.worker_process import MalformedReplyError
from tests.processes.waiting import until

TOOLS = '''
import os, threading

def write(size, payload=b""):
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b"GRPO" + size.to_bytes(8, "big") + payload)
        except OSError:
            pass
    return "done"

def forge() -> str:
    """Writes a reply of its own to the socket of the worker."""
    return write(20, b'{"request": "00000"}')

def announce() -> str:
    """Announces a reply without end."""
    return write(2**60)

def end_later() -> int:
    """Starts a thread that ends the process."""
    threading.Timer(0.2, os._exit, (3,)).start()
    return os.getpid()

def kill_itself(number: int) -> str:
    """Sends a signal to its own process.

    Args:
        number: The signal.
    """
    os.kill(os.getpid(), number)

def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Two.
    """
    return a + b
'''


def test_a_process_that_any_signal_ends_is_named(pool_of, call, row):
    pool = pool_of(TOOLS, tools=["kill_itself"])
    for number, name in ((11, "SIGSEGV"), (40, "40")):
        pool.begin([(0, row(), 0)])
        (observed,) = pool.answer([(0, call("kill_itself", number=number))])
        assert json.loads(observed.messages[0]["content"]) == {"error": f"kill_itself ended its worker process (signal {name})"}


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["forge", "announce"])
def test_a_tool_that_writes_to_the_socket_of_its_worker_gains_nothing(pool_of, call, row, tool):
    pool = pool_of(TOOLS, tools=[tool, "add"])
    pool.begin([(0, row(), 0)])
    (observed,) = pool.answer([(0, call(tool) + call("add", a=1, b=2))])
    refused, answered = [message["content"] for message in observed.messages]
    assert "on the socket of its worker process" in json.loads(refused)["error"]
    assert answered == "3"


@pytest.mark.parametrize(
    ("shape", "payload"),
    [
        (Answered, "no JSON"),
        (Answered, '{"request": "a", "text": 5, "state": {}}'),
        (Answered, '{"request": "a", "text": "x", "state": {}, "more": 1}'),
        (Answered, '{"request": "b", "text": "x", "state": {}}'),
        (Stepped, '{"request": "a", "reward": NaN}'),
        (Stepped, '{"request": "a", "reward": "1"}'),
        (Stepped, '{"request": "a", "messages": [{"content": "x"}]}'),
        (Stepped, json.dumps({"request": "a", "messages": [{"role": "user", "content": "x"}] * 65})),
        (Stepped, '{"request": "a", "reward": 1e999}'),
        (Loaded, '{"request": "a", "form": "other"}'),
        (Loaded, '{"request": "a"}'),
        *((Loaded, json.dumps({"request": "a", "error": error})) for error in ("[]", "", "{}", "5", 5)),
        (Perfect, '{"request": "a", "turns": [1]}'),
        (Opened, "[" * 100_000),
    ],
)
def test_a_reply_of_any_other_shape_is_refused(shape, payload):
    with pytest.raises(MalformedReplyError):
        shape.read(payload.encode(), "a", {})


def test_an_end_between_two_calls_is_not_blamed_on_the_next(pool_of, call, row):
    pool = pool_of(TOOLS, tools=["end_later", "add"])
    pool.begin([(0, row(), 0), (1, row(), 1)])
    (observed,) = pool.answer([(0, call("end_later"))])
    pid = int(observed.messages[0]["content"])
    until(lambda: not psutil.pid_exists(pid))
    # The supervisor reports after it has collected the process.
    time.sleep(0.2)
    assert pool.answer([(1, call("add", a=1, b=2))])[0].messages[0]["content"] == "3"

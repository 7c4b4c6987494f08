"""One process at a time in a folder; the lock of a holder that was killed is free."""

import subprocess
import sys
import threading

import pytest

from grpo_tasks.processes.lock import alone
from tests.processes.waiting import until

HOLDER = """
import sys
from pathlib import Path
from grpo_tasks.processes.lock import alone
with alone(Path(sys.argv[1]), who="the run small", shared=sys.argv[2] == "shared"):
    print("HELD", flush=True)
    input()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "locks" / "folder"


@pytest.fixture
def holder(path):
    """Start another process that holds the lock."""
    started = []

    def start(mode="exclusive"):
        command = [sys.executable, "-c", HOLDER, str(path), mode]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "HELD\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_second_waits_and_learns_who_holds_the_lock_which_a_kill_frees(path, holder):
    first, waits_for, entered = holder(), [], threading.Event()

    def second():
        with alone(path, waiting=waits_for.append):
            entered.set()

    thread = threading.Thread(target=second)
    thread.start()
    until(lambda: waits_for)
    assert waits_for == [f"the run small (process {first.pid})"]
    assert not entered.is_set()
    first.kill()
    thread.join()
    assert entered.is_set()


def test_those_who_share_the_lock_hold_it_together(path, holder):
    holder("shared")
    waits_for = []
    with alone(path, shared=True, waiting=waits_for.append):
        assert waits_for == []


def test_a_lock_can_be_taken_again_after_its_block_has_raised(path):
    with pytest.raises(ZeroDivisionError), alone(path):
        raise ZeroDivisionError
    with alone(path, waiting=pytest.fail):
        pass

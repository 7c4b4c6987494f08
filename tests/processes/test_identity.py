"""A process is known by its pid and its start time; a pid alone may belong to another process by now."""

import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from grpo_tasks.processes.lifetime import ProcessIdentity


def test_a_running_process_is_found_by_its_identity():
    own = ProcessIdentity.of()
    assert own.is_running()
    assert own.process() == psutil.Process()


def test_an_ended_process_is_not_running_before_it_is_collected():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(child.pid)
    assert identity.is_running()
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert not identity.is_running(), "a zombie"
    child.communicate()
    assert not identity.is_running()


def test_another_process_with_the_same_pid_is_not_taken_for_it():
    own = ProcessIdentity.of()
    earlier = replace(own, born=own.born - 60)
    assert earlier.process() is None


def test_a_pid_that_nobody_has_names_no_process():
    assert not ProcessIdentity(pid=2**22 + 1, born=0.0).is_running()
    with pytest.raises(psutil.NoSuchProcess):
        ProcessIdentity.of(2**22 + 1)

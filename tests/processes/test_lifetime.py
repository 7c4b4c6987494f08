"""A child process dies with its parent, orphans find a new one, and a process is known by more than its pid."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from grpo_tasks.processes.lifetime import PARENT, ProcessIdentity
from tests.processes.waiting import has_ended, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl exists on Linux only")

CHILD = "from grpo_tasks.processes.lifetime import die_with_parent\ndie_with_parent()\nprint('READY', flush=True)\ninput()"
STARTS_A_CHILD = f"""
import os, subprocess, sys
environment = os.environ | {{"{PARENT}": str(os.getpid())}}
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], env=environment, stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""
ADOPTS = """
import os, subprocess, sys
from grpo_tasks.processes.lifetime import adopt_orphans
adopt_orphans()
starts_and_ends = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
orphan = int(subprocess.run([sys.executable, "-S", "-c", starts_and_ends], capture_output=True, check=True).stdout)
os.kill(orphan, 9)
print(os.waitpid(orphan, 0)[0] == orphan)
"""


def test_a_child_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", STARTS_A_CHILD], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert parent.stdout.readline() == "READY\n"
    assert not has_ended(pid)
    parent.kill()
    parent.communicate()
    until(lambda: has_ended(pid))


def test_a_child_whose_parent_ended_early_ends_itself():
    environment = os.environ | {PARENT: "1"}  # its parent is this process, not the one that it is said to have
    child = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert child.returncode == -signal.SIGKILL
    assert child.stdout == b""


def test_a_process_that_adopts_orphans_becomes_the_parent_of_its_grandchildren():
    adopts = subprocess.run([sys.executable, "-c", ADOPTS], capture_output=True, text=True, check=True)
    assert adopts.stdout == "True\n", "only a parent can wait for a process"


def test_an_ended_process_is_not_running_before_it_is_collected():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(child.pid)
    assert identity.is_running()
    child.kill()
    until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    assert not identity.is_running(), "a zombie"
    child.communicate()
    assert not identity.is_running()
    with pytest.raises(psutil.NoSuchProcess):
        ProcessIdentity.of(child.pid)


def test_another_process_with_the_same_pid_is_not_taken_for_it():
    own = ProcessIdentity.of()
    assert own.process() == psutil.Process()
    earlier = replace(own, born=own.born - 60)
    assert earlier.process() is None

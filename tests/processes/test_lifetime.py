"""A child process dies with its parent, and orphans find a new one."""

import os
import signal
import subprocess
import sys

import pytest

from grpo_tasks.processes.lifetime import PARENT
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

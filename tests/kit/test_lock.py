"""One process at a time in a folder; the lock of a holder that was killed is free."""

import os
import subprocess
import sys
import threading

import pytest

from grpo_tasks.kit.lock import file_lock, private_folder
from schemas.errors import UserError
from tests.processes.waiting import until

HOLDER = """
import sys
from pathlib import Path
from grpo_tasks.kit.lock import file_lock
with file_lock(Path(sys.argv[1]), holder="the run small", shared=sys.argv[2] == "shared"):
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


def test_the_second_waits_for_a_lock_freed_by_a_kill(path, holder):
    first, waits_for, entered = holder(), [], threading.Event()

    def second():
        with file_lock(path, on_wait=waits_for.append):
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
    with file_lock(path, shared=True, on_wait=pytest.fail):
        pass


def test_a_lock_can_be_taken_again_after_its_block_has_raised(path):
    with pytest.raises(ZeroDivisionError), file_lock(path):
        raise ZeroDivisionError
    with file_lock(path, on_wait=pytest.fail):
        pass


@pytest.mark.parametrize("plant", ["link", "dangling", "pipe"])
def test_a_foreign_file_in_a_locks_place_is_refused(path, plant):
    path.parent.mkdir()
    victim = path.parent.parent / "victim"
    if plant != "dangling":
        victim.write_text("years of work")
    if plant == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim)
    with pytest.raises(UserError, match="a lock has to be a file") as refused, file_lock(path):
        pytest.fail("the lock was taken")
    assert refused.value.place == str(path)
    assert victim.read_text() == "years of work" if plant != "dangling" else not victim.exists()


def test_a_private_folder_is_made_for_its_user_alone_and_taken_again(tmp_path):
    folder = tmp_path / "private"
    assert private_folder(folder) == private_folder(folder) == folder
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("plant", ["open to others", "open to the group", "a link", "a file", "of another user"])
def test_a_folder_that_others_can_write_to_holds_no_locks(tmp_path, plant):
    folder = tmp_path / "private"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if plant == "a link":
        folder.symlink_to(elsewhere)
    elif plant == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod({"open to others": 0o707, "open to the group": 0o770}.get(plant, 0o700))
    if plant == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    with pytest.raises(UserError, match="not one that only you can write to") as refused:
        private_folder(folder)
    assert str(folder) in refused.value.fix

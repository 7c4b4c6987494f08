"""A child process of a step: its errors come back, and nothing of it outlives the process that waits for it."""

import os
import subprocess
import sys

import psutil
import pytest
import torch

from grpo_tasks.kit.progress import listening
from grpo_tasks.processes.child import Child, prepare_child, run_module
from schemas.errors import ChildDied, ModelError
from tests.processes.waiting import has_ended, until


def test_a_user_error_raised_in_the_child_is_raised_here_unchanged(tmp_path):
    spec = (
        '{"model": {}, "ref": {"path": "/no/such/model"}, "prompts": [[{"role": "user", "content": "x"}]], "max_new_tokens": 1}'
    )
    (tmp_path / "spec.json").write_text(spec)
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        run_module("grpo_tasks.policy", tmp_path)
    assert caught.value.place == "model.path: /no/such/model"


def test_a_child_that_dies_silently_is_reported_with_its_log(tmp_path):
    with pytest.raises(ChildDied, match="exit code 1") as caught:
        run_module("grpo_tasks.no_such_room", tmp_path)
    assert "No module named" in str(caught.value)
    assert str(tmp_path / "log.txt") in str(caught.value)


@pytest.fixture
def no_server():
    for server in Child.idle_servers:
        server.close()
    Child.idle_servers.clear()
    until(lambda: not servers_of(os.getpid()))


def test_the_progress_of_a_child_is_heard_here(tmp_path, monkeypatch, no_server):
    (tmp_path / "counts.py").write_text(
        "from pathlib import Path\nfrom grpo_tasks.kit.progress import Count\nfrom grpo_tasks.processes.child import run_child\n"
        "def work(directory):\n"
        "    Count('sampling', 2, 'completions').add()\n"
        "    while not (directory / 'heard').exists(): pass\n"
        "run_child(work)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    heard = []

    def hear(progress):
        heard.append(progress.line())
        if progress.done:
            (tmp_path / "heard").touch()

    with listening(hear):
        run_module("counts", tmp_path)
    assert heard == ["starting its process", "sampling 1/2 completions"]
    assert not (tmp_path / "progress.json").exists(), "it is no output of the step"


@pytest.mark.slow
def test_one_server_that_was_prepared_forks_all_children(tmp_path, no_server):
    prepare_child()
    prepared = servers_of(os.getpid())
    for _ in range(2):
        with pytest.raises(ChildDied, match="exit code 1"):
            run_module("grpo_tasks.no_such_room", tmp_path)
    assert servers_of(os.getpid()) == prepared
    assert len(prepared) == 1


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="a process that may have opened a GPU is not forked")
def test_announced_modules_are_imported_once_for_all_children(tmp_path, monkeypatch, no_server):
    count = tmp_path / "count"
    (tmp_path / "announced.py").write_text(f"open({str(count)!r}, 'a').write('once ')")
    (tmp_path / "asks.py").write_text("import announced")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    prepare_child("announced", "no_such_module")
    for _ in range(2):
        run_module("asks", tmp_path)
    assert count.read_text() == "once "


@pytest.mark.slow
def test_modules_may_be_announced_to_a_server_that_was_killed(tmp_path):
    prepare_child()
    for server in servers_of(os.getpid()):
        server.kill()
        until(lambda server=server: has_ended(server.pid))
    prepare_child("json")
    with pytest.raises(ChildDied, match="No module named"):
        run_module("grpo_tasks.no_such_room", tmp_path)


def test_a_child_works_in_its_callers_directory_and_ends_with_an_interrupt(tmp_path, monkeypatch):
    with pytest.raises(ChildDied):
        run_module("grpo_tasks.no_such_room", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    os.mkfifo(tmp_path / "spec.json")  # its reader waits for ever
    monkeypatch.chdir(tmp_path / "elsewhere")
    seen = []

    def note_and_interrupt():
        seen.extend(child.cwd() for child in children_with(tmp_path, "grpo_tasks.policy"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_module("grpo_tasks.policy", tmp_path, tick=note_and_interrupt)
    assert seen == [str(tmp_path / "elsewhere")]
    assert not children_with(tmp_path)


@pytest.mark.slow
def test_the_child_and_its_server_end_when_the_waiting_process_is_killed(tmp_path):
    os.mkfifo(tmp_path / "spec.json")
    program = "import sys, pathlib; from grpo_tasks.processes.child import Child, prepare_child, run_module; "
    program += "run_module('grpo_tasks.policy', pathlib.Path(sys.argv[1]))"
    with subprocess.Popen([sys.executable, "-c", program, tmp_path]) as waits:
        try:
            until(lambda: children_with(tmp_path, "grpo_tasks.policy"))
            family = psutil.Process(waits.pid).children(recursive=True)
        finally:
            waits.kill()
    assert len(family) == 2
    until(lambda: not any(process.is_running() for process in family))


@pytest.mark.slow
def test_a_killed_server_is_replaced_and_its_child_counts_as_killed(tmp_path):
    os.mkfifo(tmp_path / "spec.json")

    def kill_server():
        for process in servers_of(os.getpid()):
            process.kill()

    with pytest.raises(ChildDied, match="signal 9"):
        run_module("grpo_tasks.policy", tmp_path, tick=kill_server)
    until(lambda: not children_with(tmp_path))
    with pytest.raises(ChildDied, match="No module named"):
        run_module("grpo_tasks.no_such_room", tmp_path)


def servers_of(pid):
    children = [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "grpo_tasks.processes.fork_server" in child.cmdline()]


def children_with(path, module=""):
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if f"-m {module}" in line and str(path) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found

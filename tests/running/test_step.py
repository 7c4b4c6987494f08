"""Content keys: what makes a step run again, and what does not; the processes that steps work in."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from grpo_tasks.processes.child import run_module
from grpo_tasks.running.key import content_key
from schemas.config.data import DataSource
from schemas.config.rewards import RewardConfig, RewardsConfig
from schemas.errors import ChildDied, ModelError
from schemas.results import PreparedData


def key(**inputs):
    return content_key("step", ("data",), inputs)


def test_the_key_follows_the_content_of_data_files_not_their_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    source = DataSource(path=str(path))
    path.write_text("one")
    first = key(source=source)
    path.write_text("two")
    assert key(source=source) != first
    path.write_text("one")
    assert key(source=source) == first


def test_the_key_follows_the_code_of_the_users_own_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import helper\ndef f(): ...")
    (tmp_path / "helper.py").write_text("LIMIT = 1")
    reward = RewardConfig(function="mine:f")
    first = key(reward=reward)
    (tmp_path / "helper.py").write_text("LIMIT = 2")
    second = key(reward=reward)
    (tmp_path / "mine.py").write_text("import helper\ndef f(): return 1")
    assert len({first, second, key(reward=reward)}) == 3


def test_the_key_follows_the_code_beside_the_config_and_not_the_folder_it_lies_in(tmp_path):
    def rewards(folder, limit):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "beside_config.py").write_text("import helper_beside\ndef f(): ...")
        (tmp_path / folder / "helper_beside.py").write_text(f"LIMIT = {limit}")
        return RewardsConfig(functions={"f": RewardConfig(function="beside_config:f")}, module_dir=tmp_path / folder)

    assert key(rewards=rewards("a", 1)) == key(rewards=rewards("b", 1)) != key(rewards=rewards("a", 2))


def test_an_earlier_step_counts_by_its_key_and_not_by_its_time(tmp_path):
    result = PreparedData(key="abc", directory=tmp_path, seconds=1.0, sources=[], rows=1)
    slower = result.model_copy(update={"seconds": 9.0})
    other = result.model_copy(update={"key": "abd"})
    assert key(rows=result) == key(rows=slower) != key(rows=other)


def test_the_key_follows_the_step_its_rooms_and_its_inputs():
    assert key(seed=1) != key(seed=2)
    assert content_key("a", ("data",), {}) != content_key("b", ("data",), {})
    assert content_key("a", ("data",), {}) != content_key("a", ("data", "rewards"), {})


def test_an_error_of_the_users_comes_out_of_the_child_as_it_went_in(tmp_path):
    spec = (
        '{"model": {}, "ref": {"path": "/no/such/model"}, "prompts": [[{"role": "user", "content": "x"}]], "max_new_tokens": 1}'
    )
    (tmp_path / "spec.json").write_text(spec)
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        run_module("grpo_tasks.policy", tmp_path)
    assert caught.value.place == "model.path: /no/such/model"


def test_a_child_that_dies_without_a_word_is_told_with_the_end_of_its_log(tmp_path):
    with pytest.raises(ChildDied, match="exit code 1") as caught:
        run_module("grpo_tasks.no_such_room", tmp_path)
    assert "No module named" in str(caught.value)
    assert str(tmp_path / "log.txt") in str(caught.value)


def test_children_after_the_first_find_the_libraries_loaded(tmp_path):
    for _ in range(2):
        with pytest.raises(ChildDied, match="exit code 1"):
            run_module("grpo_tasks.no_such_room", tmp_path)
    assert len(servers_of(os.getpid())) == 1


def test_whatever_ends_the_wait_ends_the_child(tmp_path):
    os.mkfifo(tmp_path / "spec.json")  # its reader waits for ever

    def interrupt():
        assert children_with(tmp_path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_module("grpo_tasks.policy", tmp_path, tick=interrupt)
    assert not children_with(tmp_path)


def test_the_child_and_its_server_end_with_the_process_that_waits_however_it_ends(tmp_path):
    os.mkfifo(tmp_path / "spec.json")
    program = "import sys, pathlib; from grpo_tasks.processes.child import run_module; "
    program += "run_module('grpo_tasks.policy', pathlib.Path(sys.argv[1]))"
    with subprocess.Popen([sys.executable, "-c", program, tmp_path]) as waits:
        try:
            until(lambda: children_with(tmp_path, "grpo_tasks.policy"))
            family = psutil.Process(waits.pid).children(recursive=True)
        finally:
            waits.kill()
    assert len(family) == 2
    until(lambda: not any(process.is_running() for process in family))


def test_a_server_that_was_killed_is_replaced_and_its_child_counts_as_killed(tmp_path):
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


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)

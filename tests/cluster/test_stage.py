"""A stage on nodes that share no directory with the driver."""

import json

import pytest

from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.rollout import InteractionConfig
from tests.cluster.digits import write_digits

pytestmark = [pytest.mark.xdist_group("heavy"), pytest.mark.long, pytest.mark.timeout(1800)]


def on(nodes, count, **settings):
    """Resources for a stage on the cluster."""
    return {"cluster": {"engine": "ray", "address": nodes.address, "num_nodes": count, **settings}}


def steps(directory):
    return [json.loads(line)["step"] for line in StageDir(directory).journal.read_text().splitlines()]


def spec_of(stages, name, **settings):
    return StageSpec.load(stages.write(name, **settings).spec)


@pytest.mark.ci
def test_conversations_on_two_nodes_train_the_bytes_of_two_local_processes(nodes, stages, tmp_path, monkeypatch):
    nodes.add(), nodes.add()
    write_digits(tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    played = {"interaction": InteractionConfig(environment="my_digits:Digits", max_tokens=96, workers=1)}
    settings = {"max_steps": 3, "save_steps": 2, "length": 12, "stage_rewards": ["environment"]}
    results = []
    for name, resources in (("local", {"num_processes": 2}), ("there", on(nodes, 2))):
        spec = spec_of(stages, name, resources=resources, **settings).model_copy(update=played)
        results.append(run_stage(spec, tmp_path / f"{name}-run"))
    local, there = results
    assert (there.sha256, there.steps) == (local.sha256, 3)
    lines = [json.loads(line)["metrics"] for line in StageDir(there.directory).journal.read_text().splitlines()]
    assert all(line["conversations/errors"] == 0 for line in lines)
    assert any(line["conversations/environment_reward"] > 0 for line in lines)


def test_one_and_two_nodes_train_the_bytes_of_as_many_local_processes(nodes, stages, tmp_path):
    first, second = nodes.add(), nodes.add()
    for count in (1, 2):
        settings = {"max_steps": 4, "save_steps": 2, "log_completions_steps": 1}
        local = run_stage(
            spec_of(stages, f"a{count}", resources={"num_processes": count}, **settings), tmp_path / f"local{count}"
        )
        there = tmp_path / f"there{count}"
        remote = run_stage(spec_of(stages, f"b{count}", resources=on(nodes, count), **settings), there)
        assert (remote.sha256, remote.steps, remote.model.sha256) == (local.sha256, 4, local.model.sha256)
        assert remote.directory == there
        assert remote.model.adapter == there / "final"
        assert steps(there) == [1, 2, 3, 4]
        names = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
        here = {
            path.relative_to(tmp_path / f"local{count}").as_posix()
            for path in (tmp_path / f"local{count}").rglob("*")
            if path.is_file()
        }
        assert names == here
    for node in (first, second):
        assert list((node.private / "xdg_cache_home").rglob("content/*")), "the data came by content"

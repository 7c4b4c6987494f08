"""A stage on nodes that share no directory with the driver."""

import json

import pytest

from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.rollout import InteractionConfig
from tests.cluster.digits import write_digits

pytestmark = [pytest.mark.xdist_group("heavy"), pytest.mark.long, pytest.mark.timeout(1800)]


def test_conversations_on_two_nodes_train_the_bytes_of_two_local_processes(nodes, stages, tmp_path, monkeypatch):
    nodes.add(), nodes.add()
    write_digits(tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    played = {"interaction": InteractionConfig(environment="my_digits:Digits", max_tokens=96, workers=1)}
    settings = {"max_steps": 3, "save_steps": 2, "length": 12, "stage_rewards": ["environment"]}
    cluster, results = {"engine": "ray", "address": nodes.address, "num_nodes": 2}, []
    for name, resources in (
        ("local", {"num_processes": 2}),
        ("there", {"cluster": cluster}),
    ):
        spec = StageSpec.load(stages.write(name, resources=resources, **settings).spec)
        results.append(run_stage(spec.model_copy(update=played), tmp_path / f"{name}-run"))
    local, there = results
    assert (there.sha256, there.steps, there.model.sha256) == (local.sha256, 3, local.model.sha256)
    assert (there.directory, there.model.adapter) == (tmp_path / "there-run", tmp_path / "there-run" / "final")
    here, fetched = (
        {path.relative_to(made.directory) for path in made.directory.rglob("*") if path.is_file()} for made in results
    )
    assert fetched == here
    lines = [json.loads(line)["metrics"] for line in StageDir(there.directory).journal.read_text().splitlines()]
    assert all(line["conversations/errors"] == 0 for line in lines)
    assert any(line["conversations/environment_reward"] > 0 for line in lines)

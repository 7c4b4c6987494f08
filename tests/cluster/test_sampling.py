"""Completions sampled on nodes that share no directory with the driver: the rows of one process on one machine."""

import signal
from itertools import chain

import polars as pl
import pytest

from grpo_tasks.cluster.jobs import Job, JobNode
from grpo_tasks.cluster.parcel import BASE
from grpo_tasks.cluster.sampling import MIRRORED, joined, sample_files, shards, spec_at
from grpo_tasks.processes.child import SPEC
from grpo_tasks.rollout import spec as sampling
from grpo_tasks.rollout.spec import SAMPLES, SampleSpec, run_sampling
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.run import RunConfig
from schemas.errors import UserError
from schemas.paths import resolve
from schemas.results.model import ModelRef
from tests.cluster.digits import write_digits
from tests.cluster.processes import MARK, running


def on_ray(test):
    """Marks of a test that starts a cluster."""
    return pytest.mark.xdist_group("heavy")(pytest.mark.long(pytest.mark.timeout(1800)(test)))


def spec_of(stages, *, ref=None, length=24, evaluation=None, interaction=None, **cluster):
    """The completions of an evaluation of the thirty sums."""
    base = ModelRef(path=resolve("embedded:base"))
    config = RunConfig(
        data={"train": [{"path": "rows.jsonl"}]},
        stages=[{"name": "s", "rewards": ["format"]}],
        evaluation={"num_samples": 3, "greedy": True} | (evaluation or {}),
        model={"path": base.path},
        rollout={"max_completion_length": length},
        interaction=interaction or {},
        seed=5,
    )
    resources = ResourcesConfig(device="cpu", num_threads=1, cluster=cluster)
    return SampleSpec.of_evaluation(config, ref or base, stages.root / "train.parquet", resources)


def on(nodes, count, **settings):
    return {"engine": "ray", "address": nodes.address, "num_nodes": count, **settings}


def sampled(spec, folder):
    """The bytes of the table."""
    folder.mkdir()
    run_sampling(spec, folder)
    return (folder / SAMPLES).read_bytes()


def test_shards_are_contiguous_and_together_every_prompt_once(stages):
    spec = spec_of(stages)
    every = [row.prompt_id for row in sampling.chosen_rows(spec.prompts, None)]
    for most in (1, 2, 7, 30, 64):
        parts = shards(spec, most)
        assert [*chain.from_iterable(parts)] == every
        assert len(parts) == min(most, 30)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert [*chain.from_iterable(shards(spec.part(every[5:9], range(2)), 2))] == every[5:9]
    assert [*chain.from_iterable(shards(spec.model_copy(update={"max_prompts": 4}), 8))] == every[:4]
    assert shards(spec.part([], range(2)), 4) == [[]], "one that samples nothing"


@pytest.mark.long
@pytest.mark.ci
def test_workers_sample_the_rows_of_one_process(stages, tmp_path, monkeypatch):
    interaction = {"environment": "my_digits:Digits", "max_tokens": 96, "workers": 1}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_digits(tmp_path / "own")
    monkeypatch.chdir(tmp_path / "own")
    spec = spec_of(stages, length=12, interaction=interaction)
    files, tables, worker = sample_files(spec), [], JobNode("127.0.0.1")
    missing = worker.missing(files)
    for file in files:
        if file.key in missing:
            worker.receive(file, 0, file.source.read_bytes())
    worker.lay_out(files)
    root = worker.describe().root
    for number, only in enumerate(shards(spec, 2)):
        shard = spec_at(root, spec, files, only).model_dump_json()
        worker.start(Job("grpo_tasks.rollout", f"shard-{number}", shard, MIRRORED))
        worker._processes[0].wait()
        report = worker.report()
        assert report.codes == (0,), report.delta.lines
        [held] = report.delta.held
        tables.append(pl.read_parquet(worker.read(held.name, "", 0, held.files[""])))
    there = tmp_path / "there.parquet"
    joined(tables).write_parquet(there)
    shown = pl.read_parquet(there)["conversation"]
    assert all("Digits, please." in text and "So far: 1" in text for text in shown)
    assert there.read_bytes() == sampled(spec, tmp_path / "here")


def test_a_node_gets_paths_of_its_own_and_no_cluster(stages, tmp_path):
    spec = spec_of(stages, engine="ray", address="auto", num_nodes=2)
    there = spec_at(tmp_path, spec, sample_files(spec), ["a"])
    assert there.ref.path == there.model.path == str(tmp_path / BASE), "added tokens are those of the base of the config"
    assert there.resources.cluster.engine == "local"
    assert there.only == ["a"]
    assert SampleSpec.model_validate_json(there.model_dump_json()) == there


def test_running_servers_are_asked_from_here(stages, tmp_path, monkeypatch):
    modules = []
    monkeypatch.setattr(sampling, "run_module", lambda module, _: modules.append(module))
    spec = spec_of(stages, engine="ray", address="auto")
    served = RolloutConfig(engine="vllm", vllm={"base_urls": ["http://127.0.0.1:1"]})
    for each in (spec, spec.model_copy(update={"rollout": served}), spec_of(stages)):
        run_sampling(each, tmp_path)
        assert (tmp_path / SPEC).exists()
    assert modules == ["grpo_tasks.cluster.sampling", "grpo_tasks.rollout", "grpo_tasks.rollout"]


def kill(victim, nodes, node):
    if victim == "node":
        nodes.remove(node)
    else:
        [first, _] = running("grpo_tasks.rollout")
        (first if victim == "process" else first.parent()).send_signal(signal.SIGKILL)


@on_ray
def test_two_nodes_sample_the_bytes_of_one_process_whatever_dies(nodes, stages, tmp_path, monkeypatch):
    made = [nodes.add(**MARK) for _ in range(2)]
    _, directory = stages.train("stage", max_steps=1)
    adapted = ModelRef(path=resolve("embedded:base"), adapter=directory.final)
    settings = {"ref": adapted, "length": 64, "evaluation": {"num_samples": 4}}
    local = sampled(spec_of(stages, **settings), tmp_path / "local")
    whole = sampling.run_module
    for victim in ("process", "actor", "node"):
        killed = []

        def tick(victim=victim, killed=killed):
            if not killed and len(running("grpo_tasks.rollout")) == 2:
                killed.append(victim)
                kill(victim, nodes, made[0])

        monkeypatch.setattr(sampling, "run_module", lambda *given, tick=tick: whole(*given, tick=tick))
        there = sampled(spec_of(stages, **settings, **on(nodes, 2)), tmp_path / victim)
        assert killed == [victim], "it ended before anything was killed"
        assert there == local, victim
        assert "others sample what it had" in (tmp_path / victim / "log.txt").read_text()
        assert running("grpo_tasks.rollout") == []
    for node in made:
        assert list((node.private / "xdg_cache_home").rglob("content/*")), "the prompts came by content"


@on_ray
def test_an_error_on_a_node_is_the_users_error(nodes, stages, tmp_path):
    nodes.add()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded"):
        sampled(spec_of(stages, ref=ModelRef(path=str(broken)), **on(nodes, 1)), tmp_path / "there")

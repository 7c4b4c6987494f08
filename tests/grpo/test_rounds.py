"""`rollout.max_staleness`: which policy samples which round, on servers that speak vLLM's API."""

import shutil
from concurrent.futures import Future
from types import SimpleNamespace

import polars as pl
import pytest

from grpo_tasks.grpo.rounds import Rounds
from grpo_tasks.grpo.sampler import rollout_engine
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.rollout.vllm_server import VllmServer
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import TrainingError
from schemas.metrics import (
    IMPORTANCE_RATIO_MEAN,
    POLICY_LAG,
    QUEUE_DEPTH,
    REPLICA_TOKENS_PER_S,
    REPLICAS_SERVING,
    SAMPLER_DIFFERENCE_MAX,
    SAMPLER_WAIT,
    SYNC_BYTES,
    SYNC_TIME,
    TRAINER_WAIT,
    member,
)
from tests.forked import train_in_processes
from tests.grpo.conftest import journal
from tests.in_process import suite_of
from tests.rollout.conftest import small  # noqa: F401 - a fixture
from tests.rollout.servers import small_servers

pytestmark = [pytest.mark.usefixtures("small"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def servers(small, tmp_path_factory):  # noqa: F811
    with small_servers(tmp_path_factory.mktemp("small"), replicas=2) as found:
        yield found


@pytest.fixture
def train(stages, servers):
    def train(name, *, staleness, **settings):
        rollout = {"engine": "vllm", "max_staleness": staleness, "vllm": {"sync": "adapter", "concurrency": 4}}
        correction = "token_truncate" if staleness else "none"
        settings = {
            "learning_rate": 3e-3,
            "max_steps": 8,
            "save_steps": 6,
            "importance_sampling_correction": correction,
        } | settings
        directory = stages.write(name, rollout=rollout, length=24, **settings)
        return directory, again(directory, servers)

    return train


def again(directory, servers):
    spec = StageSpec.load(directory.spec)
    with suite_of(spec) as suite:
        return Trainer(directory, suite, servers).train()


def lags(directory):
    return [line[POLICY_LAG] for line in journal(directory)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("staleness", "expected"),
    # A checkpoint after update 6: the rounds behind it are sampled by the policy of update 6, of age 0, 1, ...
    [(0, [0] * 8), (1, [0, 1, 1, 1, 1, 1, 0, 1]), pytest.param(4, [0, 1, 2, 3, 4, 4, 0, 1], marks=pytest.mark.ci)],
)
def test_a_rounds_policy_is_never_older_than_the_bound(train, staleness, expected):
    directory, result = train("stage", staleness=staleness, log_completions_steps=1)
    assert result.steps == 8
    assert lags(directory) == expected
    for line, lag in zip(journal(directory), expected, strict=True):
        # What the trainer finds agrees with what is said about the sampler: only an older policy differs from the trainer's.
        assert (line[SAMPLER_DIFFERENCE_MAX] < 1e-4) == (lag == 0)
        assert {QUEUE_DEPTH, TRAINER_WAIT, SAMPLER_WAIT, SYNC_TIME, SYNC_BYTES, member(REPLICA_TOKENS_PER_S, "1")} <= set(line)
        assert line[REPLICAS_SERVING] == 2
        if staleness:
            assert 0.5 < line[IMPORTANCE_RATIO_MEAN] < 2
    for step, lag in enumerate(expected, start=1):
        assert set(pl.read_parquet(directory.completions(step))["policy_version"]) == {step - 1 - lag}


@pytest.mark.long
@pytest.mark.ci
def test_a_stage_resumed_with_rounds_in_flight_ends_the_same(train, servers):
    directory, uninterrupted = train("stage", staleness=4, max_steps=9, save_steps=3)
    whole = journal(directory)
    # As if killed after update 8, when rounds were in flight: the checkpoint of update 6 is the last one.
    directory.result.unlink()
    shutil.rmtree(directory.checkpoints / "step-000009")
    resumed = again(directory, servers)
    assert (resumed.resumed, resumed.sha256) == (1, uninterrupted.sha256)
    assert lags(directory) == [line[POLICY_LAG] for line in whole] == [0, 1, 2] * 3


@pytest.mark.long
def test_a_rollout_that_feeds_several_updates_counts_its_age_in_updates(train):
    directory, _ = train("stage", staleness=5, num_iterations=2, max_steps=8, save_steps=8)
    # Two updates a round: two rounds ahead are four updates, three would be six.
    assert lags(directory) == [0, 0, 2, 2, 4, 4, 4, 4]


@pytest.mark.long
def test_a_roll_back_discards_the_rounds_in_flight(train):
    settings = {"guards": {"truncation": {"action": "rollback", "threshold": 0.01}, "max_rollbacks": 1}}
    directory, result = train("stage", staleness=3, max_steps=16, save_steps=16, **settings)
    assert '"rolled_back"' in directory.events.read_text()
    step = next(index for index, lag in enumerate(lags(directory)[1:], start=2) if lag == 0)
    assert lags(directory)[step - 1 : step + 3] == [0, 1, 2, 3]
    assert result.steps == 16


def test_a_round_that_an_older_policy_sampled_ends_the_stage(stages):
    directory = stages.write("stage")
    spec = StageSpec.load(directory.spec)
    with suite_of(spec) as suite:
        rounds = Rounds(Trainer(directory, suite).collector, updates=1, max_staleness=2, may_start=lambda _: False)
        rounds._started[3] = Future()
        rounds._started[3].set_result(SimpleNamespace(version=0))
        with pytest.raises(TrainingError, match="3 updates old, 2 are allowed"):
            rounds.take(3)
        rounds.close()


def test_processes_share_the_concurrency_of_a_server(stages, policy, tokenizer):
    directory = stages.write("stage", rollout={"engine": "vllm", "vllm": {"concurrency": 8, "base_urls": ["http://127.0.0.1:9"]}})
    given = (StageSpec.load(directory.spec), directory, policy, tokenizer, [VllmServer("http://127.0.0.1:9")])
    for ranks, share in ((1, 8), (3, 2), (16, 1)):
        engine = rollout_engine(*given, cuda=False, ranks=ranks)
        assert engine.pool.concurrency == share


def test_a_rank_that_begins_later_removes_no_weights_of_another_one(stages, policy, tokenizer):
    """A server may not have read them yet."""
    directory = stages.write("stage", rollout={"engine": "vllm", "vllm": {"base_urls": ["http://127.0.0.1:9"]}})
    given = (StageSpec.load(directory.spec), directory, policy, tokenizer, [VllmServer("http://127.0.0.1:9")])

    def engine(rank):
        return rollout_engine(*given, cuda=False, ranks=2, rank=rank)

    first = engine(0)
    weights = first.prepare()
    kept = {path.name for path in weights.folder.iterdir()}
    engine(1).close()
    assert {path.name for path in weights.folder.iterdir()} == kept != set()
    first.close()


@pytest.mark.long
def test_two_processes_sample_ahead_on_the_servers_that_they_share(stages, servers):
    urls = [server.address for server in servers]
    rollout = {"engine": "vllm", "max_staleness": 2, "vllm": {"sync": "adapter", "base_urls": urls}}
    settings = {"learning_rate": 3e-3, "max_steps": 5, "save_steps": 5, "importance_sampling_correction": "token_truncate"}
    # Refills need the gather of all ranks in the thread that samples.
    both = {"rollout": rollout, "length": 24, "max_refills": 1, **settings}
    results = []
    for name, processes in (("one", 1), ("two", 2)):
        directory = stages.write(name, resources={"num_processes": processes}, **both)
        train_in_processes(directory.root, processes)
        assert lags(directory) == [0, 1, 2, 2, 2]
        results.append(journal(directory))
    # The same completions, up to the rounding of the summed gradients.
    assert [line["completions/mean_length"] for line in results[0]] == [line["completions/mean_length"] for line in results[1]]
    assert results[0][-1]["reward"] == pytest.approx(results[1][-1]["reward"], rel=1e-3)
    # Each process hands its copy of the policy to each server, and the journal counts all of them.
    assert results[1][-1][SYNC_BYTES] == pytest.approx(2 * results[0][-1][SYNC_BYTES], rel=0.01)

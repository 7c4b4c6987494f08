"""What Prometheus reads: real journals, through the command and Prometheus' own parser."""

import json
import os
import subprocess
import sys
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from grpo_tasks.operating import prometheus
from grpo_tasks.stage.journal import Events, Journal
from schemas.metrics import REPLICA_TOKENS_PER_S, REWARD, REWARD_MEAN, TRAINING, logged, member
from tests.ports import free_ports
from tests.rollout.servers import ROOT


@pytest.fixture
def runs(tmp_path):
    stage = tmp_path / "demo" / "train_stage" / "format-0123"
    stage.mkdir(parents=True)
    return tmp_path


def journal_of(runs, stage="format-0123", run="demo"):
    folder = runs / run / "train_stage" / stage
    folder.mkdir(parents=True, exist_ok=True)
    return Journal(folder / "metrics.jsonl"), Events(folder / "events.jsonl")


@pytest.fixture
def address(runs):
    [port] = free_ports(1)
    call = [sys.executable, "-m", "flows.cli", "metrics-server", str(runs), "--port", str(port)]
    process = subprocess.Popen(call, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None
            try:
                httpx.get(f"http://127.0.0.1:{port}/metrics")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        process.kill()
        process.wait()


def scraped(address):
    answer = httpx.get(address).raise_for_status()
    families = text_string_to_metric_families(answer.text)
    return {(sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples}


def test_prometheus_reads_the_last_update_of_each_stage_while_it_trains(runs, address):
    assert scraped(address) == {}
    journal, events = journal_of(runs)
    journal.append(1, {REWARD: 0.25, member(REWARD_MEAN, "correctness"): 0.5, member(REPLICA_TOKENS_PER_S, "1"): 80.0})
    events.append(1, "rollout_server", "replica 0 is left out")
    other, _ = journal_of(runs, "correctness-77")
    other.append(4, {REWARD: 1.0, logged("length", "words"): 12.0})
    labels = {"run": "demo", "stage": "format", "of": ""}
    found = scraped(address)
    assert found[("grpo_reward", *sorted(labels.items()))] == 0.25
    assert found[("grpo_rewards_mean", *sorted((labels | {"of": "correctness"}).items()))] == 0.5
    assert found[("grpo_replica_tokens_per_s", *sorted((labels | {"of": "1"}).items()))] == 80.0
    assert found[("grpo_events", ("event", "rollout_server"), ("run", "demo"), ("stage", "format"))] == 1
    assert found[("grpo_update", ("run", "demo"), ("stage", "correctness"))] == 4
    assert found[("grpo_logged", ("of", "length/words"), ("run", "demo"), ("stage", "correctness"))] == 12.0
    assert abs(found[("grpo_update_time_seconds", ("run", "demo"), ("stage", "format"))] - time.time()) < 3600
    journal.append(2, {REWARD: 0.75})
    assert scraped(address)[("grpo_reward", *sorted(labels.items()))] == 0.75


def test_a_stage_restarted_in_another_folder_is_shown_once(runs):
    old, fresh = journal_of(runs, "format-0")[0], journal_of(runs, "format-1")[0]
    ended, _ = journal_of(runs, "format-2", run="ended")
    for journal, reward in ((old, 0.1), (fresh, 0.9), (ended, 0.5)):
        journal.append(1, {REWARD: reward})
    os.utime(old.path, (time.time() - 60, time.time() - 60))
    os.utime(ended.path, (1, 1))
    collected = {family.name: family.samples for family in prometheus.Journals(runs).collect()}
    assert [(sample.labels["run"], sample.value) for sample in collected["grpo_reward"]] == [("demo", 0.9)]


def test_a_damaged_journal_does_not_hide_the_other_stages(runs):
    journal, _ = journal_of(runs)
    journal.append(1, {REWARD: 0.25})
    damaged, _ = journal_of(runs, "format-0", run="damaged")
    damaged.path.write_text(json.dumps({"step": "one"}) + "\n")
    collected = {family.name: family.samples for family in prometheus.Journals(runs).collect()}
    assert [sample.value for sample in collected["grpo_reward"]] == [0.25]


def test_every_metric_has_a_name_of_its_own_for_prometheus():
    names = [prometheus.exported(metric.name.replace("*", "x"))[0] for metric in TRAINING]
    assert len(set(names)) == len(names)


def test_a_web_page_cannot_read_the_figures(address):
    assert httpx.get(address, headers={"Origin": "http://evil.example"}).status_code == 403
    assert httpx.get(address, headers={"Host": "evil.example"}).status_code == 403

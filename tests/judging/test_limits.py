"""The limits of a judge hold over threads, processes and machines: cost, requests at the same time, requests per minute."""

import json
import os
import signal
import subprocess
import sys

import pytest

from grpo_tasks.judging.judge import Case, Judge
from grpo_tasks.judging.store import Entry, JudgeLimits, VerdictStore
from grpo_tasks.kit import share
from schemas.errors import JudgeUnavailableError
from tests.judging.endpoint import Endpoint
from tests.judging.test_judge import scores

PRICED = {"output_price": 50_000.0, "max_tokens": 20}
"""A request may take 20 tokens and takes 20, which cost 1."""
RANK = """
import sys
from grpo_tasks.judging.judge import Case, Judge
from schemas.config.rewards import JudgeConfig
judge = Judge(JudgeConfig.model_validate_json(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
judge.score([Case("Why?", sys.argv[2] + " good" * number) for number in range(4)])
"""
HOLDER = """
import sys, time
from pathlib import Path
from grpo_tasks.judging.store import JudgeLimits
from grpo_tasks.judging.store import VerdictStore
from schemas.config.rewards import JudgeConfig
judge = JudgeConfig.model_validate_json(sys.argv[1])
with JudgeLimits(judge, VerdictStore(judge.cache)).turn(1.5):
    print("ready", flush=True)
    time.sleep(600)
"""


def started(code, *arguments):
    command = [sys.executable, "-P", "-c", code, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def run_ranks(settings):
    """Two processes with four completions each, at the same time."""
    ranks = [started(RANK, settings.model_dump_json(), name) for name in ("one", "two")]
    for rank in ranks:
        rank.stdin.write("\n")
        rank.stdin.flush()
    for rank in ranks:
        rank.communicate(timeout=60)
    assert [rank.returncode for rank in ranks] == [0, 0]


@pytest.mark.slow
def test_processes_share_the_limit_of_requests_at_the_same_time(settings, endpoint):
    endpoint.delay_s = 0.4
    run_ranks(settings(max_concurrency=2))
    assert len(endpoint.requests) == 8
    assert endpoint.most_in_flight <= 2


@pytest.mark.slow
def test_processes_share_the_limit_of_requests_per_minute(settings, endpoint):
    run_ranks(settings(max_requests_per_minute=120.0))
    assert len(endpoint.requests) == 8
    assert endpoint.arrivals[-1] - endpoint.arrivals[0] >= 2.5  # 3.5 s, less what a busy machine may take off


def test_a_fast_judge_keeps_to_the_pace_of_a_slow_one(settings, monkeypatch):
    now = [1_000.0]
    monkeypatch.setattr("grpo_tasks.judging.store.time.time", lambda: now[0])
    sent = []

    def judge(name, limit):
        given = settings(max_requests_per_minute=limit)
        limits = JudgeLimits(given, VerdictStore(given.cache))

        def sleep(seconds):
            now[0] += seconds

        limits.sleep = sleep

        def send():
            limits.pace()
            sent.append((name, round(now[0] - 1_000.0, 6)))

        return send

    slow, fast = judge("slow", 10.0), judge("fast", 600.0)
    for send in (slow, fast, slow, fast, fast):
        send()
    # Six seconds before each request of the slow one, a tenth before those of the fast one, whoever sent the last.
    assert sent == [("slow", 0.0), ("fast", 0.1), ("slow", 6.1), ("fast", 6.2), ("fast", 6.3)]
    # The clock is set back: nobody waits for the time that was.
    now[0] = 10.0
    slow()
    assert now[0] == 10.0


def test_what_a_killed_process_had_in_flight_blocks_nobody(settings, endpoint):
    given = settings(max_concurrency=1, max_cost=2.0, **PRICED)
    holder = started(HOLDER, given.model_dump_json())
    try:
        judge = Judge(given)
        judge.limits.sleep = lambda _: os.kill(holder.pid, signal.SIGKILL) or holder.wait()
        assert judge.score([Case("Why?", "good")]).scores == [0.25]
    finally:
        holder.kill()
        holder.communicate()
    assert holder.returncode == -signal.SIGKILL


def test_the_cost_limit_stops_and_a_higher_one_continues(settings, endpoint):
    with pytest.raises(JudgeUnavailableError, match="max_cost is 2") as caught:
        scores(settings(max_cost=2.0, max_concurrency=1, **PRICED))
    assert len(endpoint.requests) == 2
    assert "raise judge.max_cost" in caught.value.fix
    assert scores(settings(max_cost=10.0, **PRICED)).scores == [0.0, 0.25, 0.5, 1.0]
    assert len(endpoint.requests) == 4


def test_requests_in_flight_count_towards_the_limit_of_cost(settings, endpoint):
    endpoint.delay_s = 0.3
    with pytest.raises(JudgeUnavailableError, match="2 is spent"):
        scores(settings(max_cost=2.0, max_concurrency=4, **PRICED))
    assert len(endpoint.requests) == 2


def test_a_request_that_costs_less_than_expected_makes_room_for_others(settings, endpoint):
    endpoint.usage = {"prompt_tokens": 1, "completion_tokens": 5}
    # Each is expected to cost 1 and costs a quarter.
    assert scores(settings(max_cost=1.9, max_concurrency=4, **PRICED)).tally.cost == 1.0


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None, "completion_tokens": "?"}, []])
def test_an_endpoint_that_does_not_count_tokens_is_not_free(settings, endpoint, usage):
    endpoint.usage = usage
    found = scores(settings(input_price=3.0, output_price=3.0), ["good"])
    [body] = endpoint.requests
    asked = sum(len(message["content"]) for message in body["messages"])
    replied = len(json.dumps(Endpoint.verdict(endpoint, body)))
    assert found.tally.cost == pytest.approx((asked + replied) / 1e6, rel=0.01)
    with pytest.raises(JudgeUnavailableError, match="max_cost"):
        scores(settings(max_cost=found.tally.cost, input_price=3.0, output_price=3.0))


def test_a_stage_on_several_machines_gets_the_share_of_each(settings, endpoint, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("GRPO_LOCAL_RANKS", "2")
    endpoint.delay_s = 0.3
    with pytest.raises(JudgeUnavailableError, match="max_cost is 3 on this machine"):
        scores(settings(max_cost=6.0, max_concurrency=4, **PRICED))
    assert len(endpoint.requests) == 3
    assert endpoint.most_in_flight <= 2


def test_waiting_for_a_limit_is_no_outage(settings, endpoint, monkeypatch):
    # Shorter than an outage may last, which is shorter than the pause of the limit.
    monkeypatch.setattr(share, "FIRST_COOLDOWN_S", 0.3)
    answer, count = endpoint.answer, []

    def second_fails(body):
        count.append(1)
        return (503, {}, "busy") if len(count) == 2 else answer(body)

    endpoint.answer = second_fails
    given = settings(max_requests_per_minute=60.0, max_outage_s=0.8, max_concurrency=1)
    assert scores(given, ["good", "good good"]).scores == [0.25, 0.5]


def test_what_was_spent_is_the_sum_over_all_processes(tmp_path):
    stores = [VerdictStore(tmp_path), VerdictStore(tmp_path)]
    for number in range(1, 5):
        stores[number % 2].add(Entry("key", "m", 0, [], "", "", 1, 1, float(number)))
        assert stores[0].spent() == sum(range(number + 1))
    assert [store.spent() for store in stores] == [10.0, 10.0]
    for store in stores:
        store.close()


def test_the_sum_of_a_large_folder_is_not_taken_for_each_request(tmp_path):
    store, counted = VerdictStore(tmp_path), []
    for _ in range(100):
        store.add(Entry("key", "m", 0, [], "", "", 1, 1, 1.0))
    store.spent()
    with store.writing() as base:
        base.set_progress_handler(lambda: counted.append(1), 1)
    assert store.spent() == 100.0
    few = len(counted)
    for _ in range(1_000):
        store.add(Entry("key", "m", 0, [], "", "", 1, 1, 1.0))
    store.spent()
    counted.clear()
    assert store.spent() == 1_100.0
    assert len(counted) < few + 20
    store.close()

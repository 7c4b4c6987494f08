"""How servers are started: what they are given room for, and which of their paths are open."""

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_tasks.rollout.engine import EngineReport
from grpo_tasks.rollout.vllm_server import command
from schemas.config.rollout import VllmConfig
from schemas.metrics import POLICY_LAG, QUEUE_DEPTH, REPLICAS_SERVING, SYNC_BYTES, SYNC_TIME
from tests.rollout.servers import served
from tests.rollout.small_servers import counts, small_servers


def flags(what, address="http://127.0.0.1:8000"):
    return command(VllmConfig(), what, Path("python"), address)


def value(found, flag):
    return found[found.index(flag) + 1]


@pytest.mark.parametrize("processes", [1, 3])
def test_a_server_has_room_for_the_adapters_of_all_processes_and_for_their_next_ones(processes):
    found = flags(replace(served(), num_adapters=processes))
    assert (value(found, "--max-loras"), value(found, "--max-cpu-loras")) == (str(processes), str(2 * processes))


def test_only_a_server_that_other_machines_reach_wants_the_key_on_every_path():
    assert flags(served()).count("--middleware") == 1
    found = flags(served(), "http://10.0.0.7:8000")
    assert [found[at + 1] for at, flag in enumerate(found) if flag == "--middleware"] == [
        "same_origin.SameOrigin",
        "bearer_key.BearerKey",
    ]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("rank", "opens"), [(16, False), (None, True)], ids=["adapter", "weights"])
def test_the_paths_that_replace_weights_are_open_only_where_weights_are_replaced(tmp_path, monkeypatch, rank, opens):
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    with small_servers(tmp_path, rank=rank) as [server]:
        assert counts(server)["dev_mode"] == opens


def test_the_report_on_all_ranks_adds_up_what_they_share_and_loses_no_event():
    first = {"replica/0/tokens_per_s": 10.0, QUEUE_DEPTH: 2.0, SYNC_BYTES: 100.0, SYNC_TIME: 0.5, REPLICAS_SERVING: 2.0}
    other = {"replica/0/tokens_per_s": 5.0, QUEUE_DEPTH: 1.0, SYNC_BYTES: 100.0, SYNC_TIME: 0.9, REPLICAS_SERVING: 1.0}
    reports = [EngineReport(first | {POLICY_LAG: 1.0}, ("gone",)), EngineReport(other | {POLICY_LAG: 1.0}, ("gone", "back"))]
    both = EngineReport.of_ranks(reports)
    summed = {"replica/0/tokens_per_s": 15.0, QUEUE_DEPTH: 3.0, SYNC_BYTES: 200.0}
    assert both.figures == summed | {SYNC_TIME: 0.9, REPLICAS_SERVING: 1.0, POLICY_LAG: 1.0}
    assert both.events == ("gone", "back")
    assert EngineReport.of_ranks(reports[:1]) == reports[0]

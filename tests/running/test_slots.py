"""Which slots a run holds, and what becomes of them when the holder or the server does not come to an ordinary end.

That runs wait for each other and say for whom is shown in tests/flows/test_retrain.py and in tests/operating.
"""

import socket
import subprocess
import sys

import pytest

from grpo_tasks.running.orchestrator import slots_of
from grpo_tasks.running.slots import describe_slot, hold
from schemas.config.operations import ResourcesConfig
from schemas.config.rollout import RolloutConfig

pytestmark = pytest.mark.xdist_group("running")

CARD = "card-of-the-slots"
HOLDER = f"""
from prefect import flow
from grpo_tasks.running.slots import hold

@flow
def holds():
    with hold("{CARD}"):
        print("HELD", flush=True)
        input()

holds()
"""


@pytest.mark.parametrize(
    ("settings", "vllm", "visible", "wanted"),
    [
        ({}, None, None, ["0"]),
        ({"num_processes": 3}, None, None, ["0", "1", "2"]),
        ({"num_processes": 2}, None, "5,3,1", ["3", "5"]),
        ({"gpu_slot": "shared", "num_processes": 2}, None, None, []),
        ({"device": "cpu", "num_processes": 2}, None, None, []),
        # The cards of its servers too.
        ({}, {"devices": ["1"]}, None, ["0", "1"]),
        ({}, {"devices": ["2,3", "4,5"], "replicas": 2, "tensor_parallel_size": 2}, None, ["0", "2", "3", "4", "5"]),
        ({}, {"replicas": 2}, "4,5,6,7", ["4", "6", "7"]),
        ({}, {"tensor_parallel_size": 2}, "4,5,6,7", ["4", "5"]),
        ({}, {"base_urls": ["http://server:8000"]}, None, ["0"]),
    ],
    ids=str,
)
def test_a_run_takes_the_slot_of_each_of_its_cards(settings, vllm, visible, wanted, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    rollout = RolloutConfig(engine="vllm", vllm=vllm) if vllm else RolloutConfig()
    found = slots_of(ResourcesConfig(**settings), rollout, has_cards=True)
    assert found == [f"gpu-{socket.gethostname()}-{card}" for card in wanted]
    if vllm:
        assert slots_of(ResourcesConfig(), RolloutConfig(vllm=vllm), has_cards=True) == found[:1]


@pytest.mark.parametrize(
    ("slot", "words"),
    [
        ("gpu-host-a-0", "card 0 of host-a"),
        ("gpu-host-GPU1234", "card GPU1234 of host"),
        ("retrain-my-model", "the retraining of my-model"),
        ("big-card", "the slot big-card"),
    ],
)
def test_a_slot_is_described_in_words(slot, words):
    assert describe_slot(slot) == words


def test_a_named_slot_a_cluster_and_a_machine_without_cards():
    assert slots_of(ResourcesConfig(gpu_slot="big-card", num_processes=4)) == ["big-card"]
    resources = ResourcesConfig(cluster={"engine": "ray", "address": "auto"}, gpu_slot="big-card")
    assert slots_of(resources, trains=True) == [], "a stage on a cluster leaves the cards here to others"
    assert slots_of(resources) == ["big-card"]
    assert slots_of(ResourcesConfig(), has_cards=False) == []


@pytest.mark.long
@pytest.mark.usefixtures("no_run_log")
def test_a_holder_that_is_killed_loses_its_slot_before_its_lease_expires(server):
    holder = subprocess.Popen(
        [sys.executable, "-u", "-c", HOLDER], env=server.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert any("HELD" in line for line in holder.stdout)
    assert server.held(CARD) == 1
    holder.kill()
    holder.communicate()
    assert server.held(CARD) == 1
    with hold(CARD):
        assert server.held(CARD) == 1
    assert server.held(CARD) == 0


@pytest.mark.long
@pytest.mark.usefixtures("no_run_log")
def test_a_server_that_was_restarted_does_not_keep_the_slot(server):
    with hold(CARD):
        server.stop()
        server.start()
        assert server.held(CARD) == 1, "it counts the slot as held, and has forgotten the lease"
    assert server.held(CARD) == 0


@pytest.mark.long
@pytest.mark.usefixtures("no_run_log")
def test_a_holder_without_its_server_continues_and_its_slot_is_freed(server):
    with hold(CARD):
        server.stop()
    server.start()
    assert server.held(CARD) == 1
    with hold(CARD):
        assert server.held(CARD) == 1
    assert server.held(CARD) == 0

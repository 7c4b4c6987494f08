"""Which slots a run takes; that they are held, waited for and given back is shown in tests/operating."""

import socket

import pytest

from grpo_tasks.running.slots import slots_of
from schemas.config.operations import ResourcesConfig


@pytest.mark.parametrize(
    ("settings", "visible", "wanted"),
    [
        ({}, None, ["0"]),
        ({"num_processes": 3}, None, ["0", "1", "2"]),
        ({"num_processes": 2}, "5,3,1", ["3", "5"]),
        ({"gpu_slot": "shared", "num_processes": 2}, None, []),
        ({"device": "cpu", "num_processes": 2}, None, []),
    ],
    ids=str,
)
def test_a_run_takes_the_slot_of_each_of_its_cards(settings, visible, wanted, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = slots_of(ResourcesConfig(**settings), has_cards=True)
    assert found == [f"gpu-{socket.gethostname()}-{card}" for card in wanted]


def test_a_slot_with_a_name_is_one_slot():
    assert slots_of(ResourcesConfig(gpu_slot="big-card", num_processes=4)) == ["big-card"]


def test_a_machine_without_cards_waits_for_nothing():
    assert slots_of(ResourcesConfig(), has_cards=False) == []

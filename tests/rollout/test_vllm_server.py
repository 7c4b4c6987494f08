"""How servers are started: what they are given room for, and which of their paths are open."""

from pathlib import Path

import pytest

from grpo_tasks.rollout.vllm_server import command
from schemas.config.rollout import VllmConfig
from tests.rollout.servers import served
from tests.rollout.small_servers import counts, small_servers


def flags(what, address="http://127.0.0.1:8000"):
    return command(VllmConfig(), what, Path("python"), address)


def value(found, flag):
    return found[found.index(flag) + 1]


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

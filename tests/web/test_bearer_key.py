"""Which requests the check of the key lets through."""

import asyncio
import subprocess
import sys

import pytest

from grpo_tasks.kit.request_guard import BearerKey
from grpo_tasks.rollout.vllm_server import GUARD

RIGHT = (b"authorization", b"Bearer planted")


async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


def ask(*headers, path="/collective_rpc", kind="http", key="planted"):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(BearerKey(answer, key)({"type": kind, "path": path, "headers": list(headers)}, None, send))
    return sent[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/collective_rpc", "/v1/load_lora_adapter", "/health/", "/sleep", "/"])
def test_only_who_has_the_key_reaches_a_path(path):
    assert ask(RIGHT, path=path)["status"] == 200
    for headers in ([], [(b"authorization", b"Bearer plante")], [(b"authorization", b"planted")], [RIGHT, RIGHT]):
        assert ask(*headers, path=path)["status"] == 401
    assert ask(path=path, kind="websocket")["type"] == "websocket.close"


def test_everybody_may_ask_whether_the_server_runs():
    assert ask(path="/health")["status"] == 200


def test_a_server_without_a_key_refuses_everybody(monkeypatch):
    assert ask((b"authorization", b"Bearer "), key="")["status"] == 401
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert ask((b"authorization", b"Bearer "), key=None)["status"] == 401
    monkeypatch.setenv("VLLM_API_KEY", "planted")
    assert ask(RIGHT, key=None)["status"] == 200


def test_an_environment_without_our_packages_can_load_the_checks():
    load = f"import sys; sys.path.insert(0, {str(GUARD)!r}); import request_guard; request_guard.BearerKey(print)"
    # -I and -S: neither our packages nor any installed ones.
    subprocess.run([sys.executable, "-I", "-S", "-c", load], check=True)

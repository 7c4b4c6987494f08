"""MLflow's own webhook reaches the receiver of examples/webhook when the champion changes; forged messages do not."""

import base64
import hashlib
import hmac
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from flows.cli.main import app

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "webhook"
SECRET = "correct horse battery staple"


@pytest.fixture
def receiver():
    """Its address and its output."""
    command = [sys.executable, str(EXAMPLE / "receiver.py"), "0"]
    environment = os.environ | {"WEBHOOK_SECRET": SECRET}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as process:
        yield process.stdout.readline().split()[-1], process.stdout
        process.kill()


@pytest.mark.long
@pytest.mark.ci
def test_a_new_champion_and_a_rollback_reach_the_receiver(receiver, server, publish_one):
    url, output = receiver
    command = [sys.executable, str(EXAMPLE / "register.py"), server, url]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"WEBHOOK_SECRET": SECRET}, timeout=120
    )
    assert done.stdout.startswith(f"registered {url} as ")
    try:
        name = publish_one(server, "1").registered_model
        assert output.readline() == f"version 1 of {name} is the champion\n"
        publish_one(server, "2")
        assert output.readline() == f"version 2 of {name} is the champion\n"
        back = CliRunner().invoke(app, ["rollback", name, "--tracking-uri", server])
        assert back.exit_code == 0, back.output
        assert output.readline() == f"version 1 of {name} is the champion\n"
    finally:
        MlflowClient(server, server).delete_webhook(done.stdout.split()[-1])


def posted(url, body, headers):
    request = urllib.request.Request(url, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_the_receiver_refuses_forged_old_and_repeated_messages(receiver):
    url, output = receiver
    now = int(time.time())

    def message(sent, version="1", secret=SECRET, message_id="one", alias="champion"):
        body = json.dumps({"data": {"name": "m", "alias": alias, "version": version}}).encode()
        made = hmac.digest(secret.encode(), f"{message_id}.{sent}.".encode() + body, hashlib.sha256)
        signature = f"v1,{base64.b64encode(made).decode()}"
        return body, {"X-MLflow-Delivery-Id": message_id, "X-MLflow-Timestamp": str(sent), "X-MLflow-Signature": signature}

    body, headers = message(now)
    assert posted(url, body.replace(b'"1"', b'"2"'), headers) == 401
    assert posted(url, *message(now, secret="guessed")) == 401
    assert posted(url, *message(now - 301)) == 401
    assert posted(url, *message(now + 400)) == 401
    assert posted(url, body, headers | {"X-MLflow-Timestamp": str(now - 1)}) == 401
    assert posted(url, body, {}) == 401
    assert [posted(url, body, headers) for _ in range(2)] == [204, 204]
    assert posted(url, *message(now, "4", message_id="other", alias="challenger")) == 204
    assert posted(url, *message(now, "3", message_id="two")) == 204
    assert [output.readline() for _ in range(2)] == [f"version {number} of m is the champion\n" for number in (1, 3)]

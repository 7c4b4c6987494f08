"""A server of MLflow: its webhook reaches the receiver of examples/webhook, forged messages do not; no other page can use it."""

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
from tests.web_pages import FOREIGN, own_page, status

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
@pytest.mark.parametrize("database", ["server"], indirect=True)
def test_a_new_champion_and_a_rollback_reach_the_receiver(receiver, database, make_config, publish_one):
    url, output = receiver
    config, environment = make_config(database), os.environ | {"WEBHOOK_SECRET": SECRET}
    command = [sys.executable, str(EXAMPLE / "register.py"), database, url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
    assert done.stdout.startswith(f"registered {url} as ")
    name = config.registered_model
    try:
        for letter in "12":
            publish_one(config, letter)
            assert output.readline() == f"version {letter} of {name} is the champion\n"
        back = CliRunner().invoke(app, ["rollback", name, "--tracking-uri", database])
        assert back.exit_code == 0, back.output
        assert output.readline() == f"version 1 of {name} is the champion\n"
    finally:
        MlflowClient(database, database).delete_webhook(done.stdout.split()[-1])


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


READS = (
    "/api/2.0/mlflow/experiments/search?max_results=1",
    "/ajax-api/2.0/mlflow/experiments/search?max_results=1",
    "/get-artifact?path=model&run_uuid=0",
)
WRITES = {
    "/api/2.0/mlflow/experiments/create": "POST",
    "/ajax-api/2.0/mlflow/experiments/create": "POST",
    "/graphql": "POST",
    "/v1/traces": "POST",
    "/ajax-api/2.0/mlflow/upload-artifact": "POST",
    "/api/2.0/mlflow-artifacts/artifacts/planted.txt": "PUT",
    "/api/2.0/mlflow/runs/delete": "POST",
}


@pytest.mark.parametrize("page", FOREIGN)
def test_mlflow_refuses_a_page_that_is_not_its_own(server, page):
    for kind in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/json"}):
        for path, method in WRITES.items():
            assert status(server + path, FOREIGN[page] | kind, method, {"name": "planted"}) == 403, path
    for path in READS:
        assert status(server + path, FOREIGN[page]) == 403, path
    assert status(server + next(iter(WRITES)), FOREIGN[page] | {"Access-Control-Request-Method": "POST"}, "OPTIONS") == 403
    assert MlflowClient(server).get_experiment_by_name("planted") is None


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_mlflow_answers_its_own_page(server, name):
    page = own_page(server, name) | {"Content-Type": "application/json"}
    path = "/ajax-api/2.0/mlflow/experiments/search"
    assert status(server + path, page, "POST", {"max_results": 1}) == 200

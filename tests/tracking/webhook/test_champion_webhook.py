"""A change of the champion reaches the receiver of examples/webhook over HTTP, signed; a receiver that is away fails nothing."""

import importlib.util
import json
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.flow_run import FlowRun
from flows.frozen_inputs import frozen_inputs
from flows.preflight import check_webhook
from grpo_tasks.operating.webhook.champion import tell_champion_changed
from grpo_tasks.operating.webhook.send import ID, SIGNATURE, TIME, send, signature
from grpo_tasks.tracking.models import find_champion
from grpo_tasks.tracking.registry import find_version, lineage_of, recorded_config
from grpo_tasks.tracking.runs import open_run
from schemas.config.evaluation import PromotionConfig
from schemas.config.operations import TrackingConfig, WebhookConfig
from schemas.errors import ConfigError
from schemas.results.publication import Publication
from tests.tracking.conftest import verdict
from tests.tracking.webhook.receiver import RECEIVER, SECRET, receiver

__all__ = ["receiver"]

MESSAGE = {"event": "champion.changed", "model": "m"}


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("GRPO_WEBHOOK_SECRET", SECRET)


def test_promotion_approval_and_rollback_are_told_to_the_receiver(receiver, database, make_config, publish_one, tmp_path):
    url, next_message = receiver
    tracking = TrackingConfig(tracking_uri=database, webhook=WebhookConfig(url=url))
    config = make_config(database, tracking=tracking.model_dump())
    name = config.registered_model

    publish_one(database, "1", config=config)
    first = find_champion(name, config.tracking)
    publication = Publication(
        key="k",
        directory=tmp_path,
        seconds=1.0,
        run_id=first.run_id,
        model_name=name,
        model_version="1",
        champion=True,
        tests=[verdict("base", True)],
        reason="better",
    )
    with open_run(config, key="1") as tracked:
        FlowRun(tracked, frozen_inputs(config), tmp_path, False, None).announce(publication, None)
    told = next_message()
    assert (told["event"], told["how"], told["model"]) == ("champion.changed", "promoted", name)
    assert (told["version"], told["version_before"], told["run"]["mlflow_run_id"]) == ("1", None, first.run_id)
    assert told["metric"] == {"name": "accuracy", "before": 0.8, "after": 0.9, "compared_with": "base"}
    assert "there was no champion" in told["reason"]

    asks = config.model_copy(update={"promotion": PromotionConfig(approval="manual")})
    publish_one(database, "2", config=asks)
    done = CliRunner().invoke(app, ["promote", f"{name}/2", "--by", "ann", "--tracking-uri", database])
    assert done.exit_code == 0, done.output
    told = next_message()
    assert (told["how"], told["version"], told["version_before"]) == ("approved", "2", "1")
    assert told["metric"] == {"name": "accuracy", "before": 0.8, "after": 0.9, "compared_with": "champion"}
    assert told["run_before"]["mlflow_run_id"] == first.run_id

    done = CliRunner().invoke(app, ["rollback", name, "--tracking-uri", database])
    assert done.exit_code == 0, done.output
    told = next_message()
    assert (told["how"], told["version"], told["version_before"]) == ("rolled back", "1", "2")
    assert told["metric"] == {"name": "accuracy", "before": 0.9, "after": 0.9, "compared_with": "version"}

    recorded = recorded_config(lineage_of(f"{name}/1", config.tracking), config.tracking)
    assert url in recorded
    assert SECRET not in recorded
    assert SECRET not in str(find_version(f"{name}/2", config.tracking).tags)


@pytest.fixture
def endpoint():
    """A server that gives one status after the other, and the requests that it has had."""
    statuses, seen = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            seen.append((dict(self.headers.items()), body))
            self.send_response(statuses.pop(0) if statuses else 204)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook-path", statuses, seen
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_busy_receiver_is_asked_again_with_the_same_id_and_a_valid_signature(endpoint):
    url, statuses, seen = endpoint
    statuses += [503]
    assert send(WebhookConfig(url=url), MESSAGE) == ""
    headers = [{name.lower(): value for name, value in one.items()} for one, _ in seen]
    assert len(headers) == 2
    assert headers[0][ID] == headers[1][ID]
    for one, (_, body) in zip(headers, seen, strict=True):
        assert one[SIGNATURE] == signature(SECRET.encode(), one[ID], one[TIME], body)
        assert json.loads(body) == MESSAGE
        assert SECRET not in str(one) + str(body)


@pytest.mark.parametrize("status", [302, 401, 404])
def test_a_receiver_that_refuses_is_asked_once_and_redirects_are_not_followed(endpoint, status):
    url, statuses, seen = endpoint
    statuses += [status]
    assert send(WebhookConfig(url=url), MESSAGE) == f"HTTP {status}"
    assert len(seen) == 1


def test_a_receiver_that_stays_busy_is_given_up_after_the_limit(endpoint):
    url, statuses, _ = endpoint
    statuses += [500] * 9
    assert send(WebhookConfig(url=url, limit_s=0.6), MESSAGE) == "HTTP 500, for 0.6 s"


def test_a_receiver_that_is_away_is_a_warning_that_names_the_host_and_hides_the_path(database, make_config, publish_one):
    config = publish_one(database, "1")
    hook = WebhookConfig(url="http://127.0.0.1:9/token-in-the-path", limit_s=0.1)
    said = tell_champion_changed(config.registered_model, "1", "", "promoted", config.tracking, hook)
    assert said.startswith("http://127.0.0.1:9 was not notified that version 1")
    assert "token-in-the-path" not in said
    assert find_champion(config.registered_model, config.tracking).version == "1"
    # Nothing is sent, and nothing said, where the config names no receiver.
    assert tell_champion_changed(config.registered_model, "1", "", "rolled back", config.tracking) == ""


def test_a_receiver_without_a_secret_is_refused_before_the_first_step_and_gets_nothing_unsigned(
    endpoint, make_config, database, monkeypatch
):
    url, _, seen = endpoint
    monkeypatch.delenv("GRPO_WEBHOOK_SECRET")
    tracking = TrackingConfig(tracking_uri=database, webhook=WebhookConfig(url=url))
    with pytest.raises(ConfigError, match="GRPO_WEBHOOK_SECRET is not set"):
        check_webhook(make_config(database, tracking=tracking.model_dump()))
    with pytest.raises(ConfigError):
        send(tracking.webhook, MESSAGE)
    assert not seen


def test_a_password_in_the_address_of_a_receiver_is_refused():
    with pytest.raises(ValueError, match="contains a password"):
        WebhookConfig(url="https://me:planted@host/hook")
    with pytest.raises(ValueError, match="url"):
        WebhookConfig(url="file:///etc/passwd")


def posted(url, body, headers):
    request = urllib.request.Request(url, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("names", [(ID, TIME, SIGNATURE), ("X-MLflow-Delivery-Id", "X-MLflow-Timestamp", "X-MLflow-Signature")])
def test_the_receiver_refuses_forged_and_old_messages_and_handles_a_repeated_one_once(receiver, names):
    url, next_message = receiver
    now = int(time.time())

    def message(sent, body=b'{"number": 1}', secret=SECRET, message_id="one"):
        made = signature(secret.encode(), message_id, str(sent), body)
        return body, dict(zip(names, (message_id, str(sent), made), strict=True))

    body, headers = message(now)
    assert posted(url, b'{"number": 2}', headers) == 401
    assert posted(url, *message(now, secret="guessed")) == 401
    assert posted(url, *message(now - 301)) == 401
    assert posted(url, *message(now + 400)) == 401
    assert posted(url, body, headers | {names[1]: str(now - 1)}) == 401
    assert posted(url, body, {}) == 401
    assert [posted(url, body, headers) for _ in range(2)] == [204, 204]
    assert posted(url, *message(now, b'{"number": 3}', message_id="two")) == 204
    assert [next_message() for _ in range(2)] == [{"number": 1}, {"number": 3}]


def test_the_receiver_takes_the_signature_that_mlflow_makes():
    from mlflow.webhooks.delivery import _generate_hmac_signature

    spec = importlib.util.spec_from_file_location("receiver", RECEIVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = _generate_hmac_signature(SECRET, "id", "1000", '{"a": 1}')
    assert made == signature(SECRET.encode(), "id", "1000", b'{"a": 1}')
    assert module.why_not(SECRET.encode(), "id", "1000", made, b'{"a": 1}', 1000.0) == ""

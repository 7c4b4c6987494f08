"""Which requests the checks of the page and of the key let through."""

import asyncio
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.kit.request_guard import BearerKey, SameOrigin
from grpo_tasks.rollout.vllm_server import GUARD

RIGHT = (b"authorization", b"Bearer planted")
HERE = "127.0.0.1:4200"
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def call(app, **scope):
    """Messages that come back for a request."""
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, None, send))
    return sent


def ask(headers, method="POST", kind="http", hosts=()):
    raw = [(name.encode(), value.encode()) for name, value in (headers.items() if isinstance(headers, dict) else headers)]
    return call(SameOrigin(answer, hosts), type=kind, method=method, path="/api", headers=raw)


def status(headers, method="POST", hosts=()):
    return ask(headers, method, hosts=hosts)[0]["status"]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": HERE},
        {"host": "LOCALHOST:4200"},
        {"host": "[::1]:4200"},
        {"host": HERE, "origin": f"http://{HERE}"},
        {"host": HERE, "origin": "http://localhost:4200", "sec-fetch-site": "cross-site"},
        {"host": HERE, "sec-fetch-site": "same-origin"},
        {"host": HERE, "sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
        # Through a tunnel the port is another one.
        {"host": "localhost:9000", "origin": "http://localhost:9000"},
    ],
)
def test_programs_and_the_servers_own_pages_pass(headers):
    assert status(headers) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://127.0.0.1"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "http://127.0.0.1.evil.example:4200"},
        {"origin": "http://localhost:4200@evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        LINK,
    ],
)
def test_what_another_page_sends_is_refused(headers):
    assert status({"host": HERE} | headers) == 403


@pytest.mark.parametrize(
    "host",
    ["evil.example:4200", "10.evil.example", "127.0.0.1.nip.io:4200", "0.0.0.0:4200", "localhost.", "", "127.0.0.1:4200@evil"],
)
def test_another_name_is_refused_whatever_the_page(host):
    assert status({"host": host}) == 403
    assert status({"host": host, "origin": f"http://{host}"}) == 403
    assert status({"host": host}, "GET") == 403


def test_no_host_two_hosts_and_a_second_origin_are_refused():
    assert status({}) == 403
    assert status([("host", HERE), ("host", "evil.example")]) == 403
    assert status([("host", HERE), ("origin", f"http://{HERE}"), ("origin", "https://evil.example")]) == 403


def test_a_link_from_elsewhere_opens_a_page_and_a_frame_does_not():
    assert status({"host": HERE} | LINK, "GET") == 200
    assert status({"host": HERE} | LINK | {"sec-fetch-dest": "iframe"}, "GET") == 403
    assert status({"host": HERE} | LINK | {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"}, "GET") == 403


def test_a_websocket_of_another_page_is_closed_before_it_opens():
    [closed] = ask({"host": HERE, "origin": "https://evil.example"}, kind="websocket")
    assert closed["type"] == "websocket.close"
    assert ask({"host": HERE, "origin": f"http://{HERE}"}, kind="websocket")[0]["type"] != "websocket.close"


def test_further_host_names_are_allowed_by_the_environment(monkeypatch):
    monkeypatch.setenv("GRPO_ALLOWED_HOSTS", "prefect, grpo.example:8443,")
    assert status({"host": "prefect:4200"}, hosts=None) == 200
    assert status({"host": "grpo.example:8443", "origin": "https://grpo.example:8443"}, hosts=None) == 200
    assert status({"host": "grpo.example:8444"}, hosts=None) == 403
    assert status({"host": HERE, "origin": "https://grpo.example:8443"}, hosts=None) == 403
    assert status({"host": HERE}, hosts=None) == 200


@given(st.text(alphabet=st.characters(codec="latin-1"), max_size=40))
def test_no_text_but_our_own_names_passes_as_origin(text):
    allowed = {f"{scheme}://{name}:4200" for scheme in ("http", "https") for name in ("127.0.0.1", "localhost", "[::1]")}
    raw = [("host", HERE), ("origin", text)]
    assert (status(raw) == 200) <= (text in allowed)


def ask_with_key(*headers, path="/collective_rpc", kind="http", key="planted"):
    return call(BearerKey(answer, key), type=kind, path=path, headers=list(headers))[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/collective_rpc", "/health/", "/"])
def test_only_who_has_the_key_reaches_a_path(path):
    assert ask_with_key(RIGHT, path=path)["status"] == 200
    for headers in ([], [(b"authorization", b"Bearer plante")], [(b"authorization", b"planted")], [RIGHT, RIGHT]):
        assert ask_with_key(*headers, path=path)["status"] == 401
    assert ask_with_key(path=path, kind="websocket")["type"] == "websocket.close"
    assert ask_with_key(path="/health")["status"] == 200


def test_a_server_without_a_key_refuses_everybody(monkeypatch):
    empty = (b"authorization", b"Bearer ")
    assert ask_with_key(empty, key="")["status"] == 401
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert ask_with_key(empty, key=None)["status"] == 401
    monkeypatch.setenv("VLLM_API_KEY", "planted")
    assert ask_with_key(RIGHT, key=None)["status"] == 200


def test_an_environment_without_our_packages_can_load_the_checks():
    load = f"import sys; sys.path.insert(0, {str(GUARD)!r}); import request_guard; request_guard.BearerKey(print)"
    # -I and -S: neither our packages nor any installed ones.
    subprocess.run([sys.executable, "-I", "-S", "-c", load], check=True)

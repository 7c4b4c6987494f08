"""The live pages below /live/: one folder, no other file, and a password where the server has one."""

import asyncio
import base64
import os
import time

import pytest

from grpo_tasks.content.live_folder import KEPT_S, live_address, remove_old_pages
from grpo_tasks.web.live_pages import LivePages

PAGE = "ab" * 16


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_LIVE", str(tmp_path / "live"))
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / f"{PAGE}.html").write_text("curves")
    (tmp_path / "abababab.html").write_text("secret")
    return tmp_path


async def other(scope, receive, send):
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"other"})


def get(path, password=None, given=None, method="GET"):
    sent = []

    async def send(message):
        sent.append(message)

    header = [(b"authorization", b"Basic " + base64.b64encode(given.encode()))] if given else []
    scope = {"type": "http", "method": method, "path": path, "headers": header}
    asyncio.run(LivePages(other, password)(scope, None, send))
    return sent[0]["status"], sent[1]["body"], dict(sent[0]["headers"])


def test_a_page_is_served_without_scripts_and_is_never_cached(folder):
    status, body, headers = get(f"/live/{PAGE}.html")
    assert (status, body) == (200, b"curves")
    assert headers[b"cache-control"] == b"no-store"
    assert b"default-src 'none'" in headers[b"content-security-policy"]
    assert get(f"/live/{PAGE}.html", method="HEAD")[:2] == (200, b"")


@pytest.mark.parametrize("path", ["/live/../abababab.html", "/live/..%2fabababab.html", "/live/x.html", "/api/health", "/live/"])
def test_no_other_file_is_served(folder, path):
    assert get(path)[:2] == (299, b"other")


def test_an_unknown_stage_and_a_write_are_refused(folder):
    assert get(f"/live/{'cd' * 16}.html")[0] == 404
    assert get(f"/live/{PAGE}.html", method="POST")[0] == 299


def test_a_server_with_a_password_asks_for_it(folder):
    assert get(f"/live/{PAGE}.html", "me:secret")[0] == 401
    assert get(f"/live/{PAGE}.html", "me:secret", "me:wrong")[0] == 401
    assert get(f"/live/{PAGE}.html", "me:secret", "me:secret")[:2] == (200, b"curves")


def test_there_is_no_link_where_nobody_serves_the_pages(folder, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    assert live_address(PAGE) == f"http://127.0.0.1:4200/live/{PAGE}.html"
    monkeypatch.delenv("GRPO_LIVE")
    assert live_address(PAGE) is None


def test_pages_of_stages_that_ended_long_ago_are_removed_and_recent_ones_stay(folder):
    pages = folder / "live"
    old = pages / f"{'cd' * 16}.html"
    old.write_text("old")
    os.utime(old, (time.time() - KEPT_S - 60,) * 2)
    remove_old_pages(pages)
    assert [page.name for page in pages.iterdir()] == [f"{PAGE}.html"]

"""Servers that disappear during a run: training continues, and in the end everything is recorded once and in order."""

import json
import signal
import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import yaml

from tests.flows.place import SMALL, Place, end_group, prefect_server, started_mlflow, wait_for_step
from tests.ports import free_ports

pytestmark = [pytest.mark.xdist_group("away"), pytest.mark.long, pytest.mark.timeout(1800)]
STEPS = 160
LONG = SMALL | {"stages": [SMALL["stages"][0] | {"max_steps": STEPS, "save_steps": 40}]}
AWAY = 35
"""Updates that are made while a server is away, slow or failing: a quarter of a minute on a slow machine."""
CUTS = 1
"""How often the upload of each file is interrupted halfway."""


class Between(ThreadingHTTPServer):
    """Hands requests on to a server, or plays one that is ill."""

    daemon_threads = True

    def __init__(self, address):
        self.address, self.mode, self.cut = address, "well", Counter()
        self.client = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=None))
        super().__init__(("127.0.0.1", 0), _Hand)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def pass_on(self, hand):
        """Called right before a request is handed on."""

    @property
    def own(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Hand(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _hand_on(self):
        server = self.server
        size = int(self.headers.get("Content-Length") or 0)
        if server.mode == "cutting" and self.command == "PUT" and server.cut[self.path] < CUTS:
            server.cut[self.path] += 1
            self.rfile.read(size // 2)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        content = self.rfile.read(size)
        if server.mode == "away":
            self.close_connection = True
            return
        if server.mode == "failing":
            self._answer(500, b'{"error_code": "INTERNAL_ERROR", "message": "ill"}', {"Content-Type": "application/json"})
            return
        if server.mode == "slow":
            time.sleep(3.0)
        if server.mode == "hanging":
            time.sleep(120.0)
        server.pass_on(self)
        left_out = {"host", "content-length", "connection", "accept-encoding"}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        answer = server.client.request(self.command, server.address + self.path, content=content, headers=headers)
        left_out = {"content-length", "transfer-encoding", "connection", "content-encoding"}
        self._answer(answer.status_code, answer.content, {k: v for k, v in answer.headers.items() if k.lower() not in left_out})

    def _answer(self, status, content, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _hand_on  # noqa: N815 - names of the library

    def log_message(self, *_):
        pass


def journal_of(place):
    [journal] = place.root.glob("runs/small/train_stage/*/metrics.jsonl")
    return [json.loads(line) for line in journal.read_text().splitlines()]


def goes_on(place, run):
    """Training does not wait for a server."""
    wait_for_step("runs/small/train_stage/format-*/metrics.jsonl", place.root, len(journal_of(place)) + AWAY, run)


def assert_whole(place):
    """Every update once and in order in MLflow, as in the journal; one version; a parent that is finished."""
    lines = journal_of(place)
    history = place.client.get_metric_history(place.child("format", "small").info.run_id, "reward")
    assert [(point.step, point.value) for point in history] == [(line["step"], line["metrics"]["reward"]) for line in lines]
    assert len(lines) == STEPS
    assert place.parent("small").info.status == "FINISHED"
    assert len(place.client.search_model_versions("name='small'")) == 1


def assert_published_whole(place):
    """What was uploaded is what is on disk, once; the published model has a copy of its adapter."""
    [local] = place.root.glob("runs/small/merge_adapter/*/model/model.safetensors")
    stored = list((place.root / "artifacts").rglob("model.safetensors"))
    assert [path.read_bytes() == local.read_bytes() for path in stored] == [True]
    [adapter] = place.root.glob("runs/small/train_stage/*/final/adapter_model.safetensors")
    stored = list((place.root / "artifacts").rglob("adapter_model.safetensors"))
    assert [path.read_bytes() == adapter.read_bytes() for path in stored] == [True, True]


def test_mlflow_disappears_during_a_run(tmp_path, prefect_api):
    [port] = free_ports(1)
    process, place = started_mlflow(tmp_path, port), Place(tmp_path, prefect_api)
    between = Between(f"http://127.0.0.1:{port}")
    place.write("small.yaml", yaml.safe_dump(LONG | {"tracking": {"tracking_uri": between.own}}))
    try:
        run = place.start("run", "small.yaml")
        wait_for_step("runs/small/train_stage/format-*/metrics.jsonl", tmp_path, 10, run)
        for between.mode in ("slow", "failing", "away"):
            if between.mode == "away":
                end_group(process, signal.SIGKILL)
            goes_on(place, run)
        process = started_mlflow(tmp_path, port)
        between.mode = "cutting"
        output, _ = run.communicate(timeout=900)
        assert run.returncode == 0, output[-4000:]
        assert_whole(place)
        assert any("model.safetensors" in path for path in between.cut)
        assert_published_whole(place)
    finally:
        between.shutdown()
        end_group(process)


def test_prefect_disappears_during_a_run(tmp_path):
    home = tmp_path / "server"
    home.mkdir()
    with prefect_server(home) as api:
        between = Between(api.removesuffix("/api"))
        place = Place(tmp_path, f"{between.own}/api")
        place.write("small.yaml", yaml.safe_dump(LONG))
        run = place.start("run", "small.yaml")
        wait_for_step("runs/small/train_stage/format-*/metrics.jsonl", tmp_path, 10, run)
        for between.mode in ("failing", "away"):
            goes_on(place, run)
        between.mode = "well"
        output, _ = run.communicate(timeout=900)
        assert run.returncode == 0, output[-4000:]
        assert_whole(place)
        states = httpx.post(f"{api}/flow_runs/filter", json={}).json()
        assert [state["state_type"] for state in states] == ["COMPLETED"]
        between.shutdown()

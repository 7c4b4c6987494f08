"""Only Prefect's own web page can use its API: on the server of `grpo up`, and on the temporary server of a single command."""

import subprocess
import sys
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.flows.place import Place, ask
from tests.ports import free_ports
from tests.web_pages import FOREIGN, own_page, status


@pytest.mark.parametrize("page", FOREIGN)
def test_prefect_refuses_a_page_that_is_not_its_own(prefect_api, page):
    known = len(ask(f"{prefect_api}/flows/filter", {}))
    assert status(f"{prefect_api}/admin/version", FOREIGN[page]) == 403
    assert status(f"{prefect_api}/flows/filter", FOREIGN[page], "POST", {}) == 403
    assert status(f"{prefect_api}/flows/", FOREIGN[page], "POST", {"name": "planted"}) == 403
    asked = FOREIGN[page] | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    assert status(f"{prefect_api}/flows/", asked, "OPTIONS") == 403
    assert len(ask(f"{prefect_api}/flows/filter", {})) == known


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_prefect_answers_its_own_page(prefect_api, name):
    assert status(f"{prefect_api}/flows/filter", own_page(prefect_api, name), "POST", {}) == 200


def test_prefect_opens_no_websocket_for_another_page(prefect_api):
    address = prefect_api.replace("http://", "ws://") + "/events/out"
    with pytest.raises(InvalidStatus) as refused:
        connect(address, origin="https://evil.example", subprotocols=["prefect"])
    assert refused.value.response.status_code == 403
    connect(address, origin=own_page(prefect_api)["Origin"], subprotocols=["prefect"]).close()


TEMPORARY = """
import asyncio, os
from flows.cli.environment import prepare_flow
prepare_flow()
import httpx
from prefect.server.api.server import create_app
from prefect.settings import get_current_settings

async def ask(**headers):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(ephemeral=True)), base_url="http://here") as client:
        return (await client.get("/api/admin/version", **headers)).status_code

user, _, password = get_current_settings().api.auth_string.get_secret_value().partition(":")
print(asyncio.run(ask()), asyncio.run(ask(auth=(user, password))))
"""


@pytest.mark.slow
def test_the_temporary_server_of_a_command_answers_only_that_command(lone_place):
    command = [sys.executable, "-c", TEMPORARY]
    done = subprocess.run(command, env=lone_place.environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["401", "200"], done.stderr[-3000:]


DIRECT = """
import urllib.error, urllib.request
from flows.temporary_server import locked_flow

@locked_flow(name="mine", description="called by a script")
def mine():
    from prefect.server.api.server import SubprocessASGIServer
    try:
        urllib.request.urlopen(SubprocessASGIServer().api_url + "/admin/version", timeout=30)
    except urllib.error.HTTPError as refused:
        return refused.code

print("ANSWER", mine())
"""


@pytest.mark.long
def test_the_temporary_server_of_a_scripts_flow_is_locked(lone_place):
    command = [sys.executable, "-c", DIRECT]
    done = subprocess.run(command, env=lone_place.environment, capture_output=True, text=True, check=False)
    assert "ANSWER 401" in done.stdout, done.stderr[-3000:]


AT_ONCE = """
import sys
from flows.temporary_server import locked_flow
from prefect.server.api.server import SubprocessASGIServer
# Prefect draws a port from here. Two runs that draw the same one both find it free while neither server is up.
SubprocessASGIServer._port_range = range(int(sys.argv[1]), int(sys.argv[1]) + 1)

@locked_flow(name="mine", description="one of two")
def mine():
    pass

mine()
print("DONE")
"""


@pytest.mark.long
def test_two_runs_that_draw_one_port_have_their_own_servers(tmp_path):
    [port] = free_ports(1)
    runs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", AT_ONCE, str(port)]
        at = {"cwd": tmp_path / name, "env": Place(tmp_path / name).environment | {"PYTHONPATH": str(Path.cwd())}}
        runs.append(subprocess.Popen(command, **at, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    for run in runs:
        output, errors = run.communicate(timeout=300)
        assert "DONE" in output, errors[-3000:]


def test_every_flow_that_can_be_deployed_locks_its_temporary_server():
    from prefect import Flow
    from prefect.utilities.importtools import import_object

    from flows.deployments import deployments

    flows = [import_object(deployment.flow) for deployment in deployments()]
    assert len(flows) > 10
    for flow in [*flows, import_object("flows.retrain.reproduce_flow")]:
        assert type(flow).__call__ is not Flow.__call__, flow.name

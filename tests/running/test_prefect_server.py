"""What is said of a Prefect server that does not answer as one."""

import pytest

from grpo_tasks.running import prefect_server
from grpo_tasks.running.prefect_server import PrefectServer
from schemas.errors import OrchestratorError
from tests.answering import answering
from tests.ports import free_ports


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch):
    monkeypatch.setattr(prefect_server, "ATTEMPTS", 1)


@pytest.mark.parametrize(
    ("kind", "says", "fix"),
    [
        ("login refused", "refuses the login (401)", "PREFECT_API_AUTH_STRING=USER:PASSWORD"),
        ("login refused", "refuses the login (401)", "PREFECT_API_KEY"),
        ("login page", "not Prefect's API", "PREFECT_API_URL=http://HOST:PORT/api"),
        ("another server", "not Prefect's API: it answers 404", "unset PREFECT_API_URL"),
    ],
)
def test_a_server_that_is_none_of_ours_is_named_with_the_variable(kind, says, fix):
    with answering(kind) as address, pytest.raises(OrchestratorError) as refused:
        PrefectServer(f"{address}/api", f"PREFECT_API_URL={address}/api", "unset PREFECT_API_URL").count_runs()
    assert says in refused.value.message
    assert fix in refused.value.fix
    assert refused.value.place == f"PREFECT_API_URL={address}/api"


def test_a_server_that_is_not_there_is_named_with_what_starts_it():
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}/api"
    with pytest.raises(OrchestratorError, match="does not answer") as refused:
        PrefectServer(url, f"PREFECT_API_URL={url}", "unset PREFECT_API_URL").count_runs()
    assert "grpo up" in refused.value.fix

"""No web page but MLflow's own can use its server."""

import pytest
from mlflow import MlflowClient

from tests.web_pages import FOREIGN, own_page, status

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

"""The children that publish a model are forked with their libraries imported, and prove the model all the same."""

import pytest
import torch
from mlflow import MlflowClient

from grpo_tasks.processes.child import Child
from grpo_tasks.steps import publish_model
from grpo_tasks.tracking.publishing import prepare_publishing, publish
from grpo_tasks.tracking.runs import open_run
from schemas.errors import ServedModelError
from tests.tracking.conftest import verdict

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="each child imports for itself with a GPU build of torch")


@pytest.fixture
def published_by_children(database, make_config, make_merge, make_evaluation, monkeypatch, tmp_path):
    """Publishes as the step does, by child processes whose logs name every module that they import themselves."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    for server in Child.idle_servers:
        server.close()
    Child.idle_servers.clear()
    prepare_publishing()

    def make(proof=None):
        config = make_config(database)
        with open_run(config, key="run") as run:
            decision = publish(
                run,
                proof or make_merge(),
                tests=[verdict("base", True)],
                champion=None,
                evaluation=make_evaluation("merged"),
                log=lambda spec: publish_model._log(tmp_path, spec),
                prove=lambda spec: publish_model._prove(tmp_path, spec),
            )
        return config, decision

    yield make
    for server in Child.idle_servers:
        server.close()
    Child.idle_servers.clear()


@pytest.mark.long
@pytest.mark.ci
def test_neither_child_imports_mlflow_or_transformers_for_itself(published_by_children, tmp_path):
    _, decision = published_by_children()
    assert decision.champion
    for log in (tmp_path / "log.txt", tmp_path / "served" / "log.txt"):
        imported = {line.rpartition("|")[2].strip() for line in log.read_text().splitlines() if line.startswith("import time:")}
        assert imported, "the log names what was imported"
        assert not imported & {
            "mlflow",
            "mlflow.pyfunc",
            "mlflow.transformers",
            "transformers",
            "transformers.pipelines",
            "torch",
        }


@pytest.mark.long
def test_a_model_that_answers_otherwise_is_still_refused(published_by_children, make_merge, database):
    proof = make_merge()
    wrong = [answer.model_copy(update={"text": "something else"}) for answer in proof.answers]
    with pytest.raises(ServedModelError, match="something else"):
        published_by_children(proof.model_copy(update={"answers": wrong}))
    assert not MlflowClient(database).search_registered_models()

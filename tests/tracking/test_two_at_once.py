"""Two processes that record the same run in one store at once: both succeed, and nothing is stored twice."""

from functools import partial

import pytest
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag

from grpo_tasks.kit.lock import alone
from grpo_tasks.tracking.runs import KEY_TAG, open_run
from grpo_tasks.tracking.store import connect
from tests.kill_at import at_once, preload_only

KEYS = ("one", "two", "three")


@pytest.fixture(scope="module", autouse=True)
def _light_children():
    preload_only("grpo_tasks.tracking.runs")


def record(config, report):
    for key in KEYS:
        with open_run(config, key=key) as run:
            run.record(report)


def write_rows(uri, run_ids):
    """The calls that insert a row if they find none."""
    store = connect(uri)
    inputs = [DatasetInput(Dataset("train", "abc", "local", "{}"), [InputTag("mlflow.data.context", "training")])]
    for number, run_id in enumerate(run_ids):
        store.ask(lambda client, run_id=run_id: client.log_inputs(run_id, datasets=inputs))
        store.ask(lambda client, number=number: find_or_create(client, f"experiment-{number}"))
        store.ask(lambda client, run_id=run_id: client.log_param(run_id, "a", "1"))
        store.ask(lambda client, run_id=run_id: client.set_tag(run_id, "b", "2"))


def find_or_create(client, name):
    found = client.get_experiment_by_name(name)
    return found.experiment_id if found else client.create_experiment(name)


@pytest.mark.slow
def test_rows_that_two_processes_write_at_once_are_stored_once(any_store):
    client = MlflowClient(any_store)
    experiment = client.create_experiment(f"rows-{any_store[:4]}")
    run_ids = [client.create_run(experiment).info.run_id for _ in range(15)]
    assert at_once(2, partial(write_rows, any_store, run_ids)) == [0, 0]
    for run_id in run_ids:
        run = client.get_run(run_id)
        assert [found.dataset.name for found in run.inputs.dataset_inputs] == ["train"]
        assert (run.data.params, run.data.tags["b"]) == ({"a": "1"}, "2")


@pytest.mark.slow
def test_two_processes_with_one_key_share_one_run(database, make_config, data_report):
    config, client = make_config(database), MlflowClient(database)
    assert at_once(2, partial(record, config, data_report)) == [0, 0]
    runs = client.search_runs([client.get_experiment_by_name(config.experiment).experiment_id])
    assert sorted(run.data.tags[KEY_TAG] for run in runs) == sorted(KEYS)
    for run in runs:
        assert run.info.status == "FINISHED"
        assert len(run.inputs.dataset_inputs) == 2


def add_one(path):
    for _ in range(200):
        with alone(path.with_suffix(".lock")):
            path.write_text(str(int(path.read_text()) + 1))


@pytest.mark.slow
def test_only_one_process_holds_a_lock(tmp_path):
    counter = tmp_path / "count"
    counter.write_text("0")
    assert at_once(3, partial(add_one, counter)) == [0, 0, 0]
    assert counter.read_text() == "600"


def test_a_process_waiting_for_a_lock_learns_its_holder(tmp_path):
    holders = []

    class GivenUpError(Exception):
        pass

    def give_up(holder):
        holders.append(holder)
        raise GivenUpError

    with alone(tmp_path / "lock", who="the run demo"), pytest.raises(GivenUpError), alone(tmp_path / "lock", waiting=give_up):
        pass
    assert holders[0].startswith("the run demo (process ")
    with alone(tmp_path / "lock", shared=True), alone(tmp_path / "lock", shared=True):
        pass

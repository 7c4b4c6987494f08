"""Daily operation on real servers: two workers and one GPU slot, schedules, events, retraining with same, new and bad data."""

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from urllib.error import HTTPError

import psutil
import pytest
import yaml

from grpo_tasks.operating.commands import database_url
from schemas.config.run import RunConfig
from schemas.config.section import form_values
from schemas.results.model import StageResult
from tests.flows.place import SMALL, _answers
from tests.operating.conftest import FINAL
from tests.processes.waiting import until

pytestmark = [pytest.mark.xdist_group("operated"), pytest.mark.long, pytest.mark.timeout(1800)]

ROWS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(11, 31) for b in (12, 47)]


def write_rows(place, name, rows):
    place.write(f"{name}.jsonl", "\n".join(json.dumps(row) for row in rows))


def form_of(place, source):
    """A config file as the form of a deployment has it."""
    return form_values(yaml.safe_load((place.root / source).read_text()), RunConfig)


def own_data(name):
    return SMALL["data"] | {"train": [{"path": f"{name}.jsonl"}]}


def test_every_deployment_is_ready_on_its_queue_with_tags_version_and_description(operated):
    found = {entry["name"]: entry for entry in operated.ask("/deployments/filter", {})}
    single = {"validate", "rewards", "train", "merge", "evaluate", "publish"}
    assert found.keys() >= {"demo", "preset", "retrain", "sweep", "watch-data"} | single
    for entry in found.values():
        assert entry["description"]
        assert entry["version"]
        assert entry["work_queue_name"] in ("cpu", "gpu")
        assert {"grpo", entry["work_queue_name"]} <= {*entry["tags"]}
    assert found["gsm8k-qwen2.5-0.5b"]["work_queue_name"] == "gpu"


def test_a_bad_value_is_refused_by_the_running_server(operated):
    config = dict(operated.deployment("demo")["parameters"]["config"])
    before = len(operated.runs_of("demo"))
    for wrong in ({"seed": -1}, {"sead": 1}):
        with pytest.raises(HTTPError) as refused:
            operated.trigger("demo", config=config | wrong)
        assert refused.value.code == 409
        assert f"config.{next(iter(wrong))}" in refused.value.read().decode()
    assert len(operated.runs_of("demo")) == before


def test_doctor_asks_each_part_of_the_stack(operated):
    """In the folder of the stack, whose addresses no variable names."""
    report = operated.grpo("doctor")
    assert f"{operated.prefect}/api answers; its database has" in report
    assert re.search(r"deployments\tok\t1[0-9]", report)
    assert re.search(r"workers\tok\tonline: \S+-[12], \S+-[12]", report)
    assert f"{operated.mlflow} answers; its database has" in report
    assert re.search(r"MLflow artifacts\tok\tthe store takes, returns and deletes a file", report)
    assert not list(operated.root.rglob("grpo-doctor-*")), "it leaves nothing behind"


def test_both_servers_keep_their_tables_in_postgresql(operated):
    if operated.postgres is None:
        pytest.skip("PostgreSQL is not installed on this machine")
    import psycopg2

    for database, table in (("prefect", "deployment"), ("mlflow", "experiments")):
        address = database_url(operated.postgres, "postgresql", database)
        with psycopg2.connect(address) as connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT count(*) FROM {table}")
            assert cursor.fetchone()[0] > 0


def test_two_runs_that_need_one_gpu_slot_take_turns_and_both_complete(operated):
    first, second = operated.config("card-a", seed=1), operated.config("card-b", seed=2)
    slot = ["resources.gpu_slot=test-card"]
    runs = [operated.trigger("preset", source=source, overrides=slot) for source in (first, second)]
    most = 0
    while any(operated.ask(f"/flow_runs/{run['id']}")["state_type"] not in FINAL for run in runs):
        limits = operated.ask("/v2/concurrency_limits/filter", {})
        most = max([most, *(limit["active_slots"] for limit in limits if limit["name"] == "test-card")])
        time.sleep(0.2)
    for run in runs:
        operated.wait(run["id"], "COMPLETED")
    assert most == 1
    spans = [span for run in runs for span in held(operated, run["id"])]
    for before, after in zip(sorted(spans), sorted(spans)[1:], strict=False):
        assert before[1] <= after[0], "two runs held the card at once"
    shown = "\n".join(operated.log_of(run["id"]) for run in runs)
    assert "waiting for the slot test-card, held by the run" in shown


def held(place, run_id):
    """When a run's steps held the card, from its log."""
    spans, since = [], None
    for line in place.lines_of(run_id):
        at = datetime.fromisoformat(line["timestamp"])
        if line["message"].startswith("slot test-card acquired"):
            since = at
        elif since and line["message"].startswith("slot test-card released"):
            spans.append((since, at))
            since = None
    assert spans
    return spans


def test_a_killed_run_loses_its_slot_to_the_run_that_waits(operated):
    config = operated.config("killed-holder", stages=[SMALL["stages"][0] | {"max_steps": 4000, "save_steps": 1000}])
    slot = ["resources.gpu_slot=lost-card"]
    first = operated.trigger("preset", source=config, overrides=slot)
    until(lambda: processes_of("grpo_tasks.grpo", "killed-holder"))
    trainers = processes_of("grpo_tasks.grpo", "killed-holder")
    waits = operated.config("waits", resources=SMALL["resources"] | {"gpu_slot": "lost-card"})
    second = operated.trigger("train", config=form_of(operated, waits))
    operated.says(second["id"], "waiting for the slot lost-card", limit_s=120)
    # The flow's process, not only its trainer: nobody is left to give the slot back. Between the two is the fork server.
    flow_process = trainers[0].parent().parent()
    flow_process.kill()
    operated.wait(second["id"], "COMPLETED")
    assert operated.wait(first["id"])["state_type"] in ("CRASHED", "FAILED")
    assert not processes_of("grpo_tasks.grpo", "killed-holder")


def recorded(place, name):
    """A process of the stack, as stack.json has it."""
    [found] = [each for each in json.loads((place.root / ".grpo" / "stack.json").read_text()) if each["name"] == name]
    return psutil.Process(found["pid"])


def running(place, name):
    try:
        return recorded(place, name).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.ci
@pytest.mark.parametrize(("name", "address"), [("Prefect server", "/api/health"), ("MLflow server", "/health")])
def test_a_killed_server_is_started_again_on_the_same_port_by_itself(operated, name, address):
    before = recorded(operated, name)
    before.kill()
    until(lambda: running(operated, name) and recorded(operated, name) != before)
    base = operated.prefect if name == "Prefect server" else operated.mlflow
    until(lambda: _answers(f"{base}{address}"))
    assert f"the {name} had ended; starting it again" in (operated.root / ".grpo" / "supervisor.log").read_text()


def test_a_killed_worker_loses_no_run_and_grpo_up_restarts_it(operated):
    """Its run goes on without it, or the next one takes it up: never is it half done and called complete."""
    stage = SMALL["stages"][0] | {"max_steps": 40}
    untouched = operated.trigger("train", config=form_of(operated, operated.config("untouched", stages=[stage])))
    operated.wait(untouched["id"], "COMPLETED")
    run = operated.trigger("preset", source=operated.config("lost-worker", stages=[stage]))
    until(lambda: processes_of("grpo_tasks.grpo", "lost-worker"))
    trainers = processes_of("grpo_tasks.grpo", "lost-worker")
    [worker] = [process for process in trainers[0].parents() if "worker start" in " ".join(process.cmdline())]
    worker.kill()
    until(lambda: all(running(operated, f"worker {number}") for number in (1, 2)))
    # Nobody watches the supervisor: without it, a worker stays away until somebody calls `grpo up`.
    recorded(operated, "supervisor").kill()
    recorded(operated, "worker 1").kill()
    if operated.postgres:
        forgetful = operated.start("up", GRPO_POSTGRES="")
        refused, _ = forgetful.communicate(timeout=300)
        assert forgetful.returncode == 1
        assert "this stack keeps its tables in PostgreSQL" in refused
    shown = operated.grpo("up")
    assert "had ended; starting it again" in shown
    assert operated.mlflow in shown
    if operated.wait(run["id"])["state_type"] != "COMPLETED":
        operated.wait(operated.trigger("preset", source="lost-worker.yaml")["id"], "COMPLETED")
    assert not processes_of("grpo_tasks.grpo", "lost-worker")
    assert adapter(operated, "lost-worker") == adapter(operated, "untouched")
    [stage_run] = [run for run in operated.runs("lost-worker") if run.data.tags.get("grpo.stage") == "format"]
    points = operated.client.get_metric_history(stage_run.info.run_id, "reward")
    assert [point.step for point in points] == list(range(1, 41))


def adapter(place, name):
    [result] = place.root.glob(f"runs/{name}/train_stage/format-*/result.json")
    return StageResult.load(result).sha256


def processes_of(module, name):
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if module in line and name in line and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def new_run(operated, before):
    """The run of retrain that begins next, after those before."""

    def begun():
        return [run for run in operated.runs_of("retrain") if run["id"] not in before and run["state_type"] != "SCHEDULED"]

    until(begun)
    return begun()[0]


def test_a_scheduled_retraining_does_nothing_trains_or_refuses_depending_on_its_data(operated):
    write_rows(operated, "daily", ROWS)
    source = operated.config("daily", data=own_data("daily"))
    deployment = operated.deployment("retrain")

    def fire():
        """Let the schedule come due once and give the run it made."""
        before = {run["id"] for run in operated.runs_of("retrain")}
        # Prefect's scheduler needs a few seconds to see a new schedule.
        due_at = datetime.now().astimezone() + timedelta(seconds=15)
        every_day = {"interval": 24 * 3600, "anchor_date": due_at.isoformat()}
        schedule = {"schedule": every_day, "active": True, "slug": "test", "parameters": {"source": source}}
        [made] = operated.ask(f"/deployments/{deployment['id']}/schedules", [schedule])
        due = new_run(operated, before)
        operated.ask(f"/deployments/{deployment['id']}/schedules/{made['id']}", method="DELETE")
        assert due["auto_scheduled"]
        return operated.wait(due["id"])

    first = fire()
    assert first["state_type"] == "COMPLETED", operated.log_of(first["id"])
    assert operated.versions("daily") == 1

    unchanged = fire()
    assert unchanged["state_type"] == "COMPLETED"
    assert operated.says(unchanged["id"], "nothing to do: version 1 of daily was made of the same data, code and config")
    assert operated.versions("daily") == 1

    write_rows(operated, "daily", [*ROWS, {"question": "What is 50 + 50?", "answer": "100"}])
    changed = fire()
    assert changed["state_type"] == "COMPLETED", operated.log_of(changed["id"])
    assert operated.versions("daily") == 2

    write_rows(operated, "daily", [{"question": "", "answer": "3"}] * 30 + ROWS)
    bad = fire()
    assert bad["state_type"] == "FAILED"
    assert operated.says(bad["id"], "max_invalid_fraction")
    assert operated.versions("daily") == 2


def test_retraining_from_the_champion_starts_from_its_weights_and_compares_with_it(operated):
    source = operated.config("grown")
    without = operated.trigger("retrain", source=source, start_from="champion")
    assert operated.wait(without["id"])["state_type"] == "FAILED"
    assert operated.says(without["id"], "has no champion to start from")
    operated.wait(operated.trigger("retrain", source=source)["id"], "COMPLETED")
    operated.client.set_registered_model_alias("grown", "champion", "1")
    operated.wait(operated.trigger("retrain", source=source, start_from="champion")["id"], "COMPLETED")
    second = operated.client.get_model_version("grown", "2")
    assert "champions/grown-1" in operated.client.get_run(second.run_id).data.params["model.path"]
    assert "against_champion.p_value" in second.tags
    again = operated.trigger("retrain", source=source, start_from="champion")
    operated.wait(again["id"], "COMPLETED")
    assert operated.says(again["id"], "nothing to do: version 2 of grown")


def test_of_three_simultaneous_triggers_one_trains_and_two_explain(operated):
    form = {"parameters": operated.deployment("retrain")["parameters"] | {"source": operated.config("thrice")}}
    path = f"/deployments/{operated.deployment('retrain')['id']}/create_flow_run"
    with ThreadPoolExecutor(3) as senders:
        runs = list(senders.map(lambda _: operated.ask(path, form), range(3)))
    made = [datetime.fromisoformat(run["created"]) for run in runs]
    assert max(made) - min(made) < timedelta(seconds=1)
    said = [operated.wait(run["id"], "COMPLETED")["state"]["message"] for run in runs]
    nothing = "nothing to do: version 1 of thrice was made of the same data, code and config"
    assert said.count(nothing) == 2, said
    assert operated.versions("thrice") == 1
    assert operated.tasks_of(*runs, step="train_stage") == ["Completed"]


def test_new_data_sends_the_event_that_retrains(operated):
    write_rows(operated, "watched", ROWS)
    source = operated.config("watched", data=own_data("watched"))
    operated.wait(operated.trigger("watch-data", source=source)["id"], "COMPLETED")
    assert operated.versions("watched") == 0
    before = {run["id"] for run in operated.runs_of("retrain")}

    write_rows(operated, "watched", ROWS[:-2])
    operated.wait(operated.trigger("watch-data", source=source)["id"], "COMPLETED")
    run = operated.wait(new_run(operated, before)["id"], "COMPLETED")
    assert run["parameters"]["source"] == source
    assert operated.versions("watched") == 1


def test_the_end_of_another_deployment_retrains_once_its_trigger_is_switched_on(operated):
    """Waits until the validation's end has made a run of retrain, and cancels it: it would train the whole demo."""
    automations = operated.ask("/automations/filter", {"limit": 50})
    [trigger] = [found for found in automations if "after a validation" in found["name"]]
    assert not trigger["enabled"]
    before = {run["id"] for run in operated.runs_of("retrain")}
    operated.ask(f"/automations/{trigger['id']}", {"enabled": True}, method="PATCH")
    try:
        operated.wait(operated.trigger("validate")["id"], "COMPLETED")
        until(lambda: {run["id"] for run in operated.runs_of("retrain")} > before)
    finally:
        operated.ask(f"/automations/{trigger['id']}", {"enabled": False}, method="PATCH")
    made = [run for run in operated.runs_of("retrain") if run["id"] not in before]
    for run in made:
        running = operated.ask(f"/flow_runs/{run['id']}")["state_type"] == "RUNNING"
        state = {"type": "CANCELLING" if running else "CANCELLED", "name": "Cancelling" if running else "Cancelled"}
        operated.ask(f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})
        operated.wait(run["id"], "CANCELLED")
    assert len(made) == 1


def test_a_registered_model_is_evaluated_and_a_single_adapter_published(operated):
    operated.wait(operated.trigger("preset", source=operated.config("by-hand"))["id"], "COMPLETED")
    tree = dict(operated.deployment("demo")["parameters"]["config"]) | {"name": "by-hand", "evaluation": {"max_prompts": 16}}
    run = operated.trigger("evaluate", model="models:/by-hand/1", config=tree)
    operated.wait(run["id"], "COMPLETED")
    artifacts = operated.ask("/artifacts/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    assert "evaluation-model" in {artifact["key"] for artifact in artifacts}
    [adapter] = operated.root.glob("runs/by-hand/train_stage/format-*/final")
    run = operated.trigger("publish", adapter=str(adapter), config=form_of(operated, "by-hand.yaml"))
    operated.wait(run["id"], "COMPLETED")
    assert operated.says(run["id"], "merge_adapter: unchanged, skipped")
    assert operated.versions("by-hand") == 2
    # The terminal names no server, and mlflow.db is empty when the servers keep their tables in PostgreSQL.
    assert "by-hand" in operated.grpo("lineage", "by-hand/2")


def test_serve_offers_the_same_deployments_without_a_work_pool(operated):
    served = {"PREFECT_API_URL": f"{operated.prefect}/api", "MLFLOW_TRACKING_URI": operated.mlflow}
    process = operated.start("serve", **served)
    wanted = {f"{entry['name']}-served" for entry in operated.ask("/deployments/filter", {}) if "served" not in entry["name"]}
    until(lambda: process.poll() is not None or wanted <= {entry["name"] for entry in operated.ask("/deployments/filter", {})})
    assert process.poll() is None, process.communicate()[0]
    run = operated.trigger("validate-served")
    operated.wait(run["id"], "COMPLETED")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert "export PREFECT_API_URL" in operated.grpo("serve", expect=1)


@pytest.mark.parametrize("directory", [None, "{{ $GRPO_VARIABLE_THAT_IS_NOT_SET }}"])
def test_a_worker_without_a_working_directory_is_refused(operated, directory):
    demo = operated.deployment("demo")
    kept = ("flow_id", "entrypoint", "parameters", "work_pool_name", "work_queue_name")
    steps = [{"prefect.deployments.steps.set_working_directory": {"directory": directory}}] if directory else []
    plain = {key: demo[key] for key in kept} | {"name": f"plain-{len(steps)}", "pull_steps": steps}
    made = operated.ask("/deployments/", plain)
    run = operated.ask(f"/deployments/{made['id']}/create_flow_run", {})
    ended = operated.wait(run["id"])
    assert ended["state_type"] in ("FAILED", "CRASHED")
    if directory is None:
        assert operated.says(run["id"], "results would be lost")

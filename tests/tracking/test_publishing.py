"""Publishing: a version per model and run, an alias that moves only to a better model, no damaged, unproved or lost model."""

import shutil
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from mlflow.cli import gc

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.processes.child import Child
from grpo_tasks.steps import publish_model
from grpo_tasks.tracking import publishing
from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.models import Champion, check_champion, current_champion, fetch_version
from grpo_tasks.tracking.proof import prove_served
from grpo_tasks.tracking.publishing import decide, prepare_publishing
from grpo_tasks.tracking.registry import find_version, lineage_of, rollback
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.store import open_store
from schemas.errors import DamagedError, EndedByOthers, ModelError, ServedModelError, TrackingError

from .conftest import aliases_of, flip_byte, killed_at, log_files, verdict, versions_in

OLD = Champion(version="1", sha256="old", run_id="r1")
NEWER = Champion(version="2", sha256="newer", run_id="r2")
REAL = {"log": log_model, "prove": prove_served}


@pytest.mark.parametrize(
    ("base", "champion", "compared", "current", "moves", "word"),
    [
        (True, None, None, None, True, "there was no champion"),
        (False, None, None, None, False, "not better than the base"),
        (True, True, OLD, OLD, True, "better than the champion, version 1"),
        (True, False, OLD, OLD, False, "not better than the champion, version 1"),
        (False, True, OLD, OLD, False, "not better than the base"),
        (True, True, OLD, NEWER, False, "meanwhile"),
        (True, None, None, OLD, False, "meanwhile"),
        (True, True, OLD, None, True, "there was no champion"),
    ],
)
def test_the_alias_moves_only_if_base_and_current_champion_are_beaten(base, champion, compared, current, moves, word):
    tests = [verdict("base", base)] + ([] if champion is None else [verdict("champion", champion)])
    decision = decide("3", "mine", tests=tests, compared=compared, current=current)
    assert decision.champion is moves
    assert word in decision.reason


def test_the_champions_bytes_need_no_test_and_do_not_replace_it():
    assert decide("1", "old", tests=[], compared=None, current=OLD).champion
    decision = decide("5", "old", tests=[verdict("base", True)], compared=OLD, current=OLD)
    assert not decision.champion
    assert "same bytes" in decision.reason


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "server"], indirect=True)
def test_champion_moves_only_when_better_and_publishing_twice_makes_one_version(config, client, make_merge, publish_one, offer):
    first, asked = make_merge("1"), []
    with open_run(config, key="1") as run:
        # The second time, nothing is uploaded or asked.
        prove = {"prove": lambda spec: (asked.append(spec), prove_served(spec))}
        decisions = [offer(run, first, champion=None, **REAL | prove) for _ in range(2)]
    assert [(decision.version, decision.champion) for decision in decisions] == [("1", True)] * 2
    assert len(asked) == 1
    [model] = client.search_logged_models([run.experiment_id])
    assert model.tags["grpo.served_proof"] == "2 answers equal those of the merged model"
    champion = current_champion(open_store(config.tracking), config.registered_model)
    assert champion == Champion(version="1", sha256=first.sha256, run_id=run.run_id)
    assert aliases_of(config) == {"champion": "1"}
    assert not publish_one(config, "2", better=False).champion
    assert aliases_of(config) == {"champion": "1", "challenger": "2"}
    assert publish_one(config, "3").champion
    assert aliases_of(config) == {"champion": "3", "previous": "1", "challenger": "2"}
    assert versions_in(config) == [1, 2, 3]
    tags = client.get_model_version(config.registered_model, "3").tags
    assert (float(tags["against_champion.p_value"]), float(tags["accuracy"])) == (0.001, 0.9)
    assert "better than the champion, version 1" in tags["grpo.decision"]
    assert "there was no champion" in client.get_model_version(config.registered_model, "1").tags["grpo.decision"]


def test_an_adapter_other_than_the_merged_one_is_not_published(config, make_merge, offer):
    proof = make_merge("1")
    flip_byte(proof.policy.adapter / "adapter_model.safetensors")
    with pytest.raises(DamagedError, match="merge proof"), open_run(config, key="run") as run:
        offer(run, proof, **REAL)
    assert versions_in(config) == []


@pytest.mark.slow
def test_killed_between_logging_and_registering_stores_the_model_once(config, client, publish_one):
    with killed_at("create_registered_model"):
        publish_one(config, "1")
    assert publish_one(config, "1").champion
    experiment = client.get_experiment_by_name(config.experiment).experiment_id
    assert len(client.search_logged_models([experiment])) == 1
    assert versions_in(config) == [1]


@pytest.mark.slow
def test_an_interrupted_upload_is_repeated_and_the_model_stored_once(config, client, publish_one):
    tried = []

    def interrupted(spec):
        tried.append(spec.model_id)
        if len(tried) < publishing.UPLOADS:
            raise TrackingError("the connection was cut")
        log_files(spec)

    assert publish_one(config, "1", log=interrupted).champion
    assert len(set(tried)) == publishing.UPLOADS
    experiment = client.get_experiment_by_name(config.experiment).experiment_id
    assert [model.model_id for model in client.search_logged_models([experiment])] == tried[-1:]


@pytest.mark.slow
def test_a_damaged_model_is_not_published_and_the_old_stays(config, make_merge, offer, tmp_path):
    proof = make_merge()

    def published(key, **options):
        with open_run(config, key=key) as run:
            return offer(run, proof, champion=None, **options)

    def changes(spec):
        flip_byte(spec.path / "model.safetensors")
        log_model(spec)

    assert published("run").version == "1"
    # While it is uploaded, and before.
    for options in ({"log": changes}, {}):
        with pytest.raises(DamagedError, match="differs from the one that the merge proof covers"):
            published("another run", **options)
    assert versions_in(config) == [1]
    folder = fetch_version(find_version(config.registered_model, config.tracking), config.tracking, tmp_path / "mine")
    assert folder_sha256(folder) == proof.sha256


@pytest.mark.slow
def test_a_manifest_in_the_store_is_never_rewritten(config, publish_one, tmp_path):
    publish_one(config, "1")
    [stored] = tmp_path.glob("mlruns/**/publication/manifest-*.json")
    written = stored.stat().st_mtime_ns
    publish_one(config, "1")
    assert stored.stat().st_mtime_ns == written
    flip_byte(stored)
    with pytest.raises(TrackingError, match="not the one that this model was published with"):
        publish_one(config, "1")


@pytest.mark.slow
def test_a_second_decision_replaces_the_first(config, client, publish_one):
    name = config.registered_model
    assert publish_one(config, "1").champion
    # Version 1 became champion while version 2 was evaluated.
    late = publish_one(config, "2", champion=None)
    assert late.obstacle == "version 1 became champion meanwhile and was not compared with; run again"
    assert "Not promoted: version 1 became champion meanwhile" in client.get_model_version(name, "2").description
    client.set_model_version_tag(name, "2", "against_champion.mean_length", "a champion of long ago")
    first = current_champion(open_store(config.tracking), name)
    for champion in (first, None):
        # The second time, the version is the champion.
        assert publish_one(config, "2", champion=champion).reason.startswith("better than the champion, version 1")
        found = client.get_model_version(name, "2")
        assert found.tags["grpo.decision"].startswith("better than the champion, version 1")
        assert found.tags["against_champion.p_value"] == "0.001"
        assert "against_champion.mean_length" not in found.tags
        assert "Promoted: better than the champion, version 1" in found.description
        assert "- against the champion: accuracy +0.3000" in found.description
        # As after `grpo rollback`, and a person who set the alias in MLflow's page.
        client.set_model_version_tag(name, "2", "grpo.rolled_back", "{}")


@pytest.mark.slow
def test_a_version_without_files_is_never_registered(config, publish_one, tmp_path):
    publish_one(config, "1")
    shutil.move(tmp_path / "mlruns", tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="not where MLflow has left it"):
        fetch_version(find_version(f"{config.registered_model}/1", config.tracking), config.tracking, tmp_path / "lost")
    # The same run again: neither the version nor the logged model of the first time has files.
    publish_one(config, "1")
    again = find_version(f"{config.registered_model}/2", config.tracking)
    assert (fetch_version(again, config.tracking, tmp_path / "mine") / "model.safetensors").is_file()
    publish_one(config, "1")
    assert versions_in(config) == [1, 2]


@pytest.mark.slow
def test_a_champion_without_its_run_is_named_and_runs_continue(config, database, client, publish_one, make_config):
    publish_one(config, "1")
    name, run_id = config.registered_model, current_champion(open_store(config.tracking), config.registered_model).run_id
    client.delete_run(run_id)
    collected = CliRunner().invoke(gc, ["--backend-store-uri", database, "--run-ids", run_id])
    assert collected.exit_code == 0, collected.output
    with pytest.raises(ModelError, match=f"the champion of {name}, version 1") as refused:
        check_champion(name, config.tracking)
    assert "--no-champion" in refused.value.fix
    assert f"grpo rollback {name} --to VERSION" in refused.value.fix
    with pytest.raises(ModelError, match="was deleted from MLflow"):
        lineage_of(f"{name}/1", config.tracking)
    alone = make_config(database, promotion={"against_champion": False})
    for letter, before in (("2", "1"), ("3", "2")):
        decision = publish_one(alone, letter)
        assert decision.champion
        assert f"not compared with the champion, version {before}" in decision.reason
    # The alias can be moved to it, and away.
    assert rollback(name, to="1", reason="", tracking=config.tracking) == ("3", "1")
    assert rollback(name, to="2", reason="", tracking=config.tracking) == ("1", "2")
    check_champion(name, config.tracking)


@pytest.mark.slow
@pytest.mark.parametrize(("question", "versions"), [(1, []), (2, [1])])
def test_a_run_ended_by_others_while_publishing_moves_no_alias(config, client, publish_one, question, versions):
    questions = []

    def require_wanted():
        questions.append("?")
        if len(questions) == question:
            raise EndedByOthers("set to Failed", None, failed=True)

    with pytest.raises(EndedByOthers):
        publish_one(config, "1", require_wanted=require_wanted)
    assert versions_in(config) == versions
    assert current_champion(open_store(config.tracking), config.registered_model) is None
    [run] = client.search_runs([client.get_experiment_by_name(config.experiment).experiment_id])
    assert run.info.status == "FAILED"


def test_a_run_that_was_deleted_in_mlflow_is_said_and_registers_nothing(config, client, publish_one):
    deleted = []

    def log_and_delete(spec):
        log_files(spec)
        client.delete_run(spec.run_id)
        deleted.append(spec.run_id)

    with pytest.raises(TrackingError, match="was deleted in MLflow") as refused:
        publish_one(config, "1", log=log_and_delete)
    assert f"mlflow runs restore --run-id {deleted[0]}" in refused.value.fix
    assert versions_in(config) == []


def edits(name, old, new):
    def change(artifact):
        text = (artifact / name).read_text()
        assert old in text
        (artifact / name).write_text(text.replace(old, new))

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (edits("model/chat_template.jinja", "assistant", "assistent"), "the published model answers"),
        (edits("chat_model.py", "import math\n", "import math\nimport grpo_tasks.content.hashes\n"), "No module named"),
        (lambda artifact: (artifact / "model" / "model.safetensors").unlink(), "cannot be used"),
    ],
    ids=["template", "our code", "weights"],
)
def test_an_artifact_that_answers_otherwise_is_not_registered(config, client, publish_one, tmp_path, change, says):
    def log_and_spoil(spec):
        log_model(spec)
        [artifact] = tmp_path.glob(f"mlruns/*/models/{spec.model_id}/artifacts")
        change(artifact)

    with pytest.raises(ServedModelError, match=says) as refused:
        publish_one(config, "1", log=log_and_spoil, prove=prove_served)
    assert "nothing was registered" in refused.value.fix
    assert versions_in(config) == []
    experiment = client.get_experiment_by_name(config.experiment).experiment_id
    assert client.search_logged_models([experiment]) == []
    # The same run publishes the model once its artifact is right.
    assert publish_one(config, "1").champion


@pytest.fixture
def by_children(monkeypatch, tmp_path):
    """How the step logs and asks: by child processes whose logs name every module that they import themselves."""

    def close_servers():
        for server in Child.idle_servers:
            server.close()
        Child.idle_servers.clear()

    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    close_servers()
    prepare_publishing()
    yield {
        "log": partial(publish_model._run_child, "grpo_tasks.tracking.log_model", tmp_path),
        "prove": partial(publish_model._run_child, "grpo_tasks.tracking.proof", tmp_path / "served"),
    }
    close_servers()


@pytest.mark.long
@pytest.mark.ci
@pytest.mark.skipif(torch.version.cuda is not None, reason="each child imports for itself with a GPU build of torch")
def test_the_children_that_publish_import_no_library_and_prove_the_model(config, make_merge, offer, by_children, tmp_path):
    proof = make_merge()
    wrong = [answer.model_copy(update={"text": "something else"}) for answer in proof.answers]
    with pytest.raises(ServedModelError, match="something else"), open_run(config, key="run") as run:
        offer(run, proof.model_copy(update={"answers": wrong}), **by_children)
    assert versions_in(config) == []
    with open_run(config, key="run") as run:
        assert offer(run, proof, **by_children).champion
    libraries = {"mlflow", "mlflow.pyfunc", "mlflow.transformers", "transformers", "transformers.pipelines", "torch"}
    for log in (tmp_path / "log.txt", tmp_path / "served" / "log.txt"):
        imported = {line.rpartition("|")[2].strip() for line in log.read_text().splitlines() if line.startswith("import time:")}
        assert imported, "the log names what was imported"
        assert not imported & libraries

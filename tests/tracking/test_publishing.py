"""Publishing: a version per model and run, an alias that moves only to a better model, no damaged model."""

import os
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.tracking import publishing
from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.models import Champion, current_champion, fetch_version
from grpo_tasks.tracking.publishing import decide, publish
from grpo_tasks.tracking.registry import find_version
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.served.proof import prove_served
from grpo_tasks.tracking.store import open_store
from schemas.errors import DamagedError, TrackingError
from schemas.results.evaluation import PairedTest

from .conftest import flip_byte, published


def result_of(against, *, better):
    return PairedTest(
        against=against,
        metric="accuracy",
        prompts=64,
        difference=0.3 if better else 0.0,
        p_value=0.001 if better else 0.6,
        better=better,
    )


OLD = Champion(version="1", sha256="old", run_id="r1")
NEWER = Champion(version="2", sha256="newer", run_id="r2")


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
    tests = [result_of("base", better=base)]
    if champion is not None:
        tests.append(result_of("champion", better=champion))
    decision = decide("3", "mine", tests=tests, compared=compared, current=current)
    assert decision.champion is moves
    assert word in decision.reason


def test_the_champion_stays_when_published_again_and_needs_no_test():
    assert decide("1", "old", tests=[], compared=None, current=OLD).champion


def test_a_model_with_the_champions_bytes_does_not_replace_it():
    decision = decide("5", "old", tests=[result_of("base", better=True)], compared=OLD, current=OLD)
    assert not decision.champion
    assert "same bytes" in decision.reason


@pytest.mark.slow
def test_champion_moves_only_when_better_and_publishing_twice_makes_one_version(
    any_store, make_config, make_merge, make_evaluation
):
    config, client = make_config(any_store), MlflowClient(any_store)
    name, evaluation = config.registered_model, make_evaluation("merged", 0.9)
    assert current_champion(open_store(config.tracking), name) is None
    first = make_merge("1")
    with open_run(config, key="one") as run:
        for _ in range(2):
            decision = publish(
                run,
                first,
                tests=[result_of("base", better=True)],
                champion=None,
                evaluation=evaluation,
                log=log_model,
                prove=prove_served,
            )
    assert (decision.version, decision.champion) == ("1", True)

    champion = current_champion(open_store(config.tracking), name)
    assert champion == Champion(version="1", sha256=first.sha256, run_id=run.run_id)
    with open_run(config, key="two") as worse:
        tests = [result_of("base", better=True), result_of("champion", better=False)]
        decision = publish(
            worse, make_merge("2"), tests=tests, champion=champion, evaluation=evaluation, log=log_model, prove=prove_served
        )
    assert (decision.version, decision.champion) == ("2", False)
    assert current_champion(open_store(config.tracking), name) == champion

    with open_run(config, key="three") as better:
        tests = [result_of("base", better=True), result_of("champion", better=True)]
        decision = publish(
            better, make_merge("3"), tests=tests, champion=champion, evaluation=evaluation, log=log_model, prove=prove_served
        )
    assert (decision.version, decision.champion) == ("3", True)
    assert current_champion(open_store(config.tracking), name).version == "3"

    assert len(client.search_model_versions(f"name = '{name}'")) == 3
    assert client.get_run(run.run_id).info.status == "FINISHED"
    tags = client.get_model_version(name, "3").tags
    assert float(tags["against_champion.p_value"]) == 0.001
    assert float(tags["accuracy"]) == 0.9
    assert "better than the champion, version 1" in tags["grpo.decision"]
    assert "there was no champion" in client.get_model_version(name, "1").tags["grpo.decision"]


@pytest.mark.slow
def test_the_adapter_is_published_next_to_the_merged_model(any_store, make_config, make_merge, make_evaluation, tmp_path):
    config, proof = make_config(any_store), make_merge("1")
    published(config, make_evaluation, proof)
    version = find_version(f"{config.registered_model}/1", config.tracking)
    with open_store(config.tracking).as_default():
        found = Path(mlflow.artifacts.download_artifacts(f"models:/{version.name}/1/adapter", dst_path=str(tmp_path)))
    assert folder_sha256(found) == proof.policy.sha256
    # The model is what it was: the same files, for whoever downloads it.
    model = fetch_version(version, config.tracking, tmp_path / "model")
    assert folder_sha256(model) == proof.sha256


def test_an_adapter_other_than_the_merged_one_is_not_published(database, make_config, make_merge, make_evaluation):
    config, proof = make_config(database), make_merge("1")
    flip_byte(proof.policy.adapter / "adapter_model.safetensors")
    with pytest.raises(DamagedError, match="merge proof"):
        published(config, make_evaluation, proof)
    assert MlflowClient(database).search_model_versions(f"name = '{config.registered_model}'") == []


@pytest.mark.slow
def test_killed_between_logging_and_registering_stores_the_model_once(
    database, make_config, make_merge, make_evaluation, monkeypatch
):
    config, client, proof = make_config(database), MlflowClient(database), make_merge()
    tests, evaluation = [result_of("base", better=True)], make_evaluation("merged")

    def killed(*_):
        raise KeyboardInterrupt

    def attempt():
        with open_run(config, key="cut") as run:
            return run, publish(run, proof, tests=tests, champion=None, evaluation=evaluation, log=log_model, prove=prove_served)

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "_create_model", killed)
        with pytest.raises(KeyboardInterrupt):
            attempt()
    run, decision = attempt()
    assert decision.champion
    assert len(client.search_logged_models([run.experiment_id])) == 1
    assert len(client.search_model_versions(f"name = '{config.registered_model}'")) == 1


@pytest.mark.slow
def test_an_interrupted_upload_is_repeated_and_the_model_stored_once(server, make_config, make_merge, make_evaluation):
    config, client, tried = make_config(server), MlflowClient(server), []

    def interrupted(spec):
        tried.append(spec.model_id)
        if len(tried) < publishing.UPLOADS:
            raise TrackingError("the connection was cut")
        log_model(spec)

    with open_run(config, key="interrupted-upload") as run:
        tests, evaluation = [result_of("base", better=True)], make_evaluation("merged")
        assert publish(
            run, make_merge(), tests=tests, champion=None, evaluation=evaluation, log=interrupted, prove=prove_served
        ).champion
    assert len(set(tried)) == publishing.UPLOADS
    assert [model.model_id for model in client.search_logged_models([run.experiment_id])] == tried[-1:]


ANSWER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
chat = [{"role": "user", "content": "What is 15 + 27?"}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)
print("ANSWER", tokenizer.decode(tokens[0][prompt["input_ids"].shape[1]:]))
"""


@pytest.mark.long
@pytest.mark.ci
def test_what_the_mlflow_command_downloads_loads_with_transformers_alone(
    server, make_config, make_merge, make_evaluation, tmp_path
):
    config, proof = make_config(server), make_merge()
    with open_run(config, key="download") as run:
        publish(
            run,
            proof,
            tests=[result_of("base", better=True)],
            champion=None,
            evaluation=make_evaluation("merged"),
            log=log_model,
            prove=prove_served,
        )
    target = tmp_path / "downloaded"
    environment = os.environ | {"MLFLOW_TRACKING_URI": server, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mlflow", "artifacts", "download"]
    command += ["--artifact-uri", f"models:/{config.registered_model}@champion", "--dst-path", str(target)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    for file in Path(proof.model.path).iterdir():
        assert (target / "model" / file.name).read_bytes() == file.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, str(target / "model")], env=environment, check=True, capture_output=True, text=True
    )
    assert "ANSWER" in done.stdout


@pytest.mark.slow
def test_a_damaged_model_is_not_published_and_the_old_stays(database, make_config, make_merge, make_evaluation, tmp_path):
    config, client, proof = make_config(database), MlflowClient(database), make_merge()
    assert published(config, make_evaluation, proof).version == "1"
    flip_byte(Path(proof.model.path) / "model.safetensors")
    for key in ("run", "another run"):
        with pytest.raises(DamagedError, match="differs from the one that the merge proof covers"):
            published(config, make_evaluation, proof, key)
    assert [version.version for version in client.search_model_versions(f"name = '{config.registered_model}'")] == [1]
    folder = fetch_version(find_version(config.registered_model, config.tracking), config.tracking, tmp_path / "mine")
    assert folder_sha256(folder) == proof.sha256


def test_a_model_that_changes_while_it_is_uploaded_is_not_registered(database, make_config, make_merge, make_evaluation):
    config, client, proof = make_config(database), MlflowClient(database), make_merge()

    def changes(spec):
        flip_byte(spec.path / "model.safetensors")
        log_model(spec)

    with open_run(config, key="run") as run, pytest.raises(DamagedError):
        publish(
            run,
            proof,
            tests=[result_of("base", better=True)],
            champion=None,
            evaluation=make_evaluation("merged"),
            log=changes,
            prove=prove_served,
        )
    assert client.search_model_versions(f"name = '{config.registered_model}'") == []


@pytest.mark.slow
def test_a_manifest_in_the_store_is_never_rewritten(database, make_config, make_merge, make_evaluation, tmp_path):
    config, proof = make_config(database), make_merge()
    published(config, make_evaluation, proof)
    [stored] = tmp_path.glob("mlruns/**/publication/manifest-*.json")
    written = stored.stat().st_mtime_ns
    published(config, make_evaluation, proof)
    assert stored.stat().st_mtime_ns == written
    flip_byte(stored)
    with pytest.raises(TrackingError, match="not the one that this model was published with"):
        published(config, make_evaluation, proof)


@pytest.mark.slow
def test_a_second_decision_replaces_the_first(database, make_config, make_merge, make_evaluation):
    config, client, evaluation = make_config(database), MlflowClient(database), make_evaluation("merged", 0.9)
    name, passed = config.registered_model, [result_of("base", better=True), result_of("champion", better=True)]

    def offer(key, letter, tests, champion):
        with open_run(config, key=key) as run:
            return publish(
                run,
                make_merge(letter),
                tests=tests,
                champion=champion,
                evaluation=evaluation,
                log=log_model,
                prove=lambda _: None,
            )

    assert offer("one", "1", passed[:1], None).champion
    # Version 1 became champion while version 2 was evaluated.
    late = offer("two", "2", passed[:1], None)
    assert late.obstacle == "version 1 became champion meanwhile and was not compared with; run again"
    assert "Not promoted: version 1 became champion meanwhile" in client.get_model_version(name, "2").description
    client.set_model_version_tag(name, "2", "against_champion.mean_length", "a champion of long ago")
    first = current_champion(open_store(config.tracking), name)
    for tests in (passed, passed[:1]):
        # The second time, the version is the champion.
        assert offer("two", "2", tests, first).reason.startswith("better than the champion, version 1")
        found = client.get_model_version(name, "2")
        assert found.tags["grpo.decision"].startswith("better than the champion, version 1")
        assert found.tags["against_champion.p_value"] == "0.001"
        assert "against_champion.mean_length" not in found.tags
        assert "Promoted: better than the champion, version 1" in found.description
        assert "- against the champion: accuracy +0.3000" in found.description
        # As after `grpo rollback`, and a person who set the alias in MLflow's page.
        client.set_model_version_tag(name, "2", "grpo.rolled_back", "{}")

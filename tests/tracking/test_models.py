"""Registered models on this disk: complete, verified, fetched once."""

import hashlib
import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.tracking import models
from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.models import check_champion, fetch_champion, fetch_version, manifest_of
from grpo_tasks.tracking.publishing import publish
from grpo_tasks.tracking.registry import SHA_TAG, find_version
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.served.proof import prove_served
from schemas.errors import ModelError

from .conftest import flip_byte, published, verdict


@pytest.mark.slow
def test_the_champion_is_fetched_once_and_completely(server, make_config, make_merge, make_evaluation, tmp_path):
    config, proof = make_config(server), make_merge()
    name = config.registered_model
    assert fetch_champion(name, config.tracking, tmp_path / "champions") is None
    with open_run(config, key="fetch") as run:
        publish(
            run,
            proof,
            tests=[verdict("base", True)],
            champion=None,
            evaluation=make_evaluation("merged"),
            log=log_model,
            prove=prove_served,
        )
    found = fetch_champion(name, config.tracking, tmp_path / "champions")
    champion, model = found
    assert champion.sha256 == proof.sha256
    weights = Path(model.path) / "model.safetensors"
    assert weights.read_bytes() == (Path(proof.model.path) / "model.safetensors").read_bytes()
    written = weights.stat().st_mtime_ns
    assert fetch_champion(name, config.tracking, tmp_path / "champions") == found
    assert weights.stat().st_mtime_ns == written


def test_an_alias_on_something_else_than_a_model_is_refused(database, make_config, tmp_path):
    config, client = make_config(database), MlflowClient(database)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note.txt").write_text("no model")
    client.create_registered_model(config.registered_model)
    client.create_model_version(config.registered_model, str(tmp_path / "other"))
    client.set_registered_model_alias(config.registered_model, "champion", "1")
    for refused in (check_champion, lambda name, tracking: fetch_champion(name, tracking, tmp_path / "champions")):
        with pytest.raises(ModelError, match="not published by this project"):
            refused(config.registered_model, config.tracking)


@pytest.mark.slow
def test_a_download_is_complete_and_refuses_a_folder_with_other_files(any_store, publish_one, tmp_path):
    config = publish_one(any_store, "1")
    version = find_version(f"{config.registered_model}@champion", config.tracking)
    folder = fetch_version(version, config.tracking, tmp_path / "mine")
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors"}
    assert not list(tmp_path.glob("*.part"))
    assert fetch_version(version, config.tracking, tmp_path / "mine") == folder
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(ModelError, match="other files"):
        fetch_version(version, config.tracking, tmp_path / "other")
    assert (tmp_path / "other" / "thesis.tex").exists()


@pytest.mark.slow
def test_an_interrupted_download_keeps_its_complete_files(server, publish_one, tmp_path, monkeypatch):
    config = publish_one(server, "1")
    version = find_version(f"{config.registered_model}@champion", config.tracking)
    fetch, fetched = models._fetch, []

    def interrupt(store, of, name, part):
        if len(fetched) == 2:
            # What an interrupted connection leaves: the beginning of a file.
            (part / name).write_bytes(b"half")
            raise KeyboardInterrupt
        fetched.append(name)
        fetch(store, of, name, part)

    with monkeypatch.context() as patch:
        patch.setattr(models, "_fetch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch_version(version, config.tracking, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    again = []
    monkeypatch.setattr(models, "_fetch", lambda store, of, name, part: (again.append(name), fetch(store, of, name, part)))
    folder = fetch_version(version, config.tracking, tmp_path / "model")
    assert not set(again) & set(fetched)
    wanted = manifest_of(folder)
    assert set(wanted) == set(again) | set(fetched)


@pytest.mark.slow
def test_a_file_that_was_changed_in_the_store_is_refused(database, publish_one, tmp_path):
    config = publish_one(database, "1")
    version = find_version(f"{config.registered_model}@champion", config.tracking)
    [stored] = list(tmp_path.glob("mlruns/**/artifacts/model/model.safetensors"))
    stored.write_bytes(stored.read_bytes()[:-1] + b"x")
    with pytest.raises(ModelError, match=r"model\.safetensors differs from what was published"):
        fetch_version(version, config.tracking, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


@pytest.mark.slow
def test_a_manifest_cannot_write_outside_the_folder(database, publish_one, tmp_path):
    config = publish_one(database, "1")
    version = find_version(f"{config.registered_model}@champion", config.tracking)
    evil = json.dumps({"../evil": {"sha256": "00" * 32, "size": 1}})
    path = models.manifest_path(version.tags["grpo.sha256"])
    MlflowClient(database).log_text(version.run_id, evil, path)
    with pytest.raises(ModelError, match="outside the model"):
        fetch_version(version, config.tracking, tmp_path / "mine")


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["tag", "manifest", "file"])
def test_registry_tag_manifest_and_file_agree_or_the_download_fails(
    changed, database, make_config, make_merge, make_evaluation, tmp_path
):
    config, client, proof = make_config(database), MlflowClient(database), make_merge()
    published(config, make_evaluation, proof)
    other = make_merge("8")
    if changed == "tag":
        # Another model's hash, whose manifest exists too.
        published(config, make_evaluation, other, "other")
        client.set_model_version_tag(config.registered_model, "1", SHA_TAG, other.sha256)
    elif changed == "manifest":
        [stored] = tmp_path.glob("mlruns/**/publication/manifest-*.json")
        content = json.loads(stored.read_text())
        content["letter.txt"]["sha256"] = hashlib.sha256(b"8").hexdigest()
        stored.write_text(json.dumps(content))
    else:
        [stored] = tmp_path.glob("mlruns/**/letter.txt")
        stored.write_text("8")
    with pytest.raises(ModelError, match=r"does not agree|differs from what was published|no manifest"):
        fetch_version(find_version(f"{config.registered_model}/1", config.tracking), config.tracking, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


@pytest.mark.slow
def test_a_fetched_champion_that_was_changed_on_disk_is_fetched_again(
    database, make_config, make_merge, make_evaluation, tmp_path
):
    config, proof = make_config(database), make_merge()
    published(config, make_evaluation, proof)
    _, model = fetch_champion(config.registered_model, config.tracking, tmp_path / "champions")
    assert model.sha256 == proof.sha256 == folder_sha256(Path(model.path))
    flip_byte(Path(model.path) / "model.safetensors")
    (Path(model.path) / "adapter_config.json").write_text("{}")
    assert fetch_champion(config.registered_model, config.tracking, tmp_path / "champions")[1] == model
    assert folder_sha256(Path(model.path)) == proof.sha256

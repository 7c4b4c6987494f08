"""Registered models on this disk: complete, verified, fetched once."""

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.model_names import fetch_model
from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.tracking import models
from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.models import check_champion, fetch_champion, fetch_version, manifest_of
from grpo_tasks.tracking.registry import SHA_TAG, find_version
from schemas.errors import ModelError

from .conftest import flip_byte


@pytest.fixture
def version(config, publish_one):
    """A champion in the store."""
    publish_one(config, "1")
    return find_version(f"{config.registered_model}@champion", config.tracking)


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "server"], indirect=True)
def test_the_champion_is_fetched_once_completely_and_again_when_changed(config, publish_one, make_merge, tmp_path):
    name, folder, proof = config.registered_model, tmp_path / "champions", make_merge("1")
    assert fetch_champion(name, config.tracking, folder) is None
    publish_one(config, "1")
    found = fetch_champion(name, config.tracking, folder)
    champion, model = found
    assert champion.sha256 == model.sha256 == proof.sha256 == folder_sha256(Path(model.path))
    weights = Path(model.path) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert fetch_champion(name, config.tracking, folder) == found
    assert weights.stat().st_mtime_ns == written
    flip_byte(weights)
    (Path(model.path) / "adapter_config.json").write_text("{}")
    assert fetch_champion(name, config.tracking, folder) == found
    assert folder_sha256(Path(model.path)) == proof.sha256


def test_an_alias_on_something_else_than_a_model_is_refused(config, tmp_path):
    client = MlflowClient(config.tracking.tracking_uri)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "note.txt").write_text("no model")
    client.create_registered_model(config.registered_model)
    client.create_model_version(config.registered_model, str(tmp_path / "other"))
    client.set_registered_model_alias(config.registered_model, "champion", "1")
    for refused in (check_champion, lambda name, tracking: fetch_champion(name, tracking, tmp_path / "champions")):
        with pytest.raises(ModelError, match="not published by this project"):
            refused(config.registered_model, config.tracking)


@pytest.mark.slow
@pytest.mark.parametrize("database", ["server"], indirect=True)
def test_an_interrupted_download_keeps_its_complete_files(config, version, tmp_path, monkeypatch):
    fetch, fetched, again = models._fetch, [], []

    def interrupt(store, of, name, part):
        if len(fetched) == 2:
            # What an interrupted connection leaves: the beginning of a file.
            (part / name).write_bytes(b"half")
            raise KeyboardInterrupt
        fetched.append(name)
        fetch(store, of, name, part)

    monkeypatch.setattr(models, "_fetch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_version(version, config.tracking, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    monkeypatch.setattr(models, "_fetch", lambda store, of, name, part: (again.append(name), fetch(store, of, name, part)))
    folder = fetch_version(version, config.tracking, tmp_path / "model")
    assert not set(again) & set(fetched)
    assert set(manifest_of(folder)) == set(again) | set(fetched)
    assert not list(tmp_path.glob("*.part"))
    assert fetch_version(version, config.tracking, tmp_path / "model") == folder
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(ModelError, match="other files"):
        fetch_version(version, config.tracking, tmp_path / "other")
    assert (tmp_path / "other" / "thesis.tex").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ("tag", "does not agree|no manifest"),
        ("manifest", "does not agree"),
        ("manifest with another path", "outside the model"),
        ("file", r"letter\.txt differs from what was published"),
    ],
)
def test_registry_tag_manifest_and_file_agree_or_the_download_fails(
    changed, says, config, version, publish_one, make_merge, tmp_path
):
    client = MlflowClient(config.tracking.tracking_uri)
    if changed == "tag":
        # Another model's hash, whose manifest exists too.
        publish_one(config, "8", better=False)
        client.set_model_version_tag(config.registered_model, "1", SHA_TAG, make_merge("8").sha256)
    elif changed == "file":
        [stored] = tmp_path.glob("mlruns/**/letter.txt")
        stored.write_text("8")
    else:
        [stored] = tmp_path.glob("mlruns/**/publication/manifest-*.json")
        content = json.loads(stored.read_text())
        content["letter.txt"]["sha256"] = hashlib.sha256(b"8").hexdigest()
        stored.write_text(json.dumps({"../evil": content["letter.txt"]} if "path" in changed else content))
    with pytest.raises(ModelError, match=says):
        fetch_version(find_version(f"{config.registered_model}/1", config.tracking), config.tracking, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_a_name_without_a_champion_never_reaches_the_hub(config, version, tmp_path, monkeypatch):
    client = MlflowClient(config.tracking.tracking_uri)

    def no_network(*_):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    client.delete_registered_model_alias(config.registered_model, "champion")
    for numbers in ("1", "none"):
        with pytest.raises(ModelError, match=f"{config.registered_model} has no champion") as refused:
            fetch_model(config.registered_model, tmp_path / "copy", config.tracking)
        assert f"versions of {config.registered_model}: {numbers}; aliases: none" in refused.value.fix
        if numbers == "1":
            client.delete_model_version(config.registered_model, "1")


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
@pytest.mark.parametrize("database", ["server"], indirect=True)
def test_what_the_mlflow_command_downloads_loads_with_transformers_alone(config, publish_one, make_merge, tmp_path):
    publish_one(config, "1", log=log_model)
    target = tmp_path / "downloaded"
    environment = os.environ | {"MLFLOW_TRACKING_URI": config.tracking.tracking_uri, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mlflow", "artifacts", "download"]
    command += ["--artifact-uri", f"models:/{config.registered_model}@champion", "--dst-path", str(target)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert folder_sha256(target / "model") == make_merge("1").sha256
    answer = [sys.executable, "-c", ANSWER, str(target / "model")]
    assert "ANSWER" in subprocess.run(answer, env=environment, check=True, capture_output=True, text=True).stdout

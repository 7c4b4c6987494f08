"""Copying a model to a folder of the user's: whole or not at all, and a killed command can be repeated."""

import pytest

from flows import model_names
from flows.model_names import copy_model
from schemas.errors import ModelError


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_copy_that_was_cut_off_is_made_again(source, tmp_path, monkeypatch):
    def killed(given, into):
        into.mkdir()
        (into / "config.json").write_text("{}")
        raise KeyboardInterrupt

    into = tmp_path / "new" / "merged"
    into.parent.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(model_names.shutil, "copytree", killed)
        with pytest.raises(KeyboardInterrupt):
            copy_model(source, into)
    assert not into.exists()
    for _ in range(2):
        copy_model(source, into)
        assert sorted(path.name for path in into.parent.rglob("*")) == ["config.json", "merged", "model.safetensors"]
    assert (into / "model.safetensors").read_bytes() == b"weights"


def test_other_files_stay_and_the_copy_is_refused(source, tmp_path):
    into = tmp_path / "into"
    into.mkdir()
    (into / "config.json").write_text("mine")
    with pytest.raises(ModelError, match="holds other files"):
        copy_model(source, into)
    assert (into / "config.json").read_text() == "mine"

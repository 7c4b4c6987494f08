"""A model of a hub counts by the files that its revision points to in the hub cache of this disk."""

import subprocess
import sys

import pytest

CODE = """
import sys
from grpo_tasks.running.key import model_contents
from schemas.results import ModelRef
print(model_contents(ModelRef(path="somebody/model", revision=sys.argv[1] if len(sys.argv) > 1 else None))["base"])
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub cache as huggingface_hub lays it out."""
    home = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = home / "models--somebody--model"

    def commit(number, weights, ref="main"):
        folder = repository / "snapshots" / (number * 40)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(number * 40)

    return commit


def contents(*arguments):
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_branch_that_moved_is_another_model_and_the_same_files_are_the_same(hub):
    hub("a", b"weights")
    first = contents()
    assert len(first) == 64
    assert contents("main") == first
    hub("b", b"other weights")
    assert contents() != first
    assert contents("a" * 40) == first


def test_a_model_that_is_not_to_be_had_counts_by_nothing(hub):
    assert contents() == ""

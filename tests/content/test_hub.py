"""A hub model is identified by the commit of its revision; damaged files in the hub cache are refused."""

import hashlib
import subprocess
import sys

import pytest

CODE = """
import sys
from grpo_tasks.running.key import model_contents
from schemas.errors import DamagedError
from schemas.results.model import ModelRef
try:
    print(model_contents(ModelRef(path="somebody/model", revision=sys.argv[1] if len(sys.argv) > 1 else None))["base"])
except DamagedError as error:
    print("DAMAGED", error)
"""
A, B = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub cache as huggingface_hub lays it out: files are links to blobs that are named after their hashes."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "hub" / "models--somebody--model"

    def fetch(commit, weights, ref="main"):
        config = b"{}"
        blobs = {
            "config.json": (hashlib.sha1(b"blob 2\0" + config).hexdigest(), config),
            "model.safetensors": (hashlib.sha256(weights).hexdigest(), weights),
        }
        (folder := repository / "snapshots" / commit).mkdir(parents=True)
        for name, (blob, content) in blobs.items():
            (repository / "blobs").mkdir(exist_ok=True)
            (repository / "blobs" / blob).write_bytes(content)
            (folder / name).symlink_to(f"../../blobs/{blob}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
        return repository / "blobs"

    return fetch


def contents(*arguments):
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_branch_that_moved_is_another_model(hub):
    assert contents() == "", "it was never downloaded"
    hub(A, b"weights")
    assert contents() == contents("main") == A
    hub(B, b"other weights")
    assert contents() == B
    assert contents(A) == A


@pytest.mark.parametrize("size", [2, 7])
def test_a_flipped_byte_in_the_hub_cache_is_refused_by_name(hub, size):
    blobs = hub(A, b"weights")
    [blob] = [path for path in blobs.iterdir() if path.stat().st_size == size]
    blob.write_bytes(b"x" * size)
    output = contents()
    assert "is damaged (its hash differs)" in output
    assert blob.name in output

"""Hashes of files and folders: right, cached for unchanged large files, never cached wrongly."""

import hashlib
import os

import pytest

from grpo_tasks.content import hashes
from grpo_tasks.content.hashes import digest_of, file_sha256, folder_sha256

LARGE = b"x" * (2 * hashes.REMEMBERED_BYTES)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def reads(monkeypatch):
    """Names of the files that were really read."""
    found, read = [], hashes._read
    monkeypatch.setattr(hashes, "_read", lambda path: (found.append(path.name), read(path))[1])
    return found


@pytest.fixture
def settle(monkeypatch):
    """Every file counts as written long ago; the time of a change of status cannot be set."""
    monkeypatch.setattr(hashes, "_SETTLED_NS", -1)


def write(path, content=LARGE):
    path.write_bytes(content)
    return path


def test_an_unchanged_large_file_is_read_once(tmp_path, reads, settle):
    path = write(tmp_path / "model.safetensors")
    wanted = hashlib.sha256(LARGE).hexdigest()
    assert [file_sha256(path) for _ in range(3)] == [wanted] * 3
    assert reads == ["model.safetensors"]


def test_a_flipped_byte_is_noticed_even_if_size_and_mtime_are_restored(tmp_path, settle):
    path = write(tmp_path / "model.safetensors")
    before, status = file_sha256(path), path.stat()
    with path.open("r+b") as file:
        file.seek(len(LARGE) // 2)
        file.write(b"y")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert file_sha256(path) != before


def test_another_file_moved_to_the_same_path_is_noticed(tmp_path, settle):
    path = write(tmp_path / "model.safetensors")
    before = file_sha256(path)
    write(tmp_path / "other", b"z" * len(LARGE)).replace(path)
    assert file_sha256(path) != before


def test_the_hash_of_a_file_written_a_moment_ago_is_not_cached(tmp_path, reads):
    path = write(tmp_path / "model.safetensors")
    file_sha256(path)
    file_sha256(path)
    assert len(reads) == 2


def test_small_files_are_always_read(tmp_path, reads, settle):
    path = write(tmp_path / "config.json", b"{}")
    file_sha256(path)
    file_sha256(path)
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch, settle):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert file_sha256(write(tmp_path / "model.safetensors")) == hashlib.sha256(LARGE).hexdigest()


def test_a_folder_is_hashed_by_names_and_contents_and_by_nothing_else(tmp_path):
    for name in ("a/model.txt", "a/deep/file.txt", "b/model.txt", "b/deep/file.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    first = folder_sha256(tmp_path / "a")
    assert folder_sha256(tmp_path / "b") == first
    digest = hashlib.sha256()
    for name in ("deep/file.txt", "model.txt"):
        digest.update(name.encode() + b"\0" + hashlib.sha256(name.rpartition("/")[2].encode()).digest())
    assert first == digest.hexdigest()
    (tmp_path / "b" / "model.txt").rename(tmp_path / "b" / "renamed.txt")
    assert folder_sha256(tmp_path / "b") != first


def test_the_order_of_the_files_does_not_matter():
    files = [("a-b", "00" * 32), ("a/b", "11" * 32), ("a.b", "22" * 32)]
    assert digest_of(files) == digest_of(files[::-1])

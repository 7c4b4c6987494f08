"""Hashes of files and folders: right, cached for unchanged large files, never cached wrongly."""

import hashlib
import mmap
import os

import pytest

from grpo_tasks.content import hashes
from grpo_tasks.content.hashes import Change, digest_of, file_sha256, find_changes, folder_sha256, outputs_sha256, take_manifest
from grpo_tasks.running.key import model_contents
from grpo_tasks.tracking.models import manifest_of
from schemas.errors import DamagedError
from schemas.results.model import ModelRef

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
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def test_an_unchanged_large_file_is_read_once(tmp_path, reads, settle):
    path = write(tmp_path / "model.safetensors")
    wanted = hashlib.sha256(LARGE).hexdigest()
    assert [file_sha256(path, remembered=True) for _ in range(3)] == [wanted] * 3
    assert reads == ["model.safetensors"]


def test_published_files_are_read_after_memory_mapped_writes(tmp_path, settle):
    folder = tmp_path / "model"
    folder.mkdir()
    path = write(folder / "model.safetensors")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        # From the second write to a page on, no timestamp moves.
        mapped[0] = ord("y")
        published, manifest, stamp = folder_sha256(folder), take_manifest(folder), path.stat()
        stale = file_sha256(path, remembered=True)
        mapped[1] = ord("y")
        assert (path.stat().st_mtime_ns, path.stat().st_ctime_ns) == (stamp.st_mtime_ns, stamp.st_ctime_ns)
        assert file_sha256(path, remembered=True) == stale, "else this test proves nothing"
        assert file_sha256(path) == hashlib.sha256(b"yy" + LARGE[2:]).hexdigest()
        assert folder_sha256(folder) != published
        assert [change.what for change in find_changes(folder, manifest)] == ["changed"]
        assert manifest_of(folder)["model.safetensors"]["sha256"] == file_sha256(path)
        with pytest.raises(DamagedError, match="not what its step wrote"):
            model_contents(ModelRef(path=str(folder), sha256=published))


@pytest.mark.parametrize("change", ["a byte, with the old times", "another file of that name"])
def test_other_contents_of_the_same_size_are_noticed(tmp_path, settle, change):
    path = write(tmp_path / "model.safetensors")
    before, status = file_sha256(path, remembered=True), path.stat()
    if change == "another file of that name":
        write(tmp_path / "other", b"z" * len(LARGE)).replace(path)
    else:
        with path.open("r+b") as file:
            file.seek(len(LARGE) // 2)
            file.write(b"y")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert file_sha256(path, remembered=True) != before


@pytest.mark.parametrize(("content", "settled_ns"), [(LARGE, hashes._SETTLED_NS), (b"{}", -1)], ids=["a moment old", "small"])
def test_new_files_and_small_files_are_always_read(tmp_path, reads, monkeypatch, content, settled_ns):
    monkeypatch.setattr(hashes, "_SETTLED_NS", settled_ns)
    path = write(tmp_path / "model.safetensors", content)
    assert file_sha256(path, remembered=True) == file_sha256(path, remembered=True)
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch, settle):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert file_sha256(write(tmp_path / "model.safetensors"), remembered=True) == hashlib.sha256(LARGE).hexdigest()


def test_a_folder_is_hashed_by_names_and_contents_and_by_nothing_else(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder / "deep").mkdir(parents=True)
        for name in ("model.txt", "deep/file.txt"):
            (tmp_path / folder / name).write_text(name)
    first = folder_sha256(tmp_path / "a")
    assert folder_sha256(tmp_path / "b") == first
    digest = hashlib.sha256()
    for name in ("deep/file.txt", "model.txt"):
        digest.update(name.encode() + b"\0" + hashlib.sha256(name.encode()).digest())
    assert first == digest.hexdigest()
    (tmp_path / "b" / "model.txt").rename(tmp_path / "b" / "renamed.txt")
    assert folder_sha256(tmp_path / "b") != first
    files = [("a-b", "00" * 32), ("a/b", "11" * 32), ("a.b", "22" * 32)]
    assert digest_of(files) == digest_of(files[::-1])


@pytest.fixture
def folder(tmp_path):
    for name in ("final/adapter.bin", "final/config.json", "samples.parquet"):
        write(tmp_path / name, name.encode())
    return tmp_path


def test_a_manifest_has_outputs_and_finds_what_is_missing_or_changed(folder):
    for name in ("result.json", "error.json", "log.txt", "plots/reward.png", "overview.png", ".model.part"):
        write(folder / name, b"x")
    manifest = take_manifest(folder)
    assert [file.path for file in manifest] == ["final/adapter.bin", "final/config.json", "samples.parquet"]
    assert find_changes(folder, manifest) == []
    (folder / "final/adapter.bin").unlink()
    (folder / "samples.parquet").write_text("samples.parqueT")
    (folder / "new.txt").write_text("x")
    changes = find_changes(folder, manifest)
    assert changes == [Change("final/adapter.bin", "missing"), Change("samples.parquet", "changed")]


def test_a_hash_over_some_outputs_sees_only_those(folder):
    manifest = take_manifest(folder)
    first = outputs_sha256(manifest, ("final",))
    (folder / "samples.parquet").write_text("other")
    assert outputs_sha256(take_manifest(folder), ("final",)) == first
    (folder / "final/config.json").write_text("other")
    assert outputs_sha256(take_manifest(folder), ("final",)) != first
    # A name covers no file whose name merely begins with it.
    assert outputs_sha256(manifest, ("fin",)) == outputs_sha256((), ())

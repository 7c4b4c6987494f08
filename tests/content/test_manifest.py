"""The manifest of a step's folder: which files it covers, and which changes it finds."""

import pytest

from grpo_tasks.content.hashes import Change, find_changes, outputs_sha256, take_manifest


@pytest.fixture
def folder(tmp_path):
    for name in ("final/adapter.bin", "final/config.json", "samples.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_results_logs_plots_and_unfinished_files_are_not_outputs(folder):
    (folder / "plots").mkdir()
    for name in ("result.json", "error.json", "log.txt", "plots/reward.png", "overview.png", ".model.part"):
        (folder / name).write_text("x")
    assert [file.path for file in take_manifest(folder)] == ["final/adapter.bin", "final/config.json", "samples.parquet"]


def test_missing_and_changed_files_are_found_and_new_ones_ignored(folder):
    manifest = take_manifest(folder)
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


def test_a_name_covers_no_file_whose_name_merely_begins_with_it(folder):
    manifest = take_manifest(folder)
    assert outputs_sha256(manifest, ("fin",)) == outputs_sha256((), ())

"""A step is finished when its folder says so: sealed result, every file as in the manifest. Everything else runs again."""

import json

import pytest
from prefect.logging import disable_run_logger

from grpo_tasks.content.hashes import take_manifest
from grpo_tasks.running.key import content_key
from grpo_tasks.running.step import clear, finished_result, require_unchanged
from schemas.errors import DamagedError
from schemas.results.data import PreparedData
from schemas.results.model import ModelRef, StageResult

FILES = {
    "final/adapter_model.safetensors": "weights",
    "final/adapter_config.json": "{}",
    "checkpoints/step-000002/state.json": "{}",
    "checkpoints/step-000004/state.json": "{}",
    "completions/step-000002.parquet": "table",
    "metrics.jsonl": '{"step": 1}\n',
    "spec.json": "{}",
    "log.txt": "log",
}


@pytest.fixture(autouse=True)
def _no_flow():
    with disable_run_logger():
        yield


@pytest.fixture
def folder(tmp_path):
    """A stage's folder as a finished step leaves it."""
    made = tmp_path / "runs" / "small" / "train_stage" / "format-0123"
    return finish(made)


def finish(made):
    for name, text in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    result = StageResult(
        key="0123",
        directory=made,
        seconds=1.5,
        stage="format",
        model=ModelRef(path="embedded:base", adapter=made / "final"),
        sha256="5" * 64,
        steps=4,
        stopped="max_steps",
        metrics={"reward": 0.1 + 0.2},
    )
    result.sealed(take_manifest(made)).save(made / "result.json")
    return made


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_folder_as_the_step_left_it_is_finished(folder):
    result = finished_result(StageResult, folder)
    assert result.metrics == {"reward": 0.1 + 0.2}
    assert {file.path for file in result.manifest} == FILES.keys() - {"log.txt"}
    # A log that grew and plots that came later change nothing.
    (folder / "log.txt").write_text("more")
    (folder / "plots").mkdir()
    (folder / "plots" / "reward.png").write_text("drawn when it was recorded")
    assert finished_result(StageResult, folder) is not None
    # What the child process writes, before the step has ended.
    tree = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({name: tree[name] for name in tree if name not in ("manifest", "seal")}))
    assert finished_result(StageResult, folder) is None


@pytest.mark.parametrize("name", [*sorted(FILES.keys() - {"log.txt"}), "result.json"])
def test_one_flipped_or_missing_byte_of_any_output_makes_it_unfinished(folder, name):
    flip_byte(folder / name)
    assert finished_result(StageResult, folder) is None
    (folder / name).write_bytes(b"")
    assert finished_result(StageResult, folder) is None
    (folder / name).unlink()
    assert finished_result(StageResult, folder) is None


@pytest.mark.slow
def test_every_single_byte_of_the_result_is_sealed(folder):
    path = folder / "result.json"
    whole = path.read_bytes()
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        found = finished_result(StageResult, folder)
        # A changed blank between two fields changes nothing that is said.
        assert found is None or found == StageResult.model_validate_json(whole)


@pytest.mark.parametrize(
    "name", ["final/adapter_model.safetensors", "checkpoints/step-000002/state.json", "spec.json", "result.json"]
)
def test_a_stage_with_an_intact_journal_continues_from_its_checkpoint(folder, name):
    flip_byte(folder / name)
    assert finished_result(StageResult, folder) is None
    clear(folder, resumable=True)
    assert not (folder / "result.json").exists()
    assert not (folder / "final").exists()
    assert (folder / "checkpoints" / "step-000004" / "state.json").exists()
    assert (folder / "checkpoints" / "step-000002").exists() is not name.startswith("checkpoints")
    assert (folder / "metrics.jsonl").read_text() == FILES["metrics.jsonl"]
    assert not (folder / "damaged.txt").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions/step-000002.parquet"])
def test_a_stage_with_changed_journal_or_tables_starts_again(folder, name):
    flip_byte(folder / name)
    assert finished_result(StageResult, folder) is None
    clear(folder, resumable=True)
    assert list(folder.iterdir()) == []
    aside = folder.with_name("format-0123.damaged-1")
    assert (aside / "final" / "adapter_model.safetensors").read_text() == "weights"
    assert not (aside / "result.json").exists()
    flip_byte(finish(folder) / name)
    assert finished_result(StageResult, folder) is None
    clear(folder, resumable=True)
    assert folder.with_name("format-0123.damaged-2").exists()


def test_a_stage_that_was_killed_keeps_what_it_has(folder):
    (folder / "result.json").unlink()
    clear(folder, resumable=True)
    assert (folder / "final").exists()
    clear(folder, resumable=False)
    assert list(folder.iterdir()) == []


def test_a_folder_that_was_moved_is_finished_in_its_new_place(folder):
    place = folder.parent.parent / "elsewhere"
    folder.rename(place)
    result = finished_result(StageResult, place)
    assert result.directory == place
    assert result.model.adapter == place / "final"
    assert result.model.path == "embedded:base"


def test_inputs_are_compared_with_their_manifest_right_before_they_are_read(folder):
    result = finished_result(StageResult, folder)
    require_unchanged({"stages": [result], "seed": 1})
    flip_byte(folder / "metrics.jsonl")
    # No later step reads the journal; the step itself will notice.
    require_unchanged({"stages": [result]})
    flip_byte(folder / "final" / "adapter_model.safetensors")
    with pytest.raises(DamagedError, match=r"final/adapter_model\.safetensors is not what the step wrote"):
        require_unchanged({"stages": [result]})


def test_a_step_made_again_with_other_bytes_is_another_input(folder, tmp_path):
    (tmp_path / "rows.parquet").write_text("rows")
    result = PreparedData(key="k", directory=tmp_path, seconds=1.0, sources=[], rows=1)
    first = result.sealed(take_manifest(tmp_path))
    (tmp_path / "report.md").write_text("read by nobody")
    assert content_key("s", (), {"rows": result.sealed(take_manifest(tmp_path))}) == content_key("s", (), {"rows": first})
    (tmp_path / "rows.parquet").write_text("sowr")
    assert content_key("s", (), {"rows": result.sealed(take_manifest(tmp_path))}) != content_key("s", (), {"rows": first})


def test_a_changed_adapter_is_refused_and_another_is_another_input(folder):
    from grpo_tasks.content.hashes import folder_sha256

    def key(**more):
        return content_key("s", (), {"ref": ModelRef(path="embedded:base", adapter=folder / "final", **more)})

    right = folder_sha256(folder / "final")
    first = key()
    assert key(sha256=right) == first
    flip_byte(folder / "final" / "adapter_model.safetensors")
    assert key() != first
    with pytest.raises(DamagedError, match="SHA-256 differs"):
        key(sha256=right)

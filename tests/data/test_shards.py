"""A source of several files, packed files and saved data sets read as single files do, and their contents are the key."""

import errno
import gzip
import json
import os
import tarfile
import tempfile
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from flows.frozen_inputs import frozen_inputs
from flows.preflight import check_inputs
from grpo_tasks.content import shards
from grpo_tasks.content.places import row_place
from grpo_tasks.content.shards import shards_of, shards_sha256
from grpo_tasks.data import sources
from grpo_tasks.data.sources import ROWS, load_sources
from grpo_tasks.library import make
from grpo_tasks.steps.prepare_data import prepare_data
from schemas.config.data import DataConfig, DataSource
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, DataError

STAGE = {"name": "s", "rewards": ["format"]}


def frame(first, count=5):
    return pl.DataFrame({"question": [f"What is {n} + 1?" for n in range(first, first + count)], "answer": list(range(count))})


def jsonl(first, count=5):
    return frame(first, count).write_ndjson().encode()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(data):
    """The rows of a config as (question, source, line), and what was read."""
    with tempfile.TemporaryDirectory() as folder:
        read = load_sources(data, directory=Path(folder))
        return pl.read_parquet(Path(folder) / ROWS).select("question", "source", "line").rows(), read


def load(path, **source):
    return loaded(DataConfig.model_validate({"train": [{"path": path, **source}]}))


def write_parts(folder, names, write=pl.DataFrame.write_parquet):
    for at, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(frame(10 * at), folder / name)


EXPECTED = [f"What is {n} + 1?" for first in (0, 10) for n in range(first, first + 5)]


def as_shards(here):
    write_parts(here, ["parts/train-0.parquet", "parts/train-1.parquet"])
    return "parts", "parts/train-1.parquet, row 2"


def as_pattern(here):
    write_parts(here, ["a/x.csv", "b/y.csv"], pl.DataFrame.write_csv)
    (here / "a" / "notes.txt").write_text("no data")
    return "*/*.csv", "b/y.csv:3"


def as_gzip(here):
    # Two members, as `cat a.gz b.gz` makes them.
    (here / "rows.jsonl.gz").write_bytes(gzip.compress(jsonl(0)) + gzip.compress(jsonl(10)))
    return "rows.jsonl.gz", "rows.jsonl.gz:7"


def as_zstd(here):
    rows = json.dumps(pl.concat([frame(0), frame(10)]).to_dicts()).encode()
    (here / "rows.json.zst").write_bytes(pa.compress(rows, codec="zstd", asbytes=True))
    return "rows.json.zst", "rows.json.zst, record 7"


def as_saved(here):
    datasets = pytest.importorskip("datasets")
    both = pl.concat([frame(0), frame(10)])
    datasets.Dataset.from_dict(both.to_dict(as_series=False)).save_to_disk(here / "saved", num_shards=2)
    return "saved", "saved/data-00001-of-00002.arrow, row 2"


def as_saved_splits(here):
    datasets = pytest.importorskip("datasets")
    both = pl.concat([frame(0), frame(10)]).to_dict(as_series=False)
    made = {"train": datasets.Dataset.from_dict(both), "test": datasets.Dataset.from_dict(frame(50).to_dict(as_series=False))}
    datasets.DatasetDict(made).save_to_disk(here / "saved")
    return "saved", "saved/train/data-00000-of-00001.arrow, row 7"


def as_feather(here):
    pl.concat([frame(0), frame(10)]).write_ipc(here / "rows.arrow", compression="zstd")
    return "rows.arrow", "rows.arrow, row 7"


@pytest.mark.parametrize("write", [as_shards, as_pattern, as_gzip, as_zstd, as_saved, as_saved_splits, as_feather])
def test_every_form_has_the_rows_of_its_files_and_their_places(here, write):
    path, seventh = write(here)
    rows, read = load(path)
    assert [question for question, _, _ in rows] == EXPECTED
    assert row_place(*rows[6][1:]) == seventh
    assert sum(one.rows for one in read) == 10
    assert [question for question, _, _ in load(path, max_rows=7)[0]] == EXPECTED[:7]
    assert len(sources.preview(DataSource(path=path), 8)) == 8


def test_names_tell_splits_apart_as_the_hub_does(here):
    write_parts(here, ["set/train-0.parquet", "set/test-0.parquet", "set/data/validation/x.parquet"])
    (here / "set" / "dataset_info.json").write_text("{}")
    (here / "set" / ".cache.parquet").write_text("hidden")
    for split, name in (("train", "set/train-0.parquet"), ("test", "set/test-0.parquet"), ("validation", "x.parquet")):
        [only] = shards_of(DataSource(path="set", split=split))
        assert only.path.endswith(name)
    (here / "set" / "more.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"splits test, train, validation, and more.parquet belongs to none"):
        shards_of(DataSource(path="set"))


def write_config(path, *, train=(), **sections):
    data = {"train": train or [{"path": path}]}
    return RunConfig.model_validate({"data": data, "stages": [STAGE], "seed": 1, **sections})


def test_a_new_shard_changes_the_key_and_another_file_does_not(here):
    write_parts(here, ["parts/train-0.parquet", "parts/train-1.parquet"])

    def prepared(path):
        made = make(prepare_data, here / "runs", write_config(path))
        return made.key, made.rows

    before = [prepared(path) for path in ("parts", "parts/*.parquet")]
    (here / "parts" / "README.md").write_text("no rows")
    assert [prepared(path) for path in ("parts", "parts/*.parquet")] == before
    frame(90).write_parquet(here / "parts" / "train-2.parquet")
    for path, (key, rows) in zip(("parts", "parts/*.parquet"), before, strict=True):
        assert rows == 10
        assert prepared(path)[0] != key
        assert prepared(path)[1] == 15


def test_a_run_reads_the_files_of_its_start_and_no_other(here):
    write_parts(here, ["parts/train-0.parquet", "parts/train-1.parquet"])
    given = frozen_inputs(write_config("parts")).given
    [source] = given.data.train
    before = shards_sha256(source)
    frame(90).write_parquet(here / "parts" / "train-2.parquet")
    assert shards_sha256(source) == before != shards_sha256(DataSource(path="parts"))
    assert len(loaded(given.data)[0]) == 10
    frame(30).write_parquet(here / "parts" / "train-1.parquet")
    with pytest.raises(DataError, match="has changed since this run started") as caught:
        loaded(given.data)
    assert caught.value.place == "parts/train-1.parquet"


def test_an_answer_pattern_applies_to_all_files_of_its_source(here, verdict_on):
    for name in ("a0", "a1", "b0"):
        rows = [{"question": f"{name} {n}?", "answer": f"so #### {n}"} for n in range(20)]
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = [{"path": "a*.jsonl", "answer_pattern": "#### (.+)"}, {"path": "b0.jsonl"}]
    answers = verdict_on({"train": train}).accepted.select("source", "answer").rows()
    assert {answer.isdecimal() for source, answer in answers if source.startswith("a")} == {True}
    assert all(answer.startswith("so") for source, answer in answers if source == "b0.jsonl")


def bomb(here):
    (here / "big.jsonl.gz").write_bytes(gzip.compress(b"0" * 10_000_000))
    return "big.jsonl.gz"


def cut_off(here):
    (here / "cut.jsonl.gz").write_bytes(gzip.compress(jsonl(0, 500))[:-20])
    return "cut.jsonl.gz"


def not_packed(here):
    (here / "plain.jsonl.zst").write_bytes(jsonl(0))
    return "plain.jsonl.zst"


def broken_inside(here):
    (here / "table.parquet.gz").write_bytes(gzip.compress(b"PAR1 and no more"))
    return "table.parquet.gz"


def an_archive(here):
    (here / "rows.jsonl").write_bytes(jsonl(0))
    with tarfile.open(here / "rows.tar.gz", "w:gz") as archive:
        archive.add(here / "rows.jsonl")
    return "rows.tar.gz"


def only_a_pickle(here):
    folder = here / "pickled"
    folder.mkdir()
    (folder / "train.pkl").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    return "pickled"


def several_formats(here):
    write_parts(here, ["mixed/a.parquet"])
    write_parts(here, ["mixed/b.csv"], pl.DataFrame.write_csv)
    return "mixed"


def outside_the_folder(here):
    folder = here / "saved"
    folder.mkdir()
    (here / "secret.arrow").write_bytes(b"x")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../secret.arrow"}]}))
    return "saved"


def no_description(here):
    folder = here / "saved"
    folder.mkdir()
    (folder / "dataset_dict.json").write_text("[" * 10_000)
    return "saved"


def cut_arrow(here):
    pl.concat([frame(0)] * 50).write_ipc_stream(here / "cut.arrow")
    os.truncate(here / "cut.arrow", (here / "cut.arrow").stat().st_size // 2)
    return "cut.arrow"


def nothing(here):
    return "nowhere/*.csv"


HOSTILE = {
    bomb: "unpacks to more than 100 times its size",
    cut_off: "cannot be unpacked as gzip",
    not_packed: "cannot be unpacked as zstd",
    broken_inside: "cannot be read as Parquet",
    an_archive: "the suffix '.tar' belongs to no known format",
    only_a_pickle: "holds no data file",
    several_formats: "several formats: csv, parquet",
    outside_the_folder: "does not describe a saved data set",
    no_description: "does not describe a saved data set",
    cut_arrow: "cannot be read as Arrow",
    nothing: "no file matches",
}


@pytest.mark.parametrize(("write", "message"), HOSTILE.items(), ids=[write.__name__ for write in HOSTILE])
def test_hostile_files_are_refused_by_name_and_nothing_is_executed(here, monkeypatch, write, message):
    monkeypatch.setattr(sources, "_UNPACKED_BYTES", 1_000_000)
    path, scratch = write(here), here / "scratch"
    scratch.mkdir()
    # Of its own: in the machine's folder other tests unpack files at the same time.
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with pytest.raises(DataError, match=message) as caught:
        load(path)
    assert caught.value.place.startswith(path)
    assert caught.value.fix
    assert not (here / "executed").exists()
    assert not list(scratch.glob("**/big.jsonl"))


@pytest.mark.parametrize(("write", "message"), [(nothing, "no file matches"), (several_formats, "several formats")])
def test_a_source_without_usable_files_is_refused_before_any_step(here, write, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_inputs(write_config(write(here)))
    assert caught.value.place == "data.train.0.path"


def test_a_folder_that_the_disk_does_not_list_is_an_error(here, monkeypatch):
    write_parts(here, ["parts/a/one.parquet", "parts/b/two.parquet"])
    listed = os.scandir

    def broken(path):
        if Path(path).name == "b":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(DataError, match="a folder cannot be listed: Input/output error") as caught:
        shards_of(DataSource(path="parts"))
    assert caught.value.place.endswith("parts/b")


def test_a_folder_with_too_many_files_is_not_walked_to_its_end(here, monkeypatch):
    monkeypatch.setattr(shards, "MAX_SEEN", 3)
    for number in range(5):
        (here / f"{number}.txt").touch()
    with pytest.raises(DataError, match="more than 3 files"):
        load(".")

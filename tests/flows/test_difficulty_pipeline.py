"""Pass rates from the file to the report: measured before training, used by the stages, shown everywhere."""

import json

import polars as pl
import pytest
import yaml

from tests.flows.place import SMALL, Place

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("difficulty"), pytest.mark.timeout(1800)]

SUMS = [(left, right) for left in range(11, 61) for right in (13, 28)]


def write_data(place, wrong):
    """A hundred sums, the first ones with a wrong answer, and ten held-out ones."""
    truths = [left + right + (1 if index < wrong else 0) for index, (left, right) in enumerate(SUMS)]
    rows = [{"question": f"What is {a} + {b}?", "answer": str(truth)} for (a, b), truth in zip(SUMS, truths, strict=True)]
    held_out = [{"question": f"What is {number} + 77?", "answer": str(number + 77)} for number in range(70, 80)]
    place.write("train.jsonl", "\n".join(map(json.dumps, rows)))
    place.write("eval.jsonl", "\n".join(map(json.dumps, held_out)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, prefect_api):
    """A pipeline that measured its prompts and left some out; then one with another learning rate and another seed."""
    place = Place(tmp_path_factory.mktemp("difficulty"), prefect_api)
    write_data(place, wrong=50)
    data = SMALL["data"] | {"train": [{"path": "train.jsonl"}], "eval": [{"path": "eval.jsonl"}]}
    stage = SMALL["stages"][0] | {"log_completions_steps": 1}
    stages = [
        stage | {"keep_pass_rate": [0.1, 0.9]},
        stage | {"name": "again", "measure_difficulty": True, "keep_pass_rate": [0.0, 0.95]},
    ]
    config = SMALL | {"data": data, "stages": stages, "difficulty": {"samples": 4}}
    place.write("small.yaml", yaml.safe_dump(config))
    place.write("few.yaml", yaml.safe_dump(config | {"difficulty": {"samples": 4, "min_prompts": 101}}))
    place.grpo("run", "small.yaml")
    second = place.grpo("run", "small.yaml", "--set", "stages.0.learning_rate=2e-3", "--set", "seed=8")
    return place, second


def first_folder(place, stage):
    """The folder of the stage in the first run."""
    return min(place.root.glob(f"runs/small/train_stage/{stage}-*"), key=lambda path: (path / "result.json").stat().st_mtime)


def test_the_stage_trains_on_the_band_and_shows_it_in_its_tables(finished):
    place, _ = finished
    folder = first_folder(place, "format")
    kept, left_out = pl.read_parquet(folder / "train.parquet"), pl.read_parquet(folder / "left_out.parquet")
    assert kept.height + left_out.height == len(SUMS)
    assert kept["pass_rate"].is_between(0.1, 0.9).all()
    assert not left_out["pass_rate"].is_between(0.1, 0.9).any()
    completions = pl.concat([pl.read_parquet(path) for path in folder.glob("completions/*.parquet")])
    assert set(completions["prompt_id"]) <= set(kept["prompt_id"])
    rates = dict(kept.select("prompt_id", "pass_rate").iter_rows())
    assert completions["pass_rate"].to_list() == [rates[prompt] for prompt in completions["prompt_id"]]
    assert (completions["pass_rate_low"] < completions["pass_rate"]).all()


def test_report_mlflow_and_trace_show_it(finished):
    place, _ = finished
    kept, left_out = (pl.read_parquet(first_folder(place, "format") / f"{name}.parquet") for name in ("train", "left_out"))
    parent = next(run for run in place.runs("small") if "mlflow.parentRunId" not in run.data.tags)
    assert 0.0 < parent.data.metrics["difficulty/start/format/mean_pass_rate"] < 1.0
    child = next(run for run in place.runs("small") if run.data.tags.get("grpo.stage") == "format")
    assert child.data.metrics["prompts/kept"] == kept.height
    stored = {entry.path for entry in place.client.list_artifacts(child.info.run_id, "prompts")}
    assert {"prompts/left_out.parquet", "prompts/left_out.json", "prompts/train.parquet"} <= stored
    page = place.client.download_artifacts(parent.info.run_id, "report/report.html", str(place.root))
    assert f"Stage format: {kept.height} of 100 prompts" in (place.root / page).read_text()
    line = left_out.filter(reason="never_solved")["line"][0]
    shown = place.grpo("trace", f"train.jsonl:{line}", "small.yaml")
    assert "pass rate, measured from start" in shown
    assert "does not train on it: never solved" in shown


def test_other_learning_rates_and_seeds_use_the_same_measurement(finished):
    place, second = finished
    assert len(list(place.root.glob("runs/small/measure_difficulty/start-*"))) == 1
    assert "measure_difficulty-start: unchanged" in second
    # A stage that measures from its own start does it again, because its start is another model.
    assert len(list(place.root.glob("runs/small/measure_difficulty/again-*"))) == 2


def test_too_few_prompts_stop_before_any_training(finished):
    place, _ = finished
    before = set(place.root.glob("runs/small/train_stage/*"))
    shown = place.grpo("run", "few.yaml", expect=1)
    assert "too few prompts are left" in shown
    assert "difficulty.min_prompts" in shown
    assert set(place.root.glob("runs/small/train_stage/*")) == before


def test_the_command_measures_without_training(finished):
    place, _ = finished
    before = set(place.root.glob("runs/small/train_stage/*"))
    shown = place.grpo("difficulty", "small.yaml")
    assert "never solved" in shown
    assert "again" in shown
    assert set(place.root.glob("runs/small/train_stage/*")) == before

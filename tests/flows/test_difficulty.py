"""Pass rates from the file to the report: measured once before training, used by the stages, shown everywhere."""

import json

import polars as pl
import pytest
import yaml

from flows import one_step
from flows.cli.run import describe_difficulty, show_plan
from flows.cli.show import out
from grpo_tasks.data.table import read_prompts
from grpo_tasks.steps.measure_difficulty import measure_difficulty
from schemas.config.load import load_config
from schemas.config.operations import ResourcesConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError
from schemas.results.data import PromptTable
from schemas.results.model import ModelRef
from tests.flows.place import SMALL, Place

SUMS = [(left, right) for left in range(11, 61) for right in (13, 28)]


class Recorder:
    """A run whose tracking server is a list."""

    def __init__(self, output):
        self.output, self.fresh, self.resources = output, False, ResourcesConfig(device="cpu", num_threads=1)
        self.recorded, self.failed, self.steps, self.begun = [], [], 0, 0

    def record(self, result):
        self.recorded.append(result)

    def record_failure(self, step, directory, error):
        self.failed.append((step, directory, error))


FORMAT = [{"name": "format", "rewards": ["format"]}]


def config_of(**changes):
    stages = [{"name": "format", "rewards": ["incremental_format", "format"]}, {"name": "answers", "rewards": ["correctness"]}]
    settings = {"data": {"train": [{"path": "rows.jsonl"}]}, "stages": stages, "difficulty": {"samples": 3}}
    return RunConfig(**settings | changes)


@pytest.fixture
def rows(tmp_path, tokenizer):
    from grpo_tasks.data.table import prompt_id

    made = []
    for line, (left, right) in enumerate(SUMS[:6], start=1):
        messages = [{"role": "user", "content": f"What is {left} + {right}?"}]
        row = {"prompt_id": prompt_id(messages, "1"), "source": "mine.jsonl", "line": line, "prompt": messages, "answer": "1"}
        made.append(row | {"answers": None, "task": "", "prompt_tokens": 30, "extra": json.dumps({"rate": line / 10})})
    table = pl.DataFrame(made, schema_overrides={"answers": pl.List(pl.String)})
    table.write_parquet(tmp_path / "train.parquet")
    return PromptTable(path=tmp_path / "train.parquet")


def measured(run, rows, config, start=None, rollout=None):
    config = config.model_copy(update={"rollout": rollout or config.rollout})
    return measure_difficulty(run, config.difficulty_of(config.stages), "start", start or ModelRef(path="embedded:base"), rows)


@pytest.mark.slow
def test_a_measurement_is_shared_by_other_seeds_rates_and_adapters(tmp_path, rows, monkeypatch):
    monkeypatch.setattr("grpo_tasks.running.orchestrator.sys", type("sys", (), {"modules": {}}))
    config = config_of(rollout={"max_completion_length": 24})
    run = Recorder(tmp_path / "runs")
    report = measured(run, rows, config)
    samples = pl.read_parquet(report.directory / "samples.parquet")
    assert samples.height == 18
    assert set(samples["prompt_id"]) == {row.prompt_id for row in read_prompts(rows.path)}
    assert [(stage.stage, stage.prompts) for stage in report.stages] == [("format", 6), ("answers", 6)]
    # No ground truth here is right.
    assert report.stages[1].never_solved == 6
    rates = pl.read_parquet(report.pass_rates)
    solved = samples.group_by("prompt_id").agg(pl.col("format").mean()).sort("prompt_id")
    assert rates.filter(stage="format")["pass_rate"].to_list() == solved["format"].to_list()
    # The same rows in another place, another seed, a learning rate, a rank and a band: nothing is sampled again.
    elsewhere = tmp_path / "elsewhere.parquet"
    elsewhere.write_bytes(rows.path.read_bytes())
    stages = [stage.model_copy(update={"learning_rate": 1e-4, "keep_pass_rate": [0.1, 0.9]}) for stage in config.stages]
    lora = config.model.lora.model_copy(update={"r": 4})
    swept = config.model_copy(update={"stages": stages, "seed": 7, "model": config.model.model_copy(update={"lora": lora})})
    before = (report.directory / "result.json").stat().st_mtime_ns
    assert measured(run, PromptTable(path=elsewhere), swept) == report
    assert (report.directory / "result.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_screening_draws_more_only_for_solved_prompts(tmp_path, rows, monkeypatch):
    monkeypatch.setattr("grpo_tasks.running.orchestrator.sys", type("sys", (), {"modules": {}}))
    # The base model writes the format now and then.
    config = config_of(rollout={"max_completion_length": 24}, difficulty={"samples": 8}, stages=FORMAT)
    screened = config.model_copy(update={"difficulty": config.difficulty.model_copy(update={"screen": 3})})
    run = Recorder(tmp_path / "runs")
    whole, part = (pl.read_parquet(measured(run, rows, one).directory / "samples.parquet") for one in (config, screened))
    solved = set(whole.filter((pl.col("sample") < 3) & (pl.col("format") > 0))["prompt_id"])
    assert 0 < len(solved) < 6
    wanted = whole.filter((pl.col("sample") < 3) | pl.col("prompt_id").is_in(list(solved)))
    assert part.sort("prompt_id", "sample").equals(wanted.sort("prompt_id", "sample"))
    rates = pl.read_parquet(measured(run, rows, screened).pass_rates)
    assert set(rates.filter(samples=8)["prompt_id"]) == solved
    assert rates.filter(samples=3)["pass_rate"].to_list() == [0.0] * (6 - len(solved))


@pytest.mark.parametrize(
    "change",
    [
        {"rollout": {"temperature": 0.7}},
        {"difficulty": {"samples": 4}},
        {"difficulty": {"samples": 3, "success": 1.0}},
        {"difficulty": {"samples": 3, "screen": 2}},
        {"rewards": {"functions": {"format": {"weight": 3.0}}}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_a_pass_rate_depends_on_is_part_of_the_key(change):
    base = ModelRef(path="embedded:base")

    def key(config):
        return measure_difficulty.key(config.resources, config.difficulty_of(config.stages), "start", base, base)

    assert key(RunConfig.model_validate(config_of().model_dump() | change)) != key(config_of())
    assert key(RunConfig.model_validate(config_of().model_dump() | {"seed": 7})) == key(config_of())


def test_pass_rates_of_a_column_are_taken_without_sampling(tmp_path, rows, monkeypatch):
    monkeypatch.setattr("grpo_tasks.running.orchestrator.sys", type("sys", (), {"modules": {}}))
    monkeypatch.setattr("grpo_tasks.steps.measure_difficulty.run_sampling", lambda *_: pytest.fail("sampled"))
    config = config_of()
    config = config.model_copy(update={"difficulty": config.difficulty.model_copy(update={"pass_rate_column": "rate"})})
    report = measured(Recorder(tmp_path / "runs"), rows, config)
    assert (report.origin, report.samples) == ("column", 0)
    assert pl.read_parquet(report.pass_rates).filter(stage="answers")["pass_rate"].sort().to_list() == [
        pytest.approx(line / 10) for line in range(1, 7)
    ]


def test_the_command_refuses_a_config_that_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        one_step.difficulty(load_config("demo"))
    assert refused.value.fix == "--set difficulty.samples=8"
    assert list(tmp_path.iterdir()) == []


def test_the_plan_names_the_measurement_and_the_band(monkeypatch, capsys):
    monkeypatch.setattr(out, "width", 200)
    config = load_config("demo", ["difficulty.samples=8", "stages.1.keep_pass_rate=[0.1,0.9]"])
    show_plan(config)
    text = capsys.readouterr().out
    assert "measure_difficulty" in text
    assert "8 completions of every training prompt" in text
    assert "pass rates 0.1 to 0.9" in text
    assert describe_difficulty(load_config("demo")) == ""
    assert describe_difficulty(load_config("demo", ["difficulty.pass_rate_column=rate"])) == "column rate of the data"


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


@pytest.mark.long
@pytest.mark.xdist_group("difficulty")
@pytest.mark.timeout(1800)
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


@pytest.mark.long
@pytest.mark.xdist_group("difficulty")
@pytest.mark.timeout(1800)
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


@pytest.mark.long
@pytest.mark.xdist_group("difficulty")
@pytest.mark.timeout(1800)
def test_other_learning_rates_and_seeds_use_the_same_measurement(finished):
    place, second = finished
    assert len(list(place.root.glob("runs/small/measure_difficulty/start-*"))) == 1
    assert "measure_difficulty-start: unchanged" in second
    # A stage that measures from its own start does it again, because its start is another model.
    assert len(list(place.root.glob("runs/small/measure_difficulty/again-*"))) == 2


@pytest.mark.long
@pytest.mark.xdist_group("difficulty")
@pytest.mark.timeout(1800)
def test_too_few_prompts_stop_before_any_training(finished):
    place, _ = finished
    before = set(place.root.glob("runs/small/train_stage/*"))
    shown = place.grpo("run", "few.yaml", expect=1)
    assert "too few prompts are left" in shown
    assert "difficulty.min_prompts" in shown
    assert set(place.root.glob("runs/small/train_stage/*")) == before


@pytest.mark.long
@pytest.mark.xdist_group("difficulty")
@pytest.mark.timeout(1800)
def test_the_command_measures_without_training(finished):
    place, _ = finished
    before = set(place.root.glob("runs/small/train_stage/*"))
    shown = place.grpo("difficulty", "small.yaml")
    assert "never solved" in shown
    assert "again" in shown
    assert set(place.root.glob("runs/small/train_stage/*")) == before

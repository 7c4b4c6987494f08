"""What a run will take, said before it starts: as commands, on the embedded model."""

import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_tasks.planning.time_plan import LONG_S, Rows, estimate, least_seconds
from grpo_tasks.running.key import code_behind
from schemas.config.load import check_config, load_config, with_setting
from schemas.config.rollout import RolloutConfig
from schemas.config.stage import StageConfig
from schemas.results.speed import Speed
from tests.flows.place import SMALL

SPEED = Speed(
    load_s=3.0,
    prompt_s=1e-4,
    decode_s=1e-2,
    row_s=1e-3,
    update_s=0.1,
    train_s=1e-3,
    score_s=3e-4,
    generate_s=2e-2,
    lengths=[20, 30, 64],
    ended=[True, True, False],
)
TIME = r"([0-9]+ (?:s|min|h [0-9]+ min|days))"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))


def grpo(*arguments, expect=0):
    """What the command prints in a pipe."""
    outcome = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert outcome.exit_code == expect, outcome.output
    return re.sub("[│┃]", "|", outcome.output)


def steps_in(output):
    """The steps that the estimate prints with a time and a longest one."""
    _, _, table = output.partition("This run takes about ")
    return re.findall(rf"^(\S[^\t]*)\t{TIME}\t{TIME}$", table, re.MULTILINE)


@pytest.mark.long
@pytest.mark.ci
@pytest.mark.timeout(900)
def test_a_measured_dry_run_times_each_step_and_shortens_long_ones(tmp_path):
    settings = ["stages.0.max_steps=1000000", "stages.1.max_steps=3"]
    words = [word for setting in settings for word in ("--set", setting)]
    output = grpo("run", "demo", "--dry-run", "--measure", *words)
    assert [name for name, _, _ in steps_in(output)] == [
        "probe_rewards", "evaluate_model-base", "train_stage-format", "evaluate_model-format", "train_stage-correctness",
        "evaluate_model-correctness", "merge_adapter", "evaluate_model-merged", "publish_model", "in all",
    ]  # fmt: skip
    assert "nothing was run" in output
    assert list(tmp_path.iterdir()) == []
    named = re.findall(rf"^--set (\S+)\t{TIME}$", output, re.MULTILINE)
    assert len(named) == 3
    config, rows = load_config("demo", settings), Rows(train=5_000, eval=500, prompt_tokens=80.0)
    whole = estimate(config, SPEED, rows)
    assert whole.seconds > LONG_S
    for setting, _ in named:
        assert estimate(with_setting(config, setting), SPEED, rows).seconds < whole.seconds


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_resumed_run_counts_what_is_left():
    Path("small.yaml").write_text(json.dumps(SMALL))
    dry = ("run", "small.yaml", "--dry-run", "--measure")
    every = [name for name, _, _ in steps_in(grpo(*dry))]
    grpo("train", "small.yaml")
    before = sorted(Path("runs").rglob("*"))
    left = [name for name, _, _ in steps_in(grpo(*dry))]
    assert set(every) - set(left) == {"train_stage-format"}
    assert sorted(Path("runs").rglob("*")) == before
    assert [name for name, _, _ in steps_in(grpo(*dry, "--fresh"))] == every


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "why"),
    [("rollout.engine=vllm", "rollout servers sample"), ("resources.num_processes=2", "several processes train")],
)
def test_a_run_that_no_trial_can_time_is_counted(setting, why):
    said = " ".join(grpo("run", "demo", "--dry-run", "--measure", "--set", setting, expect=2).replace("|", " ").split())
    assert why in said
    assert "at most 250 updates with 16,000 completions" in said


def test_measure_alone_is_refused():
    assert "add --dry-run" in grpo("run", "demo", "--measure", expect=2)


def test_a_run_of_seconds_is_not_worth_a_trial():
    rows = Rows(train=5_000, eval=500, prompt_tokens=80.0)
    demo, small = load_config("demo"), check_config(SMALL)
    least = partial(least_seconds, rows=rows, cores=2)
    assert least(small, model_bytes=2_500_000) < 10 < least(demo, model_bytes=2_500_000)
    # The weights of a model of seven billion parameters are read at every step.
    assert least(small, model_bytes=28_000_000_000) > 10
    # 50 updates of a model with 135 million, which took two cores half an hour: they read its weights in 8 s.
    stage = {"name": "one", "rewards": ["format"], "max_steps": 50, "num_generations": 8, "per_device_train_batch_size": 64}
    rollout = RolloutConfig(max_completion_length=48)
    trained = small.model_copy(update={"stages": [StageConfig.model_validate(stage)], "rollout": rollout})
    assert least(trained, model_bytes=269_000_000, cores=10**9) < 10 < least(trained, model_bytes=269_000_000)


def test_no_step_reaches_what_estimates_it():
    steps = sorted(path.stem for path in Path(__file__).parents[2].glob("grpo_tasks/steps/[a-z]*.py"))
    reached = {name for step in steps for name in code_behind(f"grpo_tasks.steps.{step}")}
    assert not {"grpo_tasks.grpo.speed", "grpo_tasks.planning.time_plan", "schemas.results.speed"} & reached

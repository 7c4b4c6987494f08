"""`grpo sweep` before anything runs: the grid with its cost, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.sweeps.command import forecast
from schemas.config.grid import make_grid

ROOT = Path(__file__).resolve().parents[2]
RATE = "stages.0.learning_rate"


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *options: CliRunner().invoke(app, ["sweep", *map(str, options)])


def test_a_dry_run_shows_every_run_and_its_cost_and_writes_nothing(sweep, tmp_path):
    shown = sweep("demo", "--over", f"{RATE}=1e-3,1e-4", "--over", "stages.1.num_generations=4,8", "--seeds", 2, "--dry-run")
    assert shown.exit_code == 0, shown.output
    for part in ("nothing was run", "8\t1e-4\t8\t43", "12 stages to train (4 more are shared)", "stages.0.eval_steps=25"):
        assert part in shown.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("demo", "--over", f"{RATE}=abc,-1", "--over", "stages.0.betta=0,1"), ("abc", "-1", "did you mean", "fix")),
        (("demo",), ("one run is no sweep", "--over stages.0.learning_rate=1e-5,5e-6")),
        (("demo", "--over", "data.train.0.path=embedded:arithmetic_train.jsonl,no.jsonl"), ("no such file", "data.train.0.path")),
        (("nowhere.yaml", "--seeds", 2), ("no such configuration",)),
    ],
)
def test_a_bad_grid_is_refused_before_anything_runs(sweep, tmp_path, options, said):
    refused = sweep(*options)
    assert refused.exit_code == 2
    output = refused.output + refused.stderr
    assert all(part in output for part in said), output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_and_a_refusal_import_nothing_heavy():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom flows.cli.main import app\n"
        "def grpo(*arguments):\n    return CliRunner().invoke(app, arguments).output\n"
        "assert 'nothing was run' in grpo('sweep', 'demo', '--seeds', '2', '--dry-run')\n"
        "grpo('sweep', 'demo', '--over', 'seedd=1,2')\n"
        "heavy = {'torch', 'pandera', 'prefect', 'mlflow', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


OVER = ["stages.0.learning_rate=1e-5,5e-6", "stages.1.num_generations=4,8"]


def test_stages_that_runs_share_are_counted_once(tmp_path):
    [cost, _] = forecast(make_grid("demo", [], OVER, seeds=2).variants, tmp_path)
    # Two learning rates and two seeds for the first stage of 100 updates; each goes on with two group sizes for 150 updates.
    updates = 4 * 100 + 8 * 150
    assert f"8 runs, 12 stages to train (4 more are shared): at most {updates:,} updates with {64 * updates:,} c" in cost


def test_the_duration_is_that_of_earlier_runs_here(tmp_path):
    journal = tmp_path / "train_stage" / "format-1" / "metrics.jsonl"
    journal.parent.mkdir(parents=True)
    lines = [{"step": step, "metrics": {"step_time": seconds}} for step, seconds in enumerate((9.0, 0.5, 0.5), start=1)]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # 0.5 s for each of 2 x 100 + 4 x 150 updates.
    assert forecast(make_grid("demo", [], OVER, seeds=1).variants, tmp_path)[-1].startswith("about 7 min")


def test_a_stage_in_epochs_says_that_its_length_depends_on_the_data(tmp_path):
    made = make_grid("demo", ["stages.1.max_steps=null", "stages.1.num_train_epochs=1"], OVER, seeds=1)
    assert "depends on the data" in forecast(made.variants, tmp_path)[0]

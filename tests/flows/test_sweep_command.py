"""`grpo sweep` before anything runs: the grid with its cost, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app

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
    for part in ("nothing was run", "│ 8   │ 1e-4", "12 stages to train (4 more are shared)", "stages.0.eval_steps=25"):
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

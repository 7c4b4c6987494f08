"""One table names every metric, and whoever writes or reads a metric uses its name from there."""

import ast
from pathlib import Path

import pytest

from schemas import metrics
from schemas.metrics import CURVES, EVALUATION, HEADLINES, PLOTS, PROGRESS, TRAINING, describe, member

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = {metric.name for metric in TRAINING + EVALUATION}
PARTS = {part for name in NAMES if "*" in name for part in name.split("*") if len(part) > 1}
"""What a name of a family consists of: `rewards/` and `/mean`."""
ENVIRONMENTS = ("serve", "forms", "texts")
OTHER_MEANINGS: dict[str, set[str]] = {
    "flows/cli/inspection.py": {"reward"},  # a column of the completions
    "grpo_tasks/content/conversations.py": {"reward"},  # what an environment gave
    "grpo_tasks/lab/probes.py": {"reward"},  # what an environment gave
    "grpo_tasks/rewards/serve.py": {"reward"},  # what an environment gave
    "grpo_tasks/rewards/worker.py": {"reward"},  # what an environment gave
    "grpo_tasks/rollout/engine.py": {"reward"},  # what an environment gave
    "grpo_tasks/grpo/measure.py": {"reward", "loss", "entropy", "kl"},  # that column; fields of UpdateFigures
    "grpo_tasks/grpo/rounds.py": {"epoch"},  # a purpose of random numbers
    "grpo_tasks/tracking/entities.py": {"learning_rate"},  # a parameter of the stage
    "grpo_tasks/tracking/records.py": {"rewards/", "reward"},  # a folder of artifacts, the name of a verdict
    # What an environment gave, in the messages of its worker.
    **{f"grpo_tasks/environments/{name}.py": {"reward"} for name in ENVIRONMENTS},
}
"""Words that are not the name of a metric in a file."""


def literals(path):
    """Text constants of a file with their lines, docstrings left out; of an f-string its constant pieces."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    # Literal["accuracy", ...] and annotations are types.
    types = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Subscript) for inner in ast.walk(node.slice)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | types:
            yield node.lineno, node.value


@pytest.mark.slow
def test_no_metric_is_named_by_a_literal_outside_of_the_table():
    found = []
    for package in ("flows", "grpo_tasks", "schemas"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name == "schemas/metrics.py":
                continue
            found += [
                f"{name}:{line}: {text!r}"
                for line, text in literals(path)
                if text in (NAMES | PARTS) - OTHER_MEANINGS.get(name, set())
            ]
    assert found == []


def test_every_constant_is_a_metric_and_every_metric_a_constant():
    constants = [value for name, value in vars(metrics).items() if name.isupper() and isinstance(value, str)]
    assert sorted(constants) == sorted(NAMES)
    for table in (TRAINING, EVALUATION):
        assert len({metric.name for metric in table}) == len(table)


def test_every_metric_says_what_it_measures_and_every_plot_has_metrics():
    assert {plot.name for plot in PLOTS} == {metric.plot for metric in TRAINING if metric.plot}
    assert [metric.name for metric in TRAINING + EVALUATION if len(metric.meaning) < 10] == []
    assert set(HEADLINES) <= {metric.name for metric in EVALUATION if metric.column}
    assert set(CURVES) | set(PROGRESS) <= {metric.name for metric in TRAINING}


def test_a_member_of_a_family_is_described_by_its_family():
    for family in (name for name in NAMES if "*" in name):
        assert member(family, "my reward/a").split("/") == family.replace("*", "my reward_a").split("/")
        assert describe(member(family, "my_reward")).name == family
    assert describe("no_such_metric") is describe("rewards/format/no_such_figure") is None

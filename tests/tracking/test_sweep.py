"""A sweep in MLflow: one parent run with a table, the best run, and the page that compares its runs."""

import csv
import json
from pathlib import Path
from urllib.parse import parse_qs, unquote

import pytest
import yaml
from mlflow import MlflowClient

from flows.sweeps.command import show_sweep
from grpo_tasks.tracking.past_runs import recent_runs
from grpo_tasks.tracking.runs import KEY_TAG, PARENT_TAG, open_run
from grpo_tasks.tracking.sweep import ENDED, VERDICT, SweepRun, cells, compare_link, markdown
from grpo_tasks.tracking.texts import NOTE
from schemas.config.grid import make_grid
from schemas.errors import PrunedError
from schemas.results.evaluation import Interval
from schemas.results.sweep import SweepLine, SweepResult, VariantEnd


@pytest.fixture
def grid(tmp_path, database):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"extends": "demo", "name": "mine", "tracking": {"tracking_uri": database}}))
    return make_grid(str(file), [], ["stages.0.learning_rate=1e-3,1e-5"], seeds=2)


@pytest.fixture
def client(grid):
    return MlflowClient(grid.base.tracking.tracking_uri)


def ended(grid, sweep, accuracies):
    """The runs with these accuracies; None: pruned."""
    lines = []
    for variant, accuracy in zip(grid.variants, accuracies, strict=True):
        with open_run(variant.config, key=f"k{variant.number}", name=variant.label, parent_run_id=sweep.handle.run_id) as run:
            pass
        known = {"key": "k", "seconds": 60.0, "run_id": run.run_id}
        figures = {} if accuracy is None else {"accuracy": Interval(value=accuracy, low=accuracy - 0.1, high=accuracy + 0.1)}
        state = {"state": "pruned", "reason": "stage format: 0.1 is below 0.5"} if accuracy is None else {"state": "finished"}
        end = VariantEnd(**known, **state, metric="accuracy" if figures else "", figures=figures)
        lines.append(
            SweepLine(number=variant.number, label=variant.label, settings=variant.settings, seed=variant.config.seed, end=end)
        )
    handle = sweep.handle
    return SweepResult(lines=lines, run_id=handle.run_id, experiment_id=handle.experiment_id, tracking_uri="", publish="grpo run")


@pytest.mark.slow
def test_the_parent_has_the_best_run_table_and_link(grid, client, tmp_path):
    sweep = SweepRun(grid, key="s", flow={"prefect.flow_run_id": "f"})
    result = ended(grid, sweep, [0.5, None, 0.75, 0.25])
    sweep.show(result)
    for line in result.lines:
        sweep.mark(line)
    sweep.handle.end("FINISHED")
    parent = client.get_run(sweep.handle.run_id)
    note, best = parent.data.tags[NOTE], result.lines[2]
    assert note.startswith("**best: learning_rate 1e-3, seed 43, accuracy 75.0 %; 1 of 4 pruned**")
    assert f"#/experiments/{parent.info.experiment_id}/runs/{best.end.run_id}" in note
    query = parse_qs(note.partition("#/compare-runs?")[2].partition(")")[0])
    assert json.loads(unquote(query["runs"][0])) == [line.end.run_id for line in result.lines]
    assert parent.data.metrics["accuracy"] == 0.75
    assert parent.data.params["over.stages.0.learning_rate"] == "1e-3, 1e-5"
    assert parent.info.run_name.startswith("sweep mine ")
    table = Path(client.download_artifacts(parent.info.run_id, "sweep/runs.csv", str(tmp_path))).read_text()
    rows = list(csv.DictReader(table.splitlines()))
    assert [(row["stages.0.learning_rate"], row["seed"], row["accuracy"], row["accuracy low"]) for row in rows] == [
        ("1e-3", "42", "0.5", "0.4"), ("1e-5", "42", "", ""), ("1e-3", "43", "0.75", "0.65"), ("1e-5", "43", "0.25", "0.15"),
    ]  # fmt: skip
    report = Path(client.download_artifacts(parent.info.run_id, "sweep/runs.md", str(tmp_path))).read_text()
    assert "| 3 | `1e-3` | 43 | **best** | 75.0 % (65.0 to 85.0) |" in report
    assert "| `1e-3` | 2 of 2 | 62.5 % |" in report, "the mean over the seeds"
    assert "| `1e-5` | 1 of 2 | 25.0 % |" in report
    children = [client.get_run(line.end.run_id).data.tags for line in result.lines]
    assert {tags[PARENT_TAG] for tags in children} == {parent.info.run_id}
    assert [tags[ENDED].split(":")[0] for tags in children] == ["finished", "pruned", "finished", "finished"]
    assert [tags.get(VERDICT, "") for tags in children] == ["", "", "best", ""]


@pytest.mark.slow
def test_runs_within_each_others_intervals_are_a_tie_everywhere(grid, client, capsys, tmp_path):
    sweep = SweepRun(grid, key="s", flow={})
    result = ended(grid, sweep, [0.5, 0.65, None, 0.25])
    sweep.show(result)
    parent = client.get_run(sweep.handle.run_id).data
    said = "tie: 2 runs do not differ beyond their intervals; the highest is learning_rate 1e-5, seed 42, accuracy 65.0 %"
    assert parent.tags[VERDICT] == result.headline() == f"{said}; 1 of 4 pruned"
    assert f"**{said}" in parent.tags[NOTE]
    assert "Highest of the tie: [learning_rate 1e-5, seed 42]" in parent.tags[NOTE]
    assert "best" not in parent.tags[NOTE].lower()
    assert parent.metrics["accuracy"] == 0.65
    assert [row["verdict"] for row in cells(result)] == ["tie", "tie", "", ""], "Prefect's table"
    folder = Path(client.download_artifacts(sweep.handle.run_id, "sweep", str(tmp_path)))
    assert [row["verdict"] for row in csv.DictReader((folder / "runs.csv").read_text().splitlines())] == ["tie", "tie", "", ""]
    assert (folder / "runs.md").read_text().count("**tie**") == 2
    children = [client.get_run(line.end.run_id).data.tags for line in result.lines]
    assert [tags.get(VERDICT, "") for tags in children] == ["tie", "tie", "", ""]
    show_sweep(result)
    printed = capsys.readouterr().out
    assert said in printed
    assert "publish the highest of the tie: grpo run" in printed
    # A later run is better than both.
    sweep.show(ended(grid, sweep, [0.5, 0.65, 0.95, 0.25]))
    assert client.get_run(sweep.handle.run_id).data.tags[VERDICT].startswith("best: learning_rate 1e-3, seed 43")


def test_seeds_of_the_same_settings_do_not_tie_with_each_other():
    def verdicts(accuracies, settings):
        lines = []
        for number, (accuracy, given) in enumerate(zip(accuracies, settings, strict=True), start=1):
            figures = {"accuracy": Interval(value=accuracy, low=accuracy - 0.1, high=accuracy + 0.1)}
            end = VariantEnd(key="k", state="finished", seconds=1.0, metric="accuracy", figures=figures)
            lines.append(SweepLine(number=number, label=str(number), settings=given, seed=number, end=end))
        return SweepResult(lines=lines, run_id="r", experiment_id="1", tracking_uri="").verdicts()

    high, low = {"rate": "1e-3"}, {"rate": "1e-5"}
    assert verdicts([0.8, 0.85, 0.3], [high, high, low]) == {2: "best"}
    assert verdicts([0.8, 0.85, 0.7], [high, high, low]) == {1: "tie", 2: "tie", 3: "tie"}
    assert verdicts([0.8, 0.85, 0.6], [{}, {}, {}]) == {1: "tie", 2: "tie"}
    assert verdicts([0.8], [high]) == {1: "best"}
    assert verdicts([], []) == {}


@pytest.mark.slow
def test_a_new_best_run_replaces_every_figure(grid, client):
    sweep = SweepRun(grid, key="s", flow={})
    shown = ended(grid, sweep, [0.5, None, None, None])
    ends = [
        shown.lines[0].end.model_copy(update={"figures": figures}) for figures in (figures_of(0.5, 0.9), figures_of(0.7, 0.8))
    ]
    for end in (ends[0], ends[1], ends[1]):
        line = shown.lines[0].model_copy(update={"end": end})
        sweep.show(shown.model_copy(update={"lines": [line, *shown.lines[1:]]}))
    parent = sweep.handle.run_id
    assert client.get_run(parent).data.metrics == {"accuracy": 0.7, "format_rate": 0.8}
    assert [point.value for point in client.get_metric_history(parent, "format_rate")] == [0.9, 0.8], "the same is shown once"


def test_the_table_shows_the_figure_that_decides():
    figures = {"rewards/complete/mean": Interval(value=0.9, low=0.8, high=1.0), "reward": Interval(value=6.5, low=6.0, high=7.0)}
    end = VariantEnd(key="k", state="finished", seconds=1.0, metric="rewards/complete/mean", figures=figures)
    lines = [SweepLine(number=number, label=str(number), settings={"rate": "1e-3"}, seed=number, end=end) for number in (1, 2)]
    result = SweepResult(lines=lines, run_id="r", experiment_id="1", tracking_uri="")
    assert [(row["rewards/complete/mean"], row["reward"]) for row in cells(result)] == [("0.9 (0.8 to 1)", "6.5 (6 to 7)")] * 2
    one, means = markdown(result).split("Mean over the seeds that finished:")
    assert "| 0.9 (0.8 to 1) | 6.5 (6 to 7) |" in one
    assert "| `1e-3` | 2 of 2 | 0.9 | 6.5 |" in means


def figures_of(accuracy, format_rate):
    values = {"accuracy": accuracy, "format_rate": format_rate}
    return {name: Interval(value=value, low=0.1, high=1.0) for name, value in values.items()}


@pytest.mark.slow
def test_the_same_sweep_is_one_parent_and_a_look_changes_nothing(grid, client):
    first = SweepRun(grid, key="s", flow={})
    assert first.is_new
    first.show(ended(grid, first, [0.5, 0.5, 0.5, 0.5]))
    first.handle.end("FINISHED")
    before = client.get_run(first.handle.run_id).to_dictionary()
    again = SweepRun(grid, key="s", flow={"prefect.flow_run_id": "later"})
    again.handle.end("FINISHED")
    assert not again.is_new
    assert [line.run_id for line in recent_runs(grid.base.tracking, 10)] == [first.handle.run_id], "not each of its runs"
    assert client.get_run(again.handle.run_id).to_dictionary() == before
    assert SweepRun(grid, key="other", flow={}).handle.run_id != first.handle.run_id


def test_a_pruned_run_is_killed_and_not_failed(grid, client):
    config = grid.variants[0].config
    with pytest.raises(PrunedError), open_run(config, key="k", parent_run_id="p") as run:
        raise PrunedError("pruned at update 5")
    found = client.get_run(run.run_id)
    assert found.info.status == "KILLED"
    assert found.data.tags[KEY_TAG] == "k"


@pytest.mark.slow
def test_the_description_of_a_large_sweep_fits_mlflow_and_names_the_table(grid, client):
    sweep = SweepRun(grid, key="s", flow={})
    result = ended(grid, sweep, [0.5, None, 0.75, 0.25])
    for runs in (30, 100, 1_000):
        lines = [result.lines[number % 4] for number in range(runs)]
        sweep.show(result.model_copy(update={"lines": lines}))
        note = client.get_run(sweep.handle.run_id).data.tags[NOTE]
        assert "learning_rate 1e-3, seed 43, accuracy 75.0 %" in note.partition("\n")[0]
        assert "To offer the highest one" in note
        assert ("sweep/runs.md" in note) == (runs > 30)
        assert ("compare-runs" in note) == (runs < 1_000)


def test_fewer_than_two_runs_are_not_compared():
    assert compare_link(["a"], "1") == ""
    assert compare_link(["a", "b"], "1") == "#/compare-runs?runs=%5B%22a%22%2C%20%22b%22%5D&experiments=%5B%221%22%5D"

"""Report and comparison as the commands write them: complete, self-contained, and safe to open whatever a model wrote."""

import json

import pytest
import yaml

from tests.flows.place import SMALL
from tests.web_pages import assert_self_contained

pytestmark = [pytest.mark.xdist_group("reported"), pytest.mark.long, pytest.mark.timeout(1800)]

HOSTILE = "<script>alert('x')</script> What is {n} + 4?"


@pytest.fixture(scope="module")
def reported(tmp_path_factory, prefect_api):
    """Two runs over hostile data that differ in their seed and learning rate."""
    from tests.flows.place import Place

    place = Place(tmp_path_factory.mktemp("reported"), prefect_api)
    rows = [{"question": HOSTILE.format(n=n), "answer": str(n + 4)} for n in range(10, 60)]
    bad = [{"question": "<img src=x onerror=alert(1)>", "answer": ""}]
    place.write("train.jsonl", "\n".join(json.dumps(row) for row in rows[:40] + bad))
    place.write("eval.jsonl", "\n".join(json.dumps(row) for row in rows[40:]))
    data = SMALL["data"] | {"train": [{"path": "train.jsonl"}], "eval": [{"path": "eval.jsonl"}]}
    config = SMALL | {"data": data, "validation": {"max_invalid_fraction": 0.1}}
    place.write("small.yaml", yaml.safe_dump(config))
    for change in ("seed=1", "seed=2"):
        place.grpo("run", "small.yaml", "--set", change, "--set", f"stages.0.learning_rate={change[-1]}e-4")
    return place


def parents(place):
    return [run for run in place.runs("small") if "mlflow.parentRunId" not in run.data.tags]


def test_every_run_leaves_one_complete_page_in_mlflow(reported):
    run = parents(reported)[0]
    path = reported.client.download_artifacts(run.info.run_id, "report/report.html", str(reported.root))
    text = (reported.root / path).read_text()
    assert_self_contained(text)
    for word in ("Evaluation", "Before and after", "Reward lab", "Merge proof", "Costs", "grpo reproduce small/1", "paired test"):
        assert word in text
    assert "train.jsonl:41" in text
    assert run.data.tags["prefect.flow_run_id"] in text
    assert "&lt;script&gt;alert" in text
    short = reported.client.download_artifacts(run.info.run_id, "report/report.md", str(reported.root))
    assert "| merged |" in (reported.root / short).read_text()


def test_compare_shows_what_differs_in_settings_figures_and_answers(reported):
    first, second = (run.info.run_id for run in parents(reported))
    shown = reported.grpo("compare", first[:12], second)
    assert "stages.0.learning_rate" in shown
    assert "10 common held-out prompts" in shown
    assert "model.path" not in shown
    text = (reported.root / "comparison.html").read_text()
    assert_self_contained(text)
    assert "seed" in text
    again = reported.grpo("compare", "small/1", "small/2", "--out", "again.html")
    assert "10 common held-out prompts" in again
    assert (reported.root / "again.html").read_text() == text
    assert "no such run" in reported.grpo("compare", first, "nobody", expect=1)


def test_a_registered_model_is_downloaded_asked_and_reproduced(reported):
    shown = reported.grpo("lineage", "small/1")
    assert "data digest" in shown
    reported.grpo("download", "small/1", "mine")
    assert json.loads((reported.root / "mine" / "grpo.json").read_text())["version"] == "1"
    assert "<reasoning>" in reported.grpo("chat", "mine", "What is 15 + 27?", "--greedy")
    assert "other files" in reported.grpo("download", "small/2", "mine", expect=1)
    made = reported.grpo("reproduce", "small/1")
    assert "the reproduced adapter is identical" in made
    assert "not empty" in reported.grpo("reproduce", "small/1", expect=2)
    assert len(reported.client.search_model_versions("name='small'")) == 2

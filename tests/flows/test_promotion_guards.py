"""Guards of a promotion in whole runs: one refuses what the task's test would promote, and without it the version is promoted."""

import json

import pytest
import yaml

from tests.flows.place import Place
from tests.flows.test_any_task import REWARDS, config_of

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("examples"), pytest.mark.timeout(1200)]

TASK = {"completion": {"format": "none"}, "rewards": ["brief"]}
KEEPS = {"name": "polite", "data": [{"path": "guard.jsonl"}], "metric": "lacks", "phrases": ["zzzz qqqq"], "max_drop": 0.0}
REFUSES = {
    "name": "chatty",
    "data": [{"path": "guard.jsonl"}],
    "metric": "evaluator",
    "evaluator": "my_rewards:wordy",
    "max_drop": 0.0,
    "certain": False,
}
WORDY = '''

def wordy(prompts, completions, **columns):
    """The opposite of `brief`."""
    return [-score for score in brief(prompts, completions)]
'''


@pytest.fixture
def place(tmp_path, prefect_api):
    made = Place(tmp_path, prefect_api)
    made.write("rows.jsonl", "\n".join(json.dumps({"question": f"Write about the number {n}."}) for n in range(60)))
    made.write("guard.jsonl", "\n".join(json.dumps({"question": f"Tell me about {n}."}) for n in range(12)))
    made.write("my_rewards.py", REWARDS + WORDY)
    config = config_of("style", TASK)
    config["promotion"]["guards"] = [KEEPS, REFUSES]
    made.write("refused.yaml", yaml.safe_dump(config))
    config["promotion"]["guards"] = [KEEPS]
    made.write("passed.yaml", yaml.safe_dump(config))
    return made


def test_a_guard_refuses_a_promotion_that_goes_through_without_it(place):
    said = place.grpo("run", "refused.yaml")
    version = place.client.get_model_version("style", "1")
    assert {alias: str(number) for alias, number in place.client.get_registered_model("style").aliases.items()} == {
        "challenger": "1"
    }, said
    assert "but guard chatty: evaluator" in version.tags["grpo.decision"]
    run = place.parent("style")
    assert (run.data.metrics["guard/chatty/passed"], run.data.metrics["guard/polite/passed"]) == (0.0, 1.0)
    assert run.data.metrics["guard/chatty/change"] < 0
    [report] = place.root.glob("**/write_report/*/report.html")
    page = report.read_text()
    assert "Worse: chatty" in page
    assert "<pre>Tell me about" in page
    assert {item.path for item in place.client.list_artifacts(run.info.run_id, "guards")} >= {
        "guards/report.md",
        "guards/worse.json",
    }
    # The rows of a guard are no data of the model.
    assert {entry.dataset.name for entry in run.inputs.dataset_inputs} == {"train", "eval"}
    assert "rows.jsonl" in place.grpo("trace", "rows.jsonl:1", "refused.yaml")

    evaluated = sorted(place.root.glob("**/evaluate_model/*/result.json"))
    written = {path: path.stat().st_mtime_ns for path in evaluated}
    place.grpo("run", "passed.yaml")
    assert place.client.get_registered_model("style").aliases["champion"]
    assert {path: path.stat().st_mtime_ns for path in evaluated} == written


def test_the_rows_of_a_guard_are_checked_before_anything_is_trained(place):
    place.write("guard.jsonl", '{"wrong": 1}\n')
    said = place.grpo("run", "refused.yaml", expect=1)
    assert "guard.jsonl" in said
    assert "fix:" in said
    assert not list(place.root.glob("**/train_stage/*"))

"""A day in the two web pages, in Chromium: from the form of a preset over an approval to a rolled back champion.

Each stop leaves a picture in the folder GRPO_SCREENSHOTS; those of docs/operate.md come from there.
"""

import re
from pathlib import Path

from tests.flows.place import SMALL
from tests.operating.chromium import MARKS, choose, field, picture, require_two_screens, type_into
from tests.operating.test_approval import PROMOTED, suspended
from tests.processes.waiting import until

pytestmark = MARKS

RUN_LIMIT_MS = 900_000
JOURNEY = PROMOTED | {
    "name": "journey",
    # Better than the base, and leaves something for a second run.
    "stages": [SMALL["stages"][0] | {"max_steps": 20}],
}


def start(page, operated, *overrides):
    """Start a run with the form of the deployment `preset`; its id."""
    before = {run["id"] for run in operated.runs_of("preset")}
    page.goto(f"{operated.prefect}/deployments")
    page.get_by_role("link", name="preset", exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    type_into(page, "source", "journey.yaml")
    require_two_screens(page)
    for override in overrides:
        field(page, "overrides").get_by_role("button", name="Add item").click()
        field(page, "overrides").locator("textarea, input").last.fill(override)
    picture(page, "journey-form")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile(r"/deployments/deployment/[0-9a-f-]+\?tab=Runs|/runs/flow-run/"))
    [made] = [run["id"] for run in operated.runs_of("preset") if run["id"] not in before]
    return made


def waits(page, operated, run, version):
    """Wait on the page of the run until it asks for an approval."""
    page.goto(f"{operated.prefect}/runs/flow-run/{run}")
    page.get_by_text("Suspended", exact=True).first.wait_for(timeout=RUN_LIMIT_MS)
    suspended(operated, {"id": run})
    page.reload()
    page.get_by_text("Details", exact=True).first.click()
    page.get_by_text(f"v{version} waits for approval: format rate").first.wait_for()


def decide(page, operated, run, decision):
    page.get_by_role("button", name="Resume").first.click()
    page.get_by_role("dialog").get_by_text("waits for approval").first.wait_for()
    choose(page, "Decision", decision)
    type_into(page, "Approved By", "Ann")
    picture(page, "journey-approval")
    page.get_by_role("button", name="Submit").click()
    operated.wait(run, "COMPLETED")


def artifact(page, operated, run, key):
    """Open an artifact of a run, once it is there. Other runs have artifacts with the same key."""
    wanted = {"artifacts": {"key": {"any_": [key]}}, "flow_runs": {"id": {"any_": [run]}}, "sort": "UPDATED_DESC"}
    until(lambda: operated.ask("/artifacts/filter", wanted))
    page.goto(f"{operated.prefect}/artifacts/artifact/{operated.ask('/artifacts/filter', wanted)[0]['id']}")


def says_progress(page, step):
    """Whether the page of a progress artifact names the step, or that it is done: Prefect draws what was there when it loaded."""
    page.reload()
    page.wait_for_timeout(3000)
    return page.get_by_text(re.compile(f"{step}|^done$")).count()


def followed(page, link):
    """The page that a link opens, here or in a tab of its own."""
    if link.first.get_attribute("target") != "_blank":
        link.first.click()
        return page
    with page.context.expect_page() as opened:
        link.first.click()
    return opened.value


def test_a_day_from_the_form_to_a_champion_that_is_rolled_back(page, operated, tmp_path):
    operated.config("journey", **{key: value for key, value in JOURNEY.items() if key != "name"})
    page.goto(f"{operated.prefect}/deployments")
    for name in ("demo", "preset", "retrain"):  # a page of the list has ten deployments
        page.get_by_role("link", name=name, exact=True).wait_for()
    picture(page, "journey-started")
    first = start(page, operated)

    artifact(page, operated, first, "progress-train-stage-format")
    until(lambda: says_progress(page, "train_stage-format: "))
    picture(page, "journey-progress")

    waits(page, operated, first, 1)
    picture(page, "journey-run-in-prefect")
    decide(page, operated, first, "promote")
    page.reload()
    page.get_by_text("Details", exact=True).first.click()
    page.get_by_text("promoted v1: format rate").first.wait_for()

    artifact(page, operated, first, "links")
    mlflow = followed(page, page.get_by_role("link", name="metrics, parameters, files"))
    mlflow.get_by_text("Registered models").first.wait_for()
    picture(mlflow, "journey-run-in-mlflow")
    assert mlflow.locator(f"a[href*='{first}']").count(), "the way back to Prefect"

    second = start(page, operated, "stages.0.max_steps=80")
    waits(page, operated, second, 2)
    decide(page, operated, second, "promote")
    compared(page, operated, second)
    assert operated.aliases("journey") == {"champion": "2", "previous": "1"}

    files(page, operated)
    operated.grpo("download", "journey@champion", str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 1_000_000
    operated.grpo("rollback", "journey", "--reason", "shown to a visitor")
    page.goto(f"{operated.mlflow}/#/models/journey")
    page.get_by_text("@ champion").first.wait_for()
    picture(page, "journey-rolled-back")
    assert operated.aliases("journey")["champion"] == "1"


def compared(page, operated, run):
    """The runs in their table, and what differs between them."""
    artifact(page, operated, run, "links")
    runs = followed(page, page.get_by_role("link", name="compare the runs of the experiment"))
    rows = runs.get_by_role("checkbox", name=re.compile("toggle row selection"))
    runs.set_viewport_size({"width": 1900, "height": 900})  # MLflow draws no column that would be out of sight
    rows.nth(1).wait_for()
    runs.get_by_role("button", name="Close").last.click()  # the assistant
    picture(runs, "journey-runs")
    for row in (0, 1):
        rows.nth(row).click()
    runs.get_by_role("button", name="Compare").click()
    runs.get_by_text("Comparing 2 Runs from 1 Experiment").wait_for()
    runs.get_by_text("Show diff only").first.wait_for()
    picture(runs, "comparison")
    body = runs.inner_text("body")
    assert all(name in body for name in ("rollout.temperature", "base/accuracy", "base/format_rate"))
    runs.get_by_text("Show diff only").first.click()
    runs.get_by_text("stages.0.max_steps").first.wait_for()
    picture(runs, "journey-compared")


def files(page, operated):
    """What a download fetches: the files of the version, which its page in MLflow leads to."""
    page.goto(f"{operated.mlflow}/#/models/journey/versions/2")
    page.get_by_text("grpo.decision").first.wait_for()
    picture(page, "model")
    page.get_by_role("link", name="model", exact=True).click()
    page.get_by_text("Artifacts", exact=True).first.click()
    page.get_by_text("components", exact=True).wait_for()
    # The heading, and the assistant next to the page if it is open, have the same name as the folder.
    page.locator("div:text-is('model')").click()
    page.get_by_text("model.safetensors", exact=True).first.wait_for()
    picture(page, "journey-files")
    page.get_by_text("config.json", exact=True).click()
    with page.expect_download() as started:
        page.locator("button[data-component-id*='artifactview']").first.click()
    assert '"Qwen2ForCausalLM"' in Path(started.value.path()).read_text()

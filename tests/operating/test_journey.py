"""A day in the two web pages, in Chromium: from the form of a preset over an approval to a rolled back champion.

Each stop leaves a picture in the folder GRPO_SCREENSHOTS; those of docs/journey.md come from there.
"""

import re
import time

import pytest

from tests.flows.place import SMALL
from tests.operating.chromium import CHROMIUM, choose, field, picture, type_into
from tests.operating.test_approval import PROMOTED

pytestmark = [
    pytest.mark.xdist_group("operated"),
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed on this machine"),
]

JOURNEY = PROMOTED | {
    "name": "journey",
    # Long enough to be watched.
    "stages": [SMALL["stages"][0] | {"max_steps": 200}],
}


def start(page, operated, *overrides):
    """Start a run with the form of the deployment `preset`; its id."""
    before = {run["id"] for run in operated.runs_of("preset")}
    page.goto(f"{operated.prefect}/deployments")
    page.get_by_role("link", name="preset", exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    type_into(page, "source", "journey.yaml")
    for override in overrides:
        field(page, "overrides").get_by_role("button", name="Add item").click()
        field(page, "overrides").locator("textarea, input").last.fill(override)
    picture(page, "journey-form")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile(r"/deployments/deployment/[0-9a-f-]+\?tab=Runs|/runs/flow-run/"))
    [made] = [run["id"] for run in operated.runs_of("preset") if run["id"] not in before]
    return made


def waits(page, operated, run, version):
    """Wait in the list of runs until this one asks for an approval, and open it."""
    page.goto(f"{operated.prefect}/runs")
    page.get_by_text(f"v{version} waits for approval: format rate").first.wait_for(timeout=900_000)
    picture(page, "journey-waits")
    page.goto(f"{operated.prefect}/runs/flow-run/{run}")
    page.get_by_text("Suspended", exact=True).first.wait_for()


def decide(page, operated, run, decision):
    page.get_by_role("button", name="Resume").first.click()
    page.get_by_role("dialog").get_by_text("waits for approval").first.wait_for()
    choose(page, "Decision", decision)
    type_into(page, "Approved By", "Ann")
    picture(page, "journey-approval")
    page.get_by_role("button", name="Submit").click()
    operated.wait(run, "COMPLETED")


def artifact(page, operated, key):
    """Open an artifact of the newest run that has one, once it is there."""
    deadline = time.monotonic() + 900
    while not (found := operated.ask("/artifacts/filter", {"artifacts": {"key": {"any_": [key]}}, "sort": "UPDATED_DESC"})):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    page.goto(f"{operated.prefect}/artifacts/artifact/{found[0]['id']}")


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
    first = start(page, operated)

    artifact(page, operated, "live-format")
    live = followed(page, page.get_by_role("link", name="Live page"))
    live.get_by_text(re.compile(r"update 1\d\d/200")).first.wait_for(timeout=900_000)
    assert "/live/" in live.url
    assert live.locator("svg").count() >= 3
    picture(live, "journey-live")
    live.get_by_text("The stage has ended.").wait_for(timeout=900_000)  # the page loads itself again

    waits(page, operated, first, 1)
    picture(page, "journey-run-in-prefect")
    decide(page, operated, first, "promote")
    page.goto(f"{operated.prefect}/runs")
    page.get_by_text("promoted v1: format rate").first.wait_for()

    artifact(page, operated, "links")
    mlflow = followed(page, page.get_by_role("link", name="metrics, parameters, files"))
    mlflow.get_by_text("Registered models").first.wait_for()
    picture(mlflow, "journey-run-in-mlflow")
    assert mlflow.locator(f"a[href*='{first}']").count(), "the way back to Prefect"

    second = start(page, operated, "stages.0.max_steps=210")
    waits(page, operated, second, 2)

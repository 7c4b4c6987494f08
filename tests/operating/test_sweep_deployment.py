"""A sweep started with the form of its deployment, run by a worker, compared in MLflow."""

import re

from tests.flows.place import SMALL
from tests.operating.chromium import MARKS, field, picture, type_into
from tests.operating.test_journey import RUN_LIMIT_MS, artifact, followed

pytestmark = MARKS


def test_a_sweep_from_the_form_is_compared_in_mlflow(page, operated):
    # After four updates all runs would still answer alike.
    operated.config("swept", stages=[SMALL["stages"][0] | {"max_steps": 16}])
    page.goto(f"{operated.prefect}/deployments")
    page.get_by_placeholder("Search deployments").fill("sweep")
    page.get_by_role("link", name="sweep", exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    type_into(page, "source", "swept.yaml")
    # The form offers a learning rate to vary; two values of the group's size make it a grid.
    field(page, "over").get_by_role("button", name="Add item").click()
    field(page, "over").locator("textarea, input").last.fill("stages.0.num_generations=4,8")
    picture(page, "sweep-form")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile(r"/deployments/deployment/[0-9a-f-]+\?tab=Runs|/runs/flow-run/"))
    [run] = operated.runs_of("sweep")
    ended = operated.wait(run["id"], "COMPLETED")
    # A few updates of small models may leave them within their intervals.
    assert ended["state"]["message"].startswith(("best: ", "tie: "))

    artifact(page, operated, run["id"], "sweep-links")
    page.get_by_role("link", name="the sweep in MLflow").wait_for(timeout=RUN_LIMIT_MS)
    compared = followed(page, page.get_by_role("link", name="compare the runs in MLflow"))
    compared.get_by_text("Comparing 4 Runs from 1 Experiment").wait_for()
    compared.get_by_text("Parallel Coordinates Plot").first.wait_for()
    choose_metric(compared, "reward")
    picture(compared, "sweep-compared")
    [parent] = [each for each in operated.runs("swept") if each.data.tags.get("grpo.sweep") == "yes"]
    assert parent.data.params["over.stages.0.num_generations"] == "4, 8"
    assert operated.client.search_registered_models("name='swept'") == [], "a sweep registers nothing"


def choose_metric(page, name):
    """Take this metric instead of the one that MLflow begins with. Its list draws no option that is out of sight."""
    box = page.get_by_role("combobox").nth(1)
    box.click()
    page.keyboard.press("Backspace")
    box.fill(name)
    active = page.locator("[class*=select-item-option-active]")
    for _ in range(300):
        if active.inner_text() == name:
            break
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    page.locator("svg").get_by_text(name, exact=True).first.wait_for()

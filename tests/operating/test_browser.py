"""What a person sees and clicks, in Debian's Chromium: form, refusal, run and artifacts. The rest of a day: test_journey.py."""

import re

import pytest

from tests.operating.chromium import MARKS, choose, field, picture, type_into

pytestmark = MARKS


def open_form(page, operated):
    page.goto(f"{operated.prefect}/deployments")
    page.get_by_role("link", name="demo", exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()
    field(page, "Seed").wait_for()


@pytest.mark.ci
def test_a_person_corrects_the_form_and_watches_the_run_complete(page, operated):
    open_form(page, operated)
    picture(page, "form")
    type_into(page, "Name", "from-the-form")
    for stage in (0, 1):
        type_into(page, "Max steps", "3", stage)
        choose(page, "Loss type", "dr_grpo", stage)
        type_into(page, "Per device train batch size", "8", stage)
    for label, text in {"Max prompts": "16", "Num samples": "1", "Num rows": "4", "Num prompts": "4"}.items():
        type_into(page, label, text)
    assert field(page, "Loss details").count()
    assert field(page, "Gradient accumulation steps").count() == 0, "rarely used fields are folded away"

    type_into(page, "Seed", "-1")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("config.seed: ").first.wait_for()
    picture(page, "refused")
    assert operated.runs_of("demo") == []

    type_into(page, "Seed", "5")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile(r"/deployments/deployment/[0-9a-f-]+\?tab=Runs|/runs/flow-run/"))
    [run] = operated.runs_of("demo")
    page.goto(f"{operated.prefect}/runs/flow-run/{run['id']}")
    page.get_by_text("Completed").first.wait_for(timeout=900_000)
    operated.wait(run["id"], "COMPLETED")
    page.reload()
    page.get_by_text("Completed").first.wait_for()
    picture(page, "run")
    assert run["parameters"]["config"]["stages"][0]["loss_type"] == "dr_grpo"
    assert run["parameters"]["config"]["evaluation"]["max_prompts"] == 16

    # Prefect draws only the artifacts that fit on the screen.
    page.set_viewport_size({"width": 1400, "height": 4_000})
    page.get_by_text("Artifacts", exact=True).first.click()
    for key in ("validation", "reward-lab", "train-format", "merge", "publication"):
        page.get_by_text(key, exact=True).first.wait_for()
    picture(page, "artifacts")
    page.get_by_text("publication", exact=True).first.click()
    page.get_by_text("from-the-form version 1").first.wait_for()

"""What a person sees and clicks, in Debian's Chromium: form, refusal, run and artifacts; MLflow's comparison and model."""

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
    type_into(page, "Max prompts", "16")
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


def test_two_runs_are_compared_and_a_merged_file_downloaded(page, operated, tmp_path):
    for seed in (1, 2):
        run = operated.trigger("preset", source=operated.config("compared", seed=seed))
        operated.wait(run["id"], "COMPLETED")
    page.goto(f"{operated.mlflow}/#/experiments")
    page.get_by_text("Model training").first.click()
    page.get_by_role("link", name="compared").first.click()
    rows = page.get_by_role("checkbox", name=re.compile("toggle row selection"))
    rows.nth(1).wait_for()
    picture(page, "runs")
    for row in (0, 1):
        rows.nth(row).click()
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("Comparing 2 Runs from 1 Experiment").wait_for()
    page.get_by_text("Show diff only").first.wait_for()
    picture(page, "comparison")
    body = page.inner_text("body")
    for name in ("stages.0.learning_rate", "rollout.temperature", "base/accuracy", "base/format_rate"):
        assert name in body

    page.goto(f"{operated.mlflow}/#/models/compared/versions/1")
    page.get_by_text("grpo.decision").first.wait_for()
    picture(page, "model")
    page.get_by_role("link", name="model", exact=True).click()
    page.get_by_text("Artifacts", exact=True).first.click()
    page.get_by_text("components", exact=True).wait_for()
    # The heading, the folder, and the assistant beside the page are all called so.
    page.get_by_text("model", exact=True).nth(-2).click()
    page.get_by_text("config.json", exact=True).click()
    with page.expect_download() as started:
        page.locator("button[data-component-id*='artifactview']").first.click()
    saved = tmp_path / "config.json"
    started.value.save_as(saved)
    assert '"Qwen2ForCausalLM"' in saved.read_text()

"""What lists and pages of MLflow say of a run and a version: names, descriptions, figures, the model card."""

import getpass
from datetime import datetime

import pytest

from grpo_tasks.tracking.handle import MARKER
from grpo_tasks.tracking.past_runs import is_named
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.texts import NOTE, licence, restate_decision, run_title, write_card
from schemas.results.publication import Publication

from .conftest import killed_at


@pytest.fixture
def decided(config, tmp_path):
    """Records a decision in the config's run, for its id."""
    known = {"run_id": "x", "model_name": "small model", "model_version": "3", "champion": True, "tests": []}

    def record(key="2", reason="better than the base", **changes):
        known.update(changes)
        with open_run(config, key="k") as run:
            run.record(Publication(key=key * 16, directory=tmp_path, seconds=0.1, reason=reason, **known))
        return run.run_id

    return record


def test_a_run_is_named_by_config_and_time_found_by_config(config, client):
    with open_run(config, key="k", flow_run_name="brisk-otter") as run:
        pass
    found = client.get_run(run.run_id)
    name, form, day, _ = found.info.run_name.rsplit(" ", 3)
    assert (name, form) == (config.name, "brisk-otter")
    datetime.strptime(day, "%Y-%m-%d")
    assert is_named(found, config.name)
    assert is_named(found, f"{config.name} brisk-otter")
    assert not is_named(found, config.name[:-1])
    assert run_title("demo", None, datetime(2026, 11, 23, 5, 53)) == "demo 2026-11-23 05:53"


def test_the_description_says_the_decision_and_keeps_a_persons_text(config, client, decided):
    page = "http://127.0.0.1:4200/runs/flow-run/1-2"
    first = "GRPO from the base model `embedded:base`. Stages: format, correctness."
    with open_run(config, key="k", flow_run_id="1-2", flow_run_url=page) as run:
        assert client.get_run(run.run_id).data.tags[NOTE] == f"[Flow run in Prefect]({page})\n\n{first}"
    model = "Model: [small model version 3](#/models/small%20model/versions/3)"

    def note():
        return client.get_run(decided_run).data.tags[NOTE]

    decided_run = decided()
    assert note() == f"**Promoted**: better than the base.\n\n{model}. [Flow run in Prefect]({page})\n\n{first}"
    assert client.get_run(decided_run).data.tags["promoted"] == "yes"
    decided("3", champion=False, reason="approved by ann (" + "x" * 9_000)
    assert note().startswith("**Not promoted**: approved by ann (xxx")
    assert len(note()) <= 8_000
    client.set_tag(decided_run, NOTE, "This is the one for the paper.")
    decided("4", champion=True)
    assert note() == "This is the one for the paper."


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_a_line_that_a_person_put_above_the_description_stays(config, client, decided, before):
    with open_run(config, key="k") as run:
        pass
    if before:
        decided()
    mine = f"For the paper.\n\n{client.get_run(run.run_id).data.tags[NOTE]}"
    client.set_tag(run.run_id, NOTE, mine)
    tags = client.get_run(decided("3", reason="no better")).data.tags
    assert (tags[NOTE], tags["grpo.decision"]) == (mine, "no better")


def test_a_list_of_runs_shows_user_source_model_data_and_figures(config, client, data_report, make_evaluation, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/grpo", "run", "demo", "--set", "seed=3"])
    with open_run(config, key="k") as run:
        run.record(data_report)
        run.record(make_evaluation("base", 0.2))
        run.record(make_evaluation("merged", 0.9, "a" * 16))
    found = client.get_run(run.run_id).data
    assert (found.metrics["accuracy"], found.metrics["format_rate"]) == (0.9, 0.9)
    tags = {
        "mlflow.user": getpass.getuser(),
        "mlflow.source.name": "grpo run demo --set seed=3",
        "base_model": "embedded:base",
        "data": data_report.digest[:12],
    }
    assert tags.items() <= found.tags.items()
    # What a person does not read is one tag, not a column for each step.
    assert [tag for tag in found.tags if tag.startswith(MARKER)] == [MARKER]
    assert len([tag for tag in found.tags if not tag.startswith("mlflow.")]) <= 10
    assert client.get_experiment(run.experiment_id).tags["mlflow.experimentKind"] == "custom_model_development"


@pytest.mark.slow
def test_the_card_is_the_versions_description_and_an_edited_one_stays(config, client, make_merge, offer, data_report):
    def published():
        with open_run(config, key="one") as run:
            run.record(data_report)
            offer(run, make_merge(), champion=None)
        return client.get_model_version(config.registered_model, "1").description

    card = published()
    for known in (
        "`embedded:base`",
        "Promoted: better than the base",
        "`Answer in tags.`",
        "The chat template adds it",
        "| correctness | correctness | 30 |",
        "12 prompts from `train.jsonl`; 4 more were held out",
        "1 of 17 rows were rejected",
        data_report.digest,
        "| accuracy | 0.9 | 0.85 to 0.95 |",
        "against the base: accuracy +0.3000 over 64 prompts",
        "completions of up to 256",
        "Saved in float16: keeps 98.7 % of what training changed; not bfloat16: it keeps 24 % of the change of the weights.",
        "A server that loads it in bfloat16 loses part of what it learned.",
        "The adapter that was merged is in `adapter/`, next to `model/` in the artifacts.",
        "under the project's licence",
        f"models:/{config.registered_model}@champion",
    ):
        assert known in card
    assert "champion moves only" in client.get_registered_model(config.registered_model).description
    client.update_model_version(config.registered_model, "1", "checked by a person")
    assert published() == "checked by a person"


CARD = (
    "Base model `b`, trained with GRPO (reinforcement learning from rewards) and merged. Not promoted: worse."
    "\n\n## Trained for\n\nX\n"
)


def test_a_generated_card_is_replaced_and_a_persons_text_is_kept(client):
    client.create_registered_model("m")
    for number in ("1", "2"):
        client.create_model_version("m", "elsewhere")
        write_card(client, "m", number, CARD)
    client.update_model_version("m", "2", CARD.replace("X", "For the shop"))
    for number, kept in (("1", "X"), ("2", "For the shop")):
        for _ in range(2):
            reason = "approved by ann (line\n\nand line); better"
            restate_decision(client, client.get_model_version("m", number), promoted=True, reason=reason)
            said = client.get_model_version("m", number).description
            word = f"Promoted: {reason}" if number == "1" else "Not promoted: worse"
            assert said == CARD.replace("Not promoted: worse", word).replace("X", kept)
    write_card(client, "m", "1", "another card")
    assert client.get_model_version("m", "1").description == "another card"
    write_card(client, "m", "2", "another card")
    assert "For the shop" in client.get_model_version("m", "2").description


def test_a_card_half_written_by_a_killed_process_can_be_replaced(client):
    client.create_registered_model("m")
    client.create_model_version("m", "elsewhere")
    write_card(client, "m", "1", CARD)

    with killed_at("update_model_version"):
        write_card(client, "m", "1", "second card")
    assert client.get_model_version("m", "1").description == CARD
    write_card(client, "m", "1", "third card")
    assert client.get_model_version("m", "1").description == "third card"


DECLARED = "---\nlibrary_name: transformers\nlicense: apache-2.0\n---\n# Model\n"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"README.md": DECLARED}, "Declared in its README.md: `apache-2.0`."),
        ({"README.md": "---\ntags: x\n---\nlicense: mit\n"}, "Unknown"),
        ({"README.md": "# Model\nlicense: mit\n", "LICENSE": "..."}, "See LICENSE in its folder."),
        ({"README.md": "---\n" + "a: b\n" * 100_000}, "Unknown"),
        ({}, "Unknown: its folder names none."),
    ],
)
def test_a_base_has_the_licence_it_declares(tmp_path, files, says):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert says in licence(str(tmp_path))
    assert licence("somebody/base") == "See https://huggingface.co/somebody/base."

"""The model card: what a person who finds the version in MLflow must know."""

import pytest
from mlflow import MlflowClient

from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.publishing import publish
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.served.card import licence, restate_decision, write_card
from grpo_tasks.tracking.served.proof import prove_served
from schemas.results.evaluation import PairedTest

BETTER = PairedTest(against="base", metric="accuracy", prompts=64, difference=0.3, p_value=0.001, better=True)


@pytest.mark.slow
def test_the_card_is_the_versions_description_and_an_edited_one_stays(
    database, make_config, make_merge, make_evaluation, data_report
):
    config, client = make_config(database), MlflowClient(database)

    def published():
        with open_run(config, key="one") as run:
            run.record(data_report)
            publish(
                run,
                make_merge(),
                tests=[BETTER],
                champion=None,
                evaluation=make_evaluation("merged"),
                log=log_model,
                prove=prove_served,
            )
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


def test_a_generated_card_is_replaced_and_a_persons_text_is_kept(database):
    client = MlflowClient(database)
    client.create_registered_model("m")
    for number in ("1", "2"):
        client.create_model_version("m", "elsewhere")
        write_card(client, "m", number, CARD)
    client.update_model_version("m", "2", CARD.replace("X", "For the shop"))
    for number, kept in (("1", "X"), ("2", "For the shop")):
        for _ in range(2):
            restate_decision(client, "m", number, "Promoted: approved by ann (line\n\nand line); better")
            said = client.get_model_version("m", number).description
            word = "Promoted: approved by ann (line\n\nand line); better" if number == "1" else "Not promoted: worse"
            assert said == CARD.replace("Not promoted: worse", word).replace("X", kept)
    write_card(client, "m", "1", "another card")
    assert client.get_model_version("m", "1").description == "another card"
    write_card(client, "m", "2", "another card")
    assert "For the shop" in client.get_model_version("m", "2").description


def test_a_card_half_written_by_a_killed_process_can_be_replaced(database, monkeypatch):
    client = MlflowClient(database)
    client.create_registered_model("m")
    client.create_model_version("m", "elsewhere")
    write_card(client, "m", "1", CARD)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "update_model_version", killed)
        with pytest.raises(KeyboardInterrupt):
            write_card(client, "m", "1", "second card")
    assert client.get_model_version("m", "1").description == CARD
    write_card(client, "m", "1", "third card")
    assert client.get_model_version("m", "1").description == "third card"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"README.md": "---\nlibrary_name: transformers\nlicense: apache-2.0\n---\n# Model\n"},
            "Declared in its README.md: `apache-2.0`.",
        ),
        ({"README.md": "---\ntags: x\n---\nlicense: mit\n"}, "Unknown"),
        ({"README.md": "# Model\nlicense: mit\n", "LICENSE": "..."}, "See LICENSE in its folder."),
        ({"README.md": "---\n" + "a: b\n" * 100_000}, "Unknown"),
        ({}, "Unknown: its folder names none."),
    ],
)
def test_a_folder_base_has_the_licence_it_declares(tmp_path, files, says):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert says in licence(str(tmp_path))


def test_the_licence_of_a_hub_model_is_named_by_its_page():
    assert licence("somebody/base") == "See https://huggingface.co/somebody/base."

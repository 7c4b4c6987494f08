"""The model card: what a person who finds the version in MLflow must know."""

import pytest
from mlflow import MlflowClient

from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.publishing import publish
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.served.card import licence
from grpo_tasks.tracking.served.proof import prove_served
from schemas.results.evaluation import PairedTest

BETTER = PairedTest(against="base", metric="accuracy", prompts=64, difference=0.3, p_value=0.001, better=True)


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
        "Saved in bfloat16",
        "under the project's licence",
        f"models:/{config.registered_model}@champion",
    ):
        assert known in card
    assert "champion moves only" in client.get_registered_model(config.registered_model).description
    client.update_model_version(config.registered_model, "1", "checked by a person")
    assert published() == "checked by a person"


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
def test_the_licence_of_a_base_in_a_folder_is_what_the_folder_declares(tmp_path, files, says):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert says in licence(str(tmp_path))


def test_the_licence_of_a_hub_model_is_named_by_its_page():
    assert licence("somebody/base") == "See https://huggingface.co/somebody/base."

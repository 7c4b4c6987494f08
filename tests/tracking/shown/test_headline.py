"""What the list of runs shows: names, a description with the decision, and figures under short names."""

import getpass
from datetime import datetime

import pytest
from mlflow import MlflowClient

from grpo_tasks.tracking.description import stage_params
from grpo_tasks.tracking.handle import MARKER, RunHandle
from grpo_tasks.tracking.past_runs import _is_named
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.shown.headline import NOTE, run_title
from schemas.results.publication import Publication


@pytest.fixture
def config(database, make_config):
    return make_config(database)


@pytest.fixture
def client(config):
    return MlflowClient(config.tracking.tracking_uri)


@pytest.fixture
def publication(tmp_path):
    return Publication(
        key="2" * 16,
        directory=tmp_path,
        seconds=0.1,
        run_id="x",
        model_name="small model",
        model_version="3",
        champion=True,
        tests=[],
        reason="better than the base",
    )


def test_a_run_is_named_by_config_and_time_found_by_config(config, client):
    with open_run(config, key="k", flow_run_name="brisk-otter") as run:
        pass
    found = client.get_run(run.run_id)
    name, form, day, _ = found.info.run_name.rsplit(" ", 3)
    assert (name, form) == (config.name, "brisk-otter")
    datetime.strptime(day, "%Y-%m-%d")
    assert _is_named(found, config.name)
    assert _is_named(found, f"{config.name} brisk-otter")
    assert not _is_named(found, config.name[:-1])
    assert run_title("demo", None, datetime(2026, 11, 23, 5, 53)) == "demo 2026-11-23 05:53"


def test_the_description_says_the_decision_and_keeps_a_persons_text(config, client, publication):
    with open_run(config, key="k") as run:
        assert (
            client.get_run(run.run_id).data.tags[NOTE] == "GRPO from the base model `embedded:base`. Stages: format, correctness."
        )
        run.record(publication)
    tags = client.get_run(run.run_id).data.tags
    assert tags[NOTE].startswith(
        "**Promoted**: better than the base.\n\nModel: [small model version 3](#/models/small%20model/versions/3)"
    )
    assert tags["promoted"] == "yes"
    with open_run(config, key="k") as run:
        run.record(publication.model_copy(update={"key": "3" * 16, "champion": False, "reason": "no better"}))
    assert client.get_run(run.run_id).data.tags[NOTE].startswith("**Not promoted**: no better.")
    client.set_tag(run.run_id, NOTE, "This is the one for the paper.")
    with open_run(config, key="k") as run:
        run.record(publication.model_copy(update={"key": "4" * 16}))
    assert client.get_run(run.run_id).data.tags[NOTE] == "This is the one for the paper."


@pytest.mark.slow
@pytest.mark.parametrize("decided", [False, True])
def test_a_line_that_a_person_put_above_the_description_stays(config, client, publication, decided):
    with open_run(config, key="k") as run:
        if decided:
            run.record(publication)
    mine = f"For the paper.\n\n{client.get_run(run.run_id).data.tags[NOTE]}"
    client.set_tag(run.run_id, NOTE, mine)
    with open_run(config, key="k") as run:
        run.record(publication.model_copy(update={"key": "3" * 16, "reason": "no better"}))
    tags = client.get_run(run.run_id).data.tags
    assert tags[NOTE] == mine
    assert tags["grpo.decision"] == "no better"


def test_a_long_note_of_a_person_fits_the_description(config, client, publication):
    with open_run(config, key="k") as run:
        run.record(publication.model_copy(update={"reason": "approved by ann (" + "x" * 9_000}))
    assert len(client.get_run(run.run_id).data.tags[NOTE]) <= 8_000


def test_the_description_leads_back_to_prefect_before_and_after_the_decision(config, client, publication):
    page = "http://127.0.0.1:4200/runs/flow-run/1-2"
    with open_run(config, key="k", flow_run_id="1-2", flow_run_url=page) as run:
        assert client.get_run(run.run_id).data.tags[NOTE].startswith(f"[Flow run in Prefect]({page})\n\nGRPO from")
        run.record(publication)
    note = client.get_run(run.run_id).data.tags[NOTE]
    assert note.startswith("**Promoted**")
    assert f"[Flow run in Prefect]({page})" in note


def test_a_list_of_runs_shows_user_source_model_data_and_figures(config, client, data_report, make_evaluation, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/grpo", "run", "demo", "--set", "seed=3"])
    with open_run(config, key="k") as run:
        run.record(data_report)
        run.record(make_evaluation("base", 0.2))
        run.record(make_evaluation("merged", 0.9, "a" * 16))
    found = client.get_run(run.run_id)
    assert found.data.metrics["accuracy"] == 0.9
    assert found.data.metrics["format_rate"] == 0.9
    tags = found.data.tags
    assert tags["mlflow.user"] == getpass.getuser()
    assert tags["mlflow.source.name"] == "grpo run demo --set seed=3"
    assert tags["base_model"] == "embedded:base"
    assert tags["data"] == data_report.digest[:12]
    # What a person does not read is one tag, not a column for each step.
    assert [tag for tag in tags if tag.startswith(MARKER)] == [MARKER]
    assert len([tag for tag in tags if not tag.startswith("mlflow.")]) <= 10
    experiment = client.get_experiment(run.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


@pytest.mark.slow
def test_long_markers_span_tags_and_old_ones_are_read(config, client):
    with open_run(config, key="k") as run:
        client.set_tag(run.run_id, f"{MARKER}.train_stage.old", "true")
        run.handle = RunHandle(run.store, client.get_run(run.run_id))
        for number in range(200):
            assert run.handle.once(f"evaluate_model.{'x' * 40}.{number}", lambda: None)
    tags = client.get_run(run.run_id).data.tags
    assert f"{MARKER}.2" in tags
    again = RunHandle(run.store, client.get_run(run.run_id))
    assert not any(again.once(f"evaluate_model.{'x' * 40}.{number}", lambda: None) for number in range(200))
    assert not again.once("train_stage.old", lambda: None)


def test_the_parameters_of_two_stages_show_everything_that_differs(config, database, make_config):
    ours = stage_params(config, "format")
    assert ours["model.lora.r"] == "16"
    assert ours["rollout.temperature"] == "1.0"
    assert ours["reward.format.weight"] == "1.0"
    assert ours["reward.own.function"] == "my.rewards:own"
    assert ours["reward.own.params.needle"] == '["a", "b"]'
    assert ours["reward.own.time_limit_s"] == "30.0"
    assert ours["rewards.memory_limit_gb"] == "8.0"
    rewards = {"functions": {"own": {"function": "my.rewards:own", "weight": 2.0, "params": {"needle": ["a", "b"]}}}}
    model = {"lora": {"r": 8}}
    theirs = stage_params(make_config(database, rewards=rewards, model=model), "format")
    differ = {name for name in ours if ours[name] != theirs[name]}
    assert differ == {"reward.own.weight", "model.lora.r"}


DATA = {"train": [{"path": "train.jsonl"}], "system_prompt": "Answer in tags."}


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        ({"completion": {"equality": "exact"}}, {"completion.equality"}),
        ({"interaction": {"tools": ["my.tools:calculate"]}}, {"interaction.tools"}),
        ({"difficulty": {"success": 0.5}}, {"difficulty.success"}),
        ({"validation": {"max_prompt_length": 99}}, {"validation.max_prompt_length"}),
        ({"rollout": {"temperature": 0.7}}, {"rollout.temperature"}),
        ({"data": DATA | {"system_prompt": "Be brief."}}, {"data.system_prompt"}),
        (
            {"data": DATA | {"task_column": "kind", "tasks": {"sums": {"weight": 2}}}},
            {"data.task_column", "data.tasks", *(f"data.tasks.sums.{name}" for name in ("weight", "rewards", "answers"))},
        ),
        ({"seed": 7}, {"seed"}),
    ],
    ids=["completion", "interaction", "difficulty", "validation", "rollout", "system prompt", "tasks", "seed"],
)
def test_two_stages_that_differ_in_one_section_differ_in_its_parameters(config, database, make_config, changes, differ):
    ours, theirs = (stage_params(one, "format") for one in (config, make_config(database, **changes)))
    assert {name for name in ours | theirs if ours.get(name) != theirs.get(name)} == differ

"""A complete stage of kind sft: what it teaches, what it writes, and resume to the same bytes."""

import json
import shutil
from dataclasses import replace

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_tasks.content.hashes import folder_sha256
from schemas.errors import TrainingError
from schemas.metrics import describe
from tests.grpo.conftest import journal


@pytest.mark.slow
def test_demonstrations_teach_the_policy(sums):
    result, directory = sums.train(max_steps=12, learning_rate=3e-3)
    lines = journal(directory)
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["token_accuracy"] > lines[0]["token_accuracy"]
    assert (result.steps, result.stopped) == (12, "max_steps")
    assert [name for line in lines for name in line if describe(name) is None] == []


def test_an_epoch_trains_on_every_demonstration_once(sums):
    result, directory = sums.train(max_steps=None, num_train_epochs=1, per_device_train_batch_size=10, log_completions_steps=1)
    assert result.steps == 3
    tables = [pl.read_parquet(directory.completions(step)) for step in (1, 2, 3)]
    assert pl.concat(tables)["prompt_id"].n_unique() == 30


def test_several_solutions_of_one_question_are_all_trained_on(sums):
    path = sums.root / "train.parquet"
    rows = pq.read_table(path).to_pylist()
    # What `data.duplicates: keep` leaves: three rows with one prompt and one answer.
    rows = [rows[0] | {"line": line, "extra": json.dumps({"solution": f"way {line}"})} for line in (1, 2, 3)] + rows[3:]
    pq.write_table(pa.Table.from_pylist(rows), path)
    _, directory = sums.train(max_steps=1, per_device_train_batch_size=30, log_completions_steps=1)
    trained = pl.read_parquet(directory.completions(1))["completion"].to_list()
    assert sorted(text for text in trained if text.startswith("way")) == ["way 1", "way 2", "way 3"]


@pytest.mark.slow
def test_a_stage_that_was_killed_ends_in_the_same_bytes(sums):
    killed_at = 4
    settings = {"max_steps": 10, "save_steps": 2, "save_total_limit": 10, "model": {"lora": {"r": 4, "lora_dropout": 0.1}}}
    whole, directory = sums.train("whole", **settings)
    # What a kill leaves: checkpoints up to some update, a journal that went on, no result.
    killed = sums.write("killed", **settings)
    shutil.copytree(directory.checkpoints, killed.checkpoints)
    for checkpoint in killed.checkpoints.glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > killed_at:
            shutil.rmtree(checkpoint)
    lines = directory.journal.read_text().splitlines(keepends=True)
    killed.journal.write_text("".join(lines[: killed_at + 1]))
    again = sums.resume(killed)
    assert (again.resumed, again.sha256) == (1, whole.sha256)
    assert folder_sha256(killed.final) == folder_sha256(directory.final)
    figures = [{name: line[name] for name in ("loss", "grad_norm", "token_accuracy")} for line in journal(directory)]
    assert figures == [{name: line[name] for name in ("loss", "grad_norm", "token_accuracy")} for line in journal(killed)]


@pytest.mark.slow
def test_held_out_prompts_are_evaluated_by_the_rewards_of_the_stage(sums):
    result, directory = sums.train(
        max_steps=4, eval_steps=2, num_eval_prompts=4, learning_rate=3e-3, stage_rewards=["format", "correctness"]
    )
    assert [number for number, line in enumerate(journal(directory), 1) if "eval_reward" in line] == [2, 4]
    # At this learning rate the fourth update answers the four prompts no better than the second.
    assert journal(directory)[1]["eval_reward"] >= journal(directory)[3]["eval_reward"]
    assert result.best_step == 2


def test_a_loss_that_is_not_finite_is_refused_by_the_guard(sums, monkeypatch):
    """As in GRPO: no weight moves, and the guard decides."""
    from grpo_tasks.grpo.policies import Policies

    score = Policies.scores

    def broken(self, tokens, **options):
        found = score(self, tokens, **options)
        return replace(found, logps=found.logps * float("nan"))

    monkeypatch.setattr(Policies, "scores", broken)
    with pytest.raises(TrainingError, match="not finite"):
        sums.train(guards={"not_finite": "stop"})

"""Rewards of held-out completions, computed in the reward process and handed to the evaluation as columns."""

import json
import logging
import os
from dataclasses import replace

import polars as pl
import pytest

from grpo_tasks.rewards.held_out import CHUNK, reward_columns, solved_by_stage
from grpo_tasks.running.key import content_key
from schemas.config.completion import CompletionConfig
from schemas.config.run import RunConfig
from schemas.errors import RewardError

RIGHT = "<reasoning>15 + 27</reasoning><answer>42</answer>"
FUNCTIONS = """
import os

def size(completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]

def only_long(completions, **columns):
    return [1.0 if len(one[0]["content"]) > 9 else None for one in completions]

def process(completions, **columns):
    return [float(os.getpid()) for _ in completions]

def broken(completions, **columns):
    raise ValueError("no score today")
"""


def config(*, stage=("correctness",), functions=None, **evaluation):
    return RunConfig(
        data={"train": [{"path": "rows.jsonl"}]},
        stages=[{"name": "one", "rewards": list(stage)}],
        rewards={"functions": functions or {}},
        evaluation=evaluation,
    )


def scored(run, rows, texts):
    samples = pl.DataFrame(
        {"prompt_id": [row.prompt_id for row in rows], "completion": texts, "token_ids": [[1] * len(text) for text in texts]}
    )
    return reward_columns(samples, rows, run.scoring(), completion=run.completion, per_prompt=1)


def test_the_reward_is_the_last_stages_without_evaluators(own_module, make_row):
    own_module(FUNCTIONS)
    run = config(
        stage=("correctness", "long"),
        functions={"long": {"function": "my_rewards:only_long", "weight": 0.5}},
        evaluators={"size": "my_rewards:size"},
    )
    found = scored(run, [make_row(1), make_row(2), make_row(3, answer="41")], [RIGHT, "42", RIGHT])
    assert found["reward"].to_list() == [2.5, 0.0, 0.5]
    assert found["rewards/correctness/mean"].to_list() == [1.0, 0.0, 0.0]
    assert found["rewards/long/mean"].to_list() == [1.0, None, 1.0]
    assert found["rewards/size/mean"].to_list() == [float(len(RIGHT)), 2.0, float(len(RIGHT))]


def test_rows_without_ground_truth_or_with_several_are_scored_as_such(own_module, make_row):
    own_module(FUNCTIONS)
    rows = [replace(make_row(1), answer=None), replace(make_row(2), answer="7", answers=("7", "42")), make_row(3)]
    found = scored(config(), rows, [RIGHT] * 3)
    assert found["reward"].to_list() == [None, 2.0, 2.0]
    # The format of completions reaches the built-in functions.
    boxed = config().model_copy(update={"completion": CompletionConfig(format="boxed")})
    assert scored(boxed, [make_row(1)], ["So \\boxed{42}"])["reward"].to_list() == [2.0]


def test_functions_run_in_another_process_and_order_is_kept_over_many_chunks(own_module, make_row):
    own_module(FUNCTIONS)
    run = config(evaluators={"size": "my_rewards:size", "process": "my_rewards:process"}, rewards=[])
    rows = [make_row(line) for line in range(1, 2 * CHUNK + 10)]
    found = scored(run, rows, ["x" * row.line for row in rows])
    assert found["rewards/size/mean"].to_list() == [float(row.line) for row in rows]
    assert os.getpid() not in set(found["rewards/process/mean"])
    assert "reward" not in found.columns


@pytest.mark.slow
def test_a_failing_function_stops_or_is_left_out_by_on_error(own_module, make_row, caplog):
    own_module(FUNCTIONS)
    function = {"function": "my_rewards:broken"}
    with pytest.raises(RewardError, match="no score today"):
        scored(config(functions={"bad": function}, rewards=["bad"]), [make_row(1)], [RIGHT])
    skipping = config(functions={"bad": function | {"on_error": "skip"}}, rewards=["bad", "format"])
    with caplog.at_level(logging.WARNING):
        found = scored(skipping, [make_row(1)], [RIGHT])
    assert (found["reward"].to_list(), found["rewards/bad/mean"].to_list()) == ([1.0], [None])
    assert "no score today" in caplog.text


def test_an_evaluations_key_holds_its_functions_code_only(own_module):
    own_module(FUNCTIONS)
    functions = {"long": {"function": "my_rewards:only_long"}}
    with_own = config(stage=("long",), functions=functions)
    without = config(stage=("format",), functions=functions)
    nothing = config(stage=("long",), functions=functions, rewards=[])
    before = [content_key("evaluate_model", (), {"scoring": run.scoring()}) for run in (with_own, without, nothing)]
    own_module(FUNCTIONS.replace("> 9", "> 8"))
    after = [content_key("evaluate_model", (), {"scoring": run.scoring()}) for run in (with_own, without, nothing)]
    assert nothing.scoring() is None
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, True]


def test_each_stage_decides_by_its_own_rewards_what_is_solved(own_module, make_row):
    own_module(FUNCTIONS)
    stages = [
        {"name": "shape", "rewards": ["format"]},
        {"name": "long", "rewards": ["long"]},
        {"name": "all", "rewards": ["format", "correctness"]},
    ]
    run = RunConfig(
        data={"train": [{"path": "rows.jsonl"}]},
        stages=stages,
        rewards={"functions": {"long": {"function": "my_rewards:only_long"}}},
        difficulty={"samples": 2},
    )
    rows = [make_row(1), make_row(2, answer="41")]
    samples = pl.DataFrame(
        {
            "prompt_id": [row.prompt_id for row in rows for _ in range(2)],
            "completion": [RIGHT, "42", RIGHT, "41"],
            "token_ids": [[1]] * 4,
        }
    )
    found = solved_by_stage(samples, rows, run.difficulty_of(run.stages), per_prompt=2)
    assert found.to_dict(as_series=False) == {
        "shape": [1.0, 0.0, 1.0, 0.0],
        "long": [1.0, None, 1.0, None],
        "all": [1.0, 0.0, 0.0, 0.0],
    }


def played(text, error=None):
    """The column `conversation` of a completion of one turn."""
    turn = {"text": text, "start": 0, "end": 1, "finish_reason": "stop", "reward": None, "calls": 0, "errors": 0, "info": {}}
    turns = [turn | {"message": {"role": "assistant", "content": text}, "answers": []}]
    return json.dumps({"prompt": [], "turns": turns, "ending": "error" if error else "done", "error": error, "reward": None})


@pytest.mark.slow
def test_a_conversation_that_failed_has_the_lowest_scores_and_solves_nothing(own_module, make_row):
    own_module(FUNCTIONS)
    run = RunConfig(
        data={"train": [{"path": "rows.jsonl"}]},
        stages=[{"name": "one", "rewards": ["format", "long"]}, {"name": "brief", "rewards": ["length"]}],
        rewards={"functions": {"long": {"function": "my_rewards:only_long", "weight": -1.0}}},
        evaluation={"rewards": ["format", "long"]},
        difficulty={"samples": 2},
    )
    rows = [make_row(1), make_row(2)]
    faults = [None, "step hung", None, "step hung"]
    samples = pl.DataFrame(
        {
            "prompt_id": [row.prompt_id for row in rows for _ in range(2)],
            "completion": [RIGHT, RIGHT, "42", ""],
            "token_ids": [[1]] * 4,
            "conversation": [played(text, error) for text, error in zip([RIGHT, RIGHT, "42", ""], faults, strict=True)],
        }
    )
    found = reward_columns(samples, rows, run.scoring(), completion=run.completion, per_prompt=2)
    assert found["rewards/format/mean"].to_list() == [1.0, 0.0, 0.0, 0.0]
    assert found["rewards/long/mean"].to_list() == [1.0, 1.0, None, 1.0]
    assert found["reward"].to_list() == [0.0, -1.0, 0.0, -1.0]
    reached = solved_by_stage(samples, rows, run.difficulty_of(run.stages), per_prompt=2)
    assert [column[1::2].to_list() for column in reached] == [[0.0, 0.0]] * 2

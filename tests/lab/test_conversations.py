"""The lab tries rewards of conversations: made-up completions have no environment, samples of the base model have theirs."""

import json

import pytest

from grpo_tasks.lab.probes import GroupSample
from grpo_tasks.lab.run import run_lab

SMALL = {"num_rows": 3, "max_seconds_per_completion": 0.05}
OWN = '''
def last_turn(prompts, completions, turns, messages, environment_reward, **columns):
    """One number for each turn."""
    assert all(whole[: len(prompt)] == prompt for whole, prompt in zip(messages, prompts))
    return [[0.0] * (len(each) - 1) + [float(each[-1]["text"].count("4"))] for each in turns]
'''


def sample(row, *rewards):
    """A group of the base model: two turns each, and what the environment gave."""
    turn = {"finish_reason": "stop", "calls": 0, "errors": 0, "info": {}, "answers": [], "reward": None}
    turns = []
    for index, text in enumerate(("2+2?", "4")):
        said = {"text": text, "start": 2 * index, "end": 2 * index + 2, "message": {"role": "assistant", "content": text}}
        turns.append(turn | said)
    whole = {"prompt": [dict(message) for message in row.messages], "turns": turns, "ending": "done", "error": None}
    conversations = [json.dumps(whole | {"reward": reward}) for reward in rewards]
    return GroupSample(row.prompt_id, ["4"] * len(rewards), [[1] * 4] * len(rewards), conversations)


@pytest.fixture
def rows(make_row):
    return [make_row(number, str(number + 1), f"What is {number} + 1?") for number in range(11, 15)]


@pytest.mark.slow
def test_rewards_of_conversations_pass_the_lab_and_are_forecast(run_config, rows, own_module):
    own_module(OWN)
    entries = {"last_turn": {"function": "my_rewards:last_turn"}}
    config = run_config(
        {"played": ["environment"], "own": ["last_turn"]},
        rewards={"functions": entries},
        lab=SMALL,
        interaction={"environment": "my_game:Game"},
    )
    findings = run_lab(config, rows, [sample(rows[0], 0.0, 1.0), sample(rows[1], 1.0, 1.0)])
    assert [check for check in findings.checks if check.outcome == "failed" and check.check != "signal"] == []
    played, own = findings.forecasts
    assert (played.share_with_signal, played.mean_reward) == (0.5, 0.75)
    assert own.mean_reward == 0.5

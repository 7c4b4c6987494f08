"""What functions get of conversations, and what they may return: scores of completions, of turns, of tokens."""

import json
from dataclasses import replace

import pytest

from grpo_tasks.content.conversations import Played, played_of
from grpo_tasks.rewards.builtin import completion_text, environment, length, soft_overlong
from grpo_tasks.rewards.contract import ContractError, ScoreBatch, applicable, batch_of, check_result
from grpo_tasks.rewards.worker import RewardWorker
from schemas.config.completion import CompletionConfig
from schemas.config.rewards import RewardsConfig

SAID = [{"role": "assistant", "content": "2+2?"}, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4."}]
TURNS = [{"start": 0, "end": 2, "text": "2+2?"}, {"start": 5, "end": 9, "text": "It is 4."}]
SPANS = [[(0, 2), (5, 9)]]


def test_a_number_for_each_turn_spreads_over_its_tokens_and_counts_once():
    scores, tokens = check_result([[1.0, 4.0]], [9], SPANS)
    assert scores == [2.5]
    assert tokens == {0: [1.0] * 5 + [4.0] * 4}


def test_scores_per_token_are_averaged_over_the_tokens_of_the_policy():
    scores, tokens = check_result([[1.0, 1.0, 9.0, 9.0, 9.0, 4.0, 4.0, 4.0, 4.0]], [9], SPANS)
    assert scores == [3.0]
    assert tokens[0][2] == 9.0
    assert check_result([[1.0, 2.0, 3.0]], [3])[0] == [2.0]


def test_a_turn_without_tokens_has_its_number_too():
    assert check_result([[2.0]], [0], [[(0, 0)]]) == ([2.0], {0: []})


def test_any_other_count_is_a_fault():
    with pytest.raises(ContractError, match="3 numbers for a completion of 9 tokens"):
        check_result([[1.0, 2.0, 3.0]], [9], SPANS)


def test_an_environment_may_end_and_the_policy_is_judged_alone():
    assert completion_text([*SAID, {"role": "user", "content": "You win, score 100."}]) == "It is 4."
    assert completion_text([]) == ""


def test_the_reward_of_the_environment_is_a_function_of_its_own():
    assert environment([], [SAID, SAID], environment_reward=[0.5, None]) == [0.5, None]
    with pytest.raises(ValueError, match="requires interaction"):
        environment([], [SAID])


def test_lengths_count_what_the_policy_wrote():
    ids = [list(range(9))]
    free = CompletionConfig(format="none")
    settings = {"completion": free, "min_length": 6, "max_length": 6, "unit": "tokens"}
    assert length([], [SAID], ids, [TURNS], **settings) == [1.0]
    assert length([], [SAID], ids, **settings) == [0.5]
    # The limit is that of a turn: the longest has 4 tokens.
    assert soft_overlong([], [SAID], ids, [TURNS], max_completion_length=5, soft_punish_cache=2) == [-0.5]


def test_no_function_is_called_for_a_conversation_that_failed():
    played = [Played([], SAID, TURNS, 1.0), Played([], [], [], None, failed=True)]
    batch = ScoreBatch([[], []], ["a", ""], [[1], []], {}, played=played)
    assert applicable("format", batch, {}) == [0]
    assert batch.take([1]).played == [played[1]]


def test_a_table_gives_back_what_functions_get():
    answers = [[SAID[1]], []]
    turns = [turn | {"message": SAID[index * 2], "answers": answers[index]} for index, turn in enumerate(TURNS)]
    text = json.dumps(
        {"prompt": [{"role": "user", "content": "?"}], "turns": turns, "ending": "done", "error": None, "reward": 1.5}
    )
    assert played_of(text) == Played([{"role": "user", "content": "?"}], SAID, TURNS, 1.5)


TRL = """
def trl_reward(completions, environments, answer, **kwargs):
    return [float(environment.counter == int(goal)) for environment, goal in zip(environments, answer)]

def trl_missing(environments, **kwargs):
    return [environment.height for environment in environments]
"""


def test_a_reward_written_for_trl_reads_its_environments(own_module, make_row):
    own_module(TRL)
    names = ["trl_reward", "trl_missing"]
    rewards = RewardsConfig(functions={name: {"function": f"my_rewards:{name}"} for name in names})
    turns = [[*TURNS[:1], TURNS[1] | {"info": {"environment": {"counter": count}}}] for count in (42, 41)]
    played = [Played([], SAID, each, None) for each in turns]
    rows = [make_row(1), make_row(2)]
    with RewardWorker(rewards, names) as worker:
        batch = batch_of(rows, ["a", "b"], [[1] * 9] * 2, played=played)
        assert worker.call("trl_reward", batch, 10.0).scores == [1.0, 0.0]
        fault = worker.call("trl_missing", batch, 10.0)
        assert "no attribute 'height'" in fault.detail
        # Of completions that the lab makes up no environment can be asked.
        made_up = [replace(one, turns=TURNS, answered=False) for one in played]
        for name in names:
            assert worker.call(name, replace(batch, played=made_up), 10.0).scores == [None, None]


def test_a_column_with_the_name_of_an_argument_is_left_out(make_row):
    row = replace(make_row(1), extra={"environments": 1, "level": 2})
    assert batch_of([row], ["a"], [[1]]).columns.keys() == {"answer", "level"}

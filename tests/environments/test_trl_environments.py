"""Environments written for TRL: their methods are the tools, and their reward is asked once."""

import pytest

from schemas.errors import ConfigError

TRL = '''
import os

class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.goal = kwargs["goal"]
        assert kwargs["prompt"] == kwargs["messages"]
        return f" The goal is {self.goal}."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    async def crash(self) -> str:
        """Ends the process."""
        os._exit(7)

    @property
    def reward(self):
        return float(self.counter == self.goal)

class House(IncrementEnv):
    def step(self, left: int, right: int) -> int:
        """Steps.

        Args:
            left: To the left.
            right: To the right.
        """
        self.counter += right - left
        return self.counter

    def close(self, door: str) -> str:
        """Closes a door.

        Args:
            door: Which one.
        """
        return f"the {door} is closed"

class Ambiguous(IncrementEnv):
    def step(self, direction: str) -> str:
        """Steps.

        Args:
            direction: Where to.
        """
        return direction

class Scored(IncrementEnv):
    async def get_reward(self) -> float:
        return 10.0 * self.counter

class Unscored(IncrementEnv):
    def get_reward(self):
        return "much"
'''


def test_an_environment_written_for_trl_runs_unchanged(pool_of, call, row):
    pool = pool_of(TRL, environment="IncrementEnv")
    assert [one["function"]["name"] for one in pool.schemas()] == ["crash", "increment"]
    openings = pool.begin([(number, row("Count.", goal=3 + number), 0) for number in range(2)])
    assert [one.messages[0]["content"] for one in openings] == ["Count. The goal is 3.", "Count. The goal is 4."]
    first, second = pool.answer([(0, call("increment", step=1) + call("increment", step=2)), (1, call("increment", step=5))])
    assert [one["content"] for one in first.messages] == ["1", "3"]
    # What rewards written for TRL read from `environments`.
    assert first.info == {"environment": {"counter": 3, "goal": 3}}
    assert second.info == {"environment": {"counter": 5, "goal": 4}}
    (last,) = pool.answer([(0, "Done.")])
    assert (last.done, last.reward, last.info) == (True, None, {"environment": {"counter": 3, "goal": 3}})
    pool.begin([(2, row(goal=5), 0)])
    assert pool.answer([(2, "I do nothing.")])[0].info == {"environment": {"counter": 0, "goal": 5}}


def test_tools_may_have_the_names_of_our_methods(pool_of, call, row):
    pool = pool_of(TRL, environment="House")
    assert [one["function"]["name"] for one in pool.schemas()] == ["close", "crash", "increment", "step"]
    pool.begin([(0, row("Count.", goal=3), 0)])
    (observed,) = pool.answer([(0, call("step", left=1, right=3) + call("close", door="gate"))])
    assert [one["content"] for one in observed.messages] == ["2", "the gate is closed"]
    assert pool.answer([(0, "Done.")])[0].done


def test_a_step_that_may_be_a_tool_is_refused_with_fix(pool_of):
    with pytest.raises(ConfigError, match="step of own_0:Ambiguous may be a tool with the argument direction") as refused:
        pool_of(TRL, environment="Ambiguous").schemas()
    assert refused.value.fix == "rename the tool; or call the argument completion if step answers every turn"


def test_a_trl_environments_own_reward_is_asked_once(pool_of, call, row):
    pool = pool_of(TRL, environment="Scored")
    pool.begin([(number, row(goal=3), 0) for number in range(3)])
    observed = pool.answer([(number, call("increment", step=2 + number)) for number in range(3)])
    assert [one.reward for one in observed] == [None, None, None]
    done, crashed = pool.answer([(0, "Done."), (1, call("crash"))])
    assert (done.done, done.reward) == (True, 20.0)
    assert (crashed.done, crashed.reward, crashed.error) == (True, None, "crash ended its worker process (exit code 7)")
    # The last one has run out of turns.
    assert pool.end([0, 1, 2]) == [None, None, 40.0]


def test_a_reward_that_is_no_number_is_a_fault(pool_of, row):
    pool = pool_of(TRL, environment="Unscored")
    pool.begin([(0, row(goal=3), 0)])
    (observed,) = pool.answer([(0, "Done.")])
    fault = "get_reward returned the reward str: return a finite number, or None"
    assert (observed.reward, observed.error) == (None, fault)
    # The same for a conversation that ran out of turns or tokens.
    pool.begin([(1, row(goal=3), 0)])
    assert pool.end([1]) == [fault]

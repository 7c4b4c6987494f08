"""The checks of tools and environments before any training, each with one that passes and one that is found out."""

import textwrap

import pytest

from grpo_tasks.data.chat_tokens import load_counter
from grpo_tasks.lab.environment_checks import (
    IDLE,
    ODD,
    PERFECT,
    check_environment,
    check_interaction,
    percentile,
    perfect_turns,
    scripts_of,
)
from grpo_tasks.lab.run import weighed
from schemas.config.completion import CompletionConfig
from schemas.config.model import ModelConfig
from schemas.config.rewards import LabConfig
from schemas.config.rollout import InteractionConfig
from schemas.prompts import PromptRow
from tests.environments.conftest import TEMPLATE, pool_of, row

__all__ = ["pool_of", "row"]

ENVIRONMENTS = '''
import os, random, time

class Good:
    def reset(self, row, seed):
        self.random = random.Random(seed)
        self.left = 3
        return f" Say {row['word']}."

    def step(self, completion):
        self.left -= 1
        if completion == "up":
            return {"messages": [], "done": True, "reward": 1.0}
        return {"messages": f"{self.random.random()}", "done": self.left == 0, "reward": 0.0}

    def perfect(self, row):
        return ["wait", row["word"]]

class Global(Good):
    """Draws from the shared generator, which is seeded for it."""

    def step(self, completion):
        self.left -= 1
        up = completion == "up"
        return {"messages": f"{random.random()}", "done": up or self.left == 0, "reward": float(up)}

class Clock(Good):
    def step(self, completion):
        return {"messages": str(time.time_ns()), "done": completion == "up"}

class Leaks(Good):
    talked = {}

    def reset(self, row, seed):
        Leaks.talked = {"turns": 0}
        return super().reset(row, seed)

    def step(self, completion):
        Leaks.talked["turns"] += 1
        return {"messages": str(Leaks.talked["turns"]), "done": Leaks.talked["turns"] == 2}

class Pays(Good):
    def step(self, completion):
        return {"messages": [], "done": True, "reward": 1.0 if completion == "" else self.others}

class PaysSilence(Pays):
    others = -1.0

class PaysAll(Pays):
    others = 1.0

class Endless(Good):
    def step(self, completion):
        return "go on"

class Hangs(Good):
    def step(self, completion):
        if completion == "1":
            time.sleep(600)
        return super().step(completion)

class Crashes(Good):
    def step(self, completion):
        if completion == "":
            os._exit(5)
        return super().step(completion)

class Picky(Good):
    def step(self, completion):
        if completion not in ("", "up", "wait"):
            raise ValueError("what?")
        return super().step(completion)

class NotForAll(Good):
    def reset(self, row, seed):
        if seed == 1:
            raise ValueError("no board")
        return super().reset(row, seed)

class Slow(Good):
    def step(self, completion):
        time.sleep(0.2)
        return {"messages": [], "done": True, "reward": float(completion != "")}

class Wordy(Good):
    def reset(self, row, seed):
        return "Guess! " * 5_000

class BadPlayer(Good):
    def perfect(self, row):
        return 5

class Tools:
    def reset(self):
        self.total = 0

    def add(self, number: float, how: str | None = None) -> float:
        """Adds.

        Args:
            number: What to add.
            how: How.
        """
        self.total += number
        return self.total

    def get_reward(self):
        return self.total

def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b
'''


@pytest.fixture
def outcomes(pool_of, row):
    def trial(environment, **fields):
        pool = pool_of(ENVIRONMENTS, environment=environment, **{"max_turns": 4, "workers": 2} | fields)
        rows = [row("Play.", word="up"), row("Play.", word="up")]
        perfect = [one if isinstance(one, list) else None for one in perfect_turns(pool, rows)]
        scripts = scripts_of(rows, pool.schemas(), perfect=perfect, max_turns=pool.config.max_turns)
        checks, plays = check_environment(pool, scripts, name=environment, timeout_s=pool.config.timeout_s)
        return {one.check: one for one in checks}, plays

    return trial


def test_a_good_environment_passes_every_check(outcomes):
    for environment in ("Good", "Global"):
        found, plays = outcomes(environment)
        assert {name: one.outcome for name, one in found.items()} == dict.fromkeys(
            ("begins", "faults", "determinism", "leak", "speed", "ranking", "length"), "passed"
        )
        assert [play.script.kind for play in plays] == [PERFECT, IDLE, ODD] * 2
        assert found["ranking"].detail == "the perfect player earns 1 where the silent one earns 0"
        assert found["length"].detail == "the perfect player needs at most 2 turns"
        assert "ms (median)" in found["speed"].detail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "check", "outcome", "said"),
    [
        ("Clock", "determinism", "warned", "turn 1 is answered by"),
        ("Leaks", "leak", "failed", "a conversation goes another way while others run"),
        ("PaysSilence", "ranking", "failed", "the perfect player earns -1 where the silent one earns 1"),
        ("PaysAll", "ranking", "warned", "earns 1 where the silent one earns 1"),
        ("Endless", "length", "warned", "2 of 2 perfect conversations were not over"),
        ("Crashes", "faults", "failed", "step ended its worker process (exit code 5)"),
        ("Picky", "faults", "warned", "step raised ValueError: what?"),
        ("NotForAll", "begins", "failed", "2 of 5 conversations did not begin: reset raised ValueError: no board"),
    ],
)
def test_a_check_finds_what_it_is_for(outcomes, environment, check, outcome, said):
    found, _ = outcomes(environment)
    assert found[check].outcome == outcome
    assert said in found[check].detail
    assert found[check].fix
    # What differs by itself is not accused of a leak.
    assert ("leak" in found) == (environment != "Clock")


@pytest.mark.slow
def test_a_hang_is_found_and_a_slow_step_warned_about(outcomes):
    found, _ = outcomes("Hangs", timeout_s=1.0, workers=1)
    assert (found["faults"].outcome, found["faults"].probe) == ("failed", ODD)
    assert "step did not return within 1 s" in found["faults"].detail
    assert outcomes("Slow", timeout_s=0.35)[0]["speed"].outcome == "warned"


def test_every_tool_is_called_with_arguments_that_fit(outcomes):
    found, plays = outcomes("Tools")
    assert {one.outcome for one in found.values()} == {"passed"}
    odd = next(play for play in plays if play.script.kind == ODD)
    assert odd.observed[0].messages == [{"role": "tool", "name": "add", "content": "1.5"}]
    assert odd.reward == 1.5


@pytest.mark.slow
def test_a_player_that_fails_is_a_text(pool_of, row):
    pool = pool_of(ENVIRONMENTS, environment="BadPlayer")
    assert perfect_turns(pool, [row(word="up")]) == ["perfect raised TypeError: 'int' object is not iterable"]
    assert perfect_turns(pool_of(ENVIRONMENTS, environment="Tools"), [row()]) == [None]


def test_percentiles_are_values_that_occurred():
    assert [percentile(range(1, 101), share) for share in (0.5, 0.95, 1.0)] == [50, 95, 100]
    assert (percentile([7.0], 0.5), percentile([], 0.5)) == (7.0, 0.0)


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """The outcome of each check of the section `interaction` by the lab."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_play.py").write_text(textwrap.dedent(ENVIRONMENTS))

    def check(**fields):
        rows = [
            PromptRow(f"{n:016x}", "rows.jsonl", n, ({"role": "user", "content": "Play."},), str(n), 9, {"word": "up"})
            for n in (1, 2)
        ]
        found = check_interaction(
            InteractionConfig(**{"workers": 1, "timeout_s": 5.0, "max_turns": 3} | fields),
            rows,
            chat_template=TEMPLATE,
            count_tokens=load_counter(ModelConfig()).count,
            completion=CompletionConfig(),
        )
        return {one.check: weighed(one, LabConfig()).outcome for one in found}

    return check


@pytest.mark.slow
def test_the_lab_plays_tools_and_environments_and_faults_stop_the_run(checked):
    assert checked() == {}
    assert set(checked(tools=["own_play:multiply"]).values()) == {"passed"}
    assert set(checked(environment="own_play:Good").values()) == {"passed"}
    for name, check, outcome in (
        ("NotForAll", "begins", "failed"),
        ("Wordy", "begins", "failed"),
        ("Crashes", "faults", "failed"),
        ("BadPlayer", "perfect", "warned"),
        ("PaysSilence", "ranking", "warned"),
    ):
        assert checked(environment=f"own_play:{name}")[check] == outcome

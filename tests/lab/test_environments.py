"""The lab plays tools and environments with scripted turns, in real worker processes, before anything is sampled."""

import textwrap

import pytest

from grpo_tasks.data.chat_tokens import load_counter
from grpo_tasks.lab.environment_checks import check_interaction
from grpo_tasks.lab.run import weighed
from schemas.config.completion import CompletionConfig
from schemas.config.model import ModelConfig
from schemas.config.rewards import LabConfig
from schemas.config.rollout import InteractionConfig
from schemas.prompts import PromptRow

TEMPLATE = '{% if tools %}<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
GUESS = """
    class Guess:
        def reset(self, row, seed):
            self.answer = row["answer"]
        def step(self, completion):
            right = completion == self.answer
            return {"messages": [] if right else "No.", "done": right, "reward": float(right)}
        def perfect(self, row):
            return [row["answer"]]
"""
TOOLS = '''
    def multiply(a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: The first factor.
            b: The second factor.
        """
        return a * b
'''


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """The outcome of each check of tools or an environment in a module with this source."""
    monkeypatch.chdir(tmp_path)

    def check(source, **fields):
        (tmp_path / "own_play.py").write_text(textwrap.dedent(source))
        config = InteractionConfig(**{"workers": 1, "timeout_s": 5.0, "max_turns": 3} | fields)
        rows = [PromptRow(f"{n:016x}", "rows.jsonl", n, ({"role": "user", "content": "Guess."},), str(n), 9, {}) for n in (1, 2)]
        found = check_interaction(
            config,
            rows,
            chat_template=TEMPLATE,
            count_tokens=load_counter(ModelConfig()).count,
            completion=CompletionConfig(),
            log=tmp_path / "log.txt",
        )
        return {one.check: weighed(one, LabConfig()).outcome for one in found}

    return check


@pytest.mark.slow
def test_a_sound_environment_passes_and_so_do_tools(checked):
    assert set(checked(GUESS, environment="own_play:Guess").values()) == {"passed"}
    assert set(checked(TOOLS, tools=["own_play:multiply"]).values()) == {"passed"}


def test_without_tools_and_environment_there_is_nothing_to_check(checked):
    assert checked("") == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "check", "outcome"),
    [
        ('self.answer = row["answer"]', "raise OSError('no board')", "begins", "failed"),
        ('row["answer"]\n', 'row["answer"]; return "Guess! " * 5_000\n', "begins", "failed"),
        ("right = completion", "import os; os._exit(1); right = completion", "faults", "failed"),
        ('return [row["answer"]]', "raise ValueError('no player')", "perfect", "warned"),
        ('"reward": float(right)', '"reward": float(not completion)', "ranking", "warned"),
    ],
    ids=["begins", "long", "faults", "perfect", "ranking"],
)
def test_what_goes_wrong_is_named_and_faults_stop_the_run(checked, old, new, check, outcome):
    assert old in GUESS
    assert checked(GUESS.replace(old, new), environment="own_play:Guess")[check] == outcome

"""Environments of the package verifiers, unchanged: prompts, turns, tools and rubrics. Skipped where it is not installed."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_tasks.environments.pool import EnvironmentPool
from grpo_tasks.environments.verifiers_adapter import VerifiersEnvironment, write_rows
from schemas.config.rollout import InteractionConfig
from schemas.errors import ConfigError
from tests.environments.conftest import TEMPLATE

ADAPTER = "grpo_tasks.environments.verifiers_adapter:VerifiersEnvironment"

OWN = '''
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

def load_environment(num: int = 4, groups: bool = False):
    data = Dataset.from_list([{"question": f"What is {n} + 1?", "answer": str(n + 1), "info": {"n": n}} for n in range(num)])

    async def right(completion, answer, info) -> float:
        assert int(answer) == info["n"] + 1
        return 1.0 if answer in completion[-1]["content"] else 0.0

    async def rank(completions) -> list[float]:
        return [0.0 for _ in completions]

    rubric = vf.Rubric(funcs=[rank if groups else right])
    return vf.ToolEnv(dataset=data, tools=[add], rubric=rubric, max_turns=3, system_prompt="Use the tool.")
'''


@pytest.fixture
def verifiers():
    # Its loggers are ours to leave alone, and its warnings are those of libraries that it imports.
    return pytest.importorskip("verifiers")


@pytest.fixture
def own(verifiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_sums.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_sums"
    logging.getLogger("verifiers").handlers.clear()


def pool_for(name: str, folder: Path, **arguments) -> EnvironmentPool:
    settings = {"id": name, "arguments": arguments}
    config = InteractionConfig(environment=ADAPTER, settings=settings, module_dir=folder, workers=1, timeout_s=60.0)
    return EnvironmentPool(config, chat_template=TEMPLATE)


def rows_of(name: str, folder: Path, **arguments) -> list[dict]:
    write_rows(name, folder / "rows.jsonl", num=2, arguments=arguments)
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_tool_environment_runs_unchanged(own, tmp_path, call):
    rows = rows_of(own, tmp_path)
    assert [one["role"] for one in rows[0]["messages"]] == ["system", "user"]
    assert rows[1]["answer"] == "2"
    with pool_for(own, tmp_path) as pool:
        assert [one["function"]["name"] for one in pool.schemas()] == ["add"]
        openings = pool.begin([(number, row, 0) for number, row in enumerate(rows)])
        assert [one.messages for one in openings] == [row["messages"] for row in rows]
        first, second = pool.answer([(0, call("add", a=0, b=1)), (1, call("add", a=1, b="x"))])
        assert (first.messages, first.done, first.calls) == ([{"role": "tool", "content": "1"}], False, 1)
        assert "unsupported operand" in second.messages[0]["content"]
        (done,) = pool.answer([(0, "It is 1.")])
        assert (done.done, done.reward, done.error) == (True, 1.0, None)
        assert done.info == {"stop_condition": "no_tools_called"}
        # The second has run out of tokens, say: the rubric judges what there is.
        assert pool.end([0, 1]) == [None, 0.0]


@pytest.mark.slow
def test_the_rubric_pays_nothing_for_a_wrong_answer(own, tmp_path):
    (row, _) = rows_of(own, tmp_path)
    with pool_for(own, tmp_path) as pool:
        pool.begin([(0, row, 0)])
        (done,) = pool.answer([(0, "It is 7.")])
        assert (done.done, done.reward) == (True, 0.0)


def test_a_rubric_that_compares_a_group_is_refused(own, tmp_path):
    with pytest.raises(ConfigError, match="compares the conversations of a group in rank"):
        pool_for(own, tmp_path, groups=True).schemas()


@pytest.mark.slow
def test_an_environment_that_is_not_there_is_refused(verifiers, tmp_path):
    with pytest.raises(ConfigError, match="no-such-thing cannot be loaded") as refused:
        pool_for("no-such-thing", tmp_path).schemas()
    assert "install its package" in refused.value.fix


@pytest.mark.slow
def test_an_environment_of_reasoning_gym_runs_unchanged(verifiers, tmp_path):
    reasoning_gym = pytest.importorskip("reasoning_gym")
    name = "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv"
    arguments = {"gym": "chain_sum", "num_train_examples": 2, "num_eval_examples": 1}
    rows = rows_of(name, tmp_path, **arguments)
    right = reasoning_gym.create_dataset("chain_sum", size=3, seed=0)
    with pool_for(name, tmp_path, **arguments) as pool:
        pool.begin([(number, row, 0) for number, row in enumerate(rows)])
        turns = [(0, f"<answer>{right[0]['answer']}</answer>"), (1, "I do not know")]
        assert [(one.done, one.error, one.reward == 1.0) for one in pool.answer(turns)] == [
            (True, None, True),
            (True, None, False),
        ]


def test_without_verifiers_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "verifiers", None)
    with pytest.raises(ConfigError, match="verifiers cannot be imported") as refused:
        VerifiersEnvironment("not-loaded-before")
    assert refused.value.fix == "pip install 'verifiers>=0.1.9,<0.1.10'"

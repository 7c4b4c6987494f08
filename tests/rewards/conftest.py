"""Rows, configurations, and a user's reward functions in a temporary working directory, with workers that run them."""

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_tasks.rewards.contract import ScoreBatch, batch_of
from grpo_tasks.rewards.worker import Loaded, RewardWorker
from schemas.config.rewards import RewardsConfig
from schemas.config.run import RunConfig
from schemas.errors import ConfigError, UserError
from schemas.prompts import PromptRow


@pytest.fixture(scope="session")
def make_row() -> Callable[..., PromptRow]:
    def make(line: int = 1, answer: str = "42", question: str = "What is 15 + 27?", **extra: Any) -> PromptRow:
        return PromptRow(f"{line:016x}", "train.jsonl", line, ({"role": "user", "content": question},), answer, 9, extra)

    return make


@pytest.fixture(scope="session")
def make_batch(make_row) -> Callable[..., ScoreBatch]:
    def make(*completions: str, answer: str = "42", step: int = 0, **extra: Any) -> ScoreBatch:
        rows = [make_row(line, answer, **extra) for line in range(1, len(completions) + 1)]
        return batch_of(rows, completions, [[1, 2, 3] for _ in completions], step=step)

    return make


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write a module into the working directory and return its name."""
    monkeypatch.chdir(tmp_path)

    def write(source: str, name: str = "my_rewards") -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        return name

    return write


@pytest.fixture
def worker_of(request, own_module, rewards_config, tmp_path) -> Iterator[Callable[..., RewardWorker]]:
    """Start a worker with one function of the test module's FUNCTIONS; its output goes to log.txt."""
    own_module(request.module.FUNCTIONS)
    opened = []

    def make(name: str, *, memory_limit_gb: float = 8.0, **settings: Any) -> RewardWorker:
        config = rewards_config(**{name: {"function": f"my_rewards:{name}", **settings}})
        config = config.model_copy(update={"memory_limit_gb": memory_limit_gb})
        opened.append(RewardWorker(config, [name], log=tmp_path / "log.txt").__enter__())
        return opened[-1]

    yield make
    for worker in opened:
        worker.close()


@pytest.fixture
def refusal_of(rewards_config) -> Iterator[Callable[..., UserError]]:
    """The error of loading an entry, all in one process."""
    worker = RewardWorker(rewards_config(), ["mine"])
    worker.start()

    def load(**entry: Any) -> UserError:
        message = {"rewards": rewards_config(mine=entry).model_dump(mode="json"), "completion": {}, "names": ["mine"]}
        reply = worker.exchange("load", message, Loaded, limit_s=60.0, max_bytes=2**20)
        assert isinstance(reply.error, ConfigError), entry
        return reply.error

    yield load
    worker.close()


@pytest.fixture(scope="session")
def rewards_config() -> Callable[..., RewardsConfig]:
    """Rewards with these functions: name -> settings."""

    def make(**functions: dict[str, Any]) -> RewardsConfig:
        return RewardsConfig.model_validate({"functions": functions})

    return make


@pytest.fixture(scope="session")
def run_config() -> Callable[..., RunConfig]:
    """A run whose stages have these rewards: stage -> names."""

    def make(stages: dict[str, list[str]], **sections: Any) -> RunConfig:
        listed = [{"name": name, "rewards": rewards} for name, rewards in stages.items()]
        return RunConfig.model_validate({"data": {"train": [{"path": "train.jsonl"}]}, "stages": listed} | sections)

    return make

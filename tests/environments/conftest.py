"""Pools of real worker processes over modules that a test writes."""

import itertools
import json
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_tasks.environments.pool import EnvironmentPool
from schemas.config.rollout import InteractionConfig

TEMPLATE = '{% if tools %}<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
"""A chat template that shows tools as Qwen's does."""


@pytest.fixture
def pool_of(tmp_path: Path) -> Iterator[Callable[..., EnvironmentPool]]:
    """Make a pool: source of a module, then `tools` or `environment` by name in it, and fields of the section."""
    pools: list[EnvironmentPool] = []
    numbers = itertools.count()

    def make(source: str, *, tools: list[str] | None = None, environment: str | None = None, **fields: Any) -> EnvironmentPool:
        module = f"own_{next(numbers)}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        config = InteractionConfig(
            tools=[f"{module}:{name}" for name in tools or []],
            environment=environment and f"{module}:{environment}",
            module_dir=tmp_path,
            **{"workers": 1} | fields,
        )
        pools.append(EnvironmentPool(config, chat_template=TEMPLATE, log=tmp_path / "log.txt"))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="session")
def call() -> Callable[..., str]:
    """The text of a call as Qwen writes it."""

    def write(name: str, **arguments: Any) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    return write


@pytest.fixture(scope="session")
def row() -> Callable[..., dict[str, Any]]:
    """The columns of a row."""

    def make(question: str = "What is 2 + 3?", **columns: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}], **columns}

    return make

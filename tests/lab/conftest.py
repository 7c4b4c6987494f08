"""The rows, own modules and configurations of the reward tests, and shorter texts where speed is not the question."""

import pytest

from tests.rewards.conftest import make_row, own_module, rewards_config, run_config

__all__ = ["make_row", "own_module", "rewards_config", "run_config", "short_long_texts"]


@pytest.fixture
def short_long_texts(monkeypatch):
    """Long probes of 110,000 instead of a million characters."""
    monkeypatch.setattr("grpo_tasks.lab.probes.LONG_CHARS", 110_000)

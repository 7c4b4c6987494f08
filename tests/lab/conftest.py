"""The rows and reward modules of tests/rewards, and the judge of tests/judging."""

from tests.judging.conftest import address, endpoint, settings
from tests.rewards.conftest import make_batch, make_row, own_module, refusal_of, rewards_config, run_config

__all__ = [
    "address",
    "endpoint",
    "make_batch",
    "make_row",
    "own_module",
    "refusal_of",
    "rewards_config",
    "run_config",
    "settings",
]

"""The rows and reward modules of tests/rewards."""

from tests.rewards.conftest import make_batch, make_row, own_module, rewards_config, run_config

__all__ = ["make_batch", "make_row", "own_module", "rewards_config", "run_config"]

"""Stages to train, as in the tests of the engine."""

from tests.grpo.conftest import stages  # noqa: F401 - a fixture

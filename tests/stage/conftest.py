"""Stages to train, as in the tests of the engine."""

from tests.grpo.conftest import stages, train  # noqa: F401 - fixtures

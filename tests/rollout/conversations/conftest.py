import pytest

from grpo_tasks.rollout.local import LocalEngine
from tests.rollout.counting import six_starts, three_rows


@pytest.fixture
def engine(policy, tokenizer):
    return LocalEngine(policy, tokenizer)


@pytest.fixture(scope="session")
def rows():
    return three_rows()


@pytest.fixture
def starts():
    return six_starts()

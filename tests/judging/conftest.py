"""A judge behind a real local server."""

import pytest

from schemas.config.rewards import JudgeConfig
from tests.judging.endpoint import Endpoint, fair, serving


@pytest.fixture
def endpoint():
    return Endpoint(fair)


@pytest.fixture
def address(endpoint):
    with serving(endpoint) as url:
        yield url


@pytest.fixture
def settings(address, tmp_path):
    """Settings of a judge at that server; arguments change them."""

    def make(**changes):
        given = {
            "base_urls": [address],
            "model": "judge",
            "rubric": [{"name": "clarity", "description": "Is it clear?"}],
            "cache": tmp_path / "cache",
            "max_outage_s": 0.0,
        }
        return JudgeConfig(**given | changes)

    return make
